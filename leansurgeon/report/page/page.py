"""The report as one HTML page: no script, nothing from elsewhere, for screen, phone and paper, light and dark.

A section opens with the model's name, the date, three tiles and the verdict. Then come a reader's questions: what came
out, from which start, how it got there, what was cut and why, conditioning, heads, cost, the paper, and how to do it
again. What was not measured is named at its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError
from leansurgeon.report.charts.palette import COLOURS
from leansurgeon.report.charts.render import svg
from leansurgeon.report.charts.sections import of_section
from leansurgeon.report.evidence.collect import Collection
from leansurgeon.report.notes import notes
from leansurgeon.report.page import again, cut, results
from leansurgeon.report.page.blocks import Block, Part, figures, words
from leansurgeon.report.page.tiles import Tile, name_of, tiles, under_the_name
from leansurgeon.report.places import check_file
from leansurgeon.report.rows.rows import Section
from leansurgeon.report.verdict import sentences, verdicts, warnings
from leansurgeon.training.runs.folder import write_text
from leansurgeon.version import __version__

# The browser itself refuses what the page must not do: run a script, load anything, send a form.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
HOW = "This page needs nothing but itself; `leansurgeon report --json` has the tables for programs."
TEMPLATES = Path(__file__).parent / "templates"
# The headings of a section, what stands under them, and the notes that concern it.
PARTS: tuple[tuple[str, Callable[[Section], list[Block]], tuple[str, ...]], ...] = (
    ("Results", results.results, ("quality", "runs")),
    ("Starting points", results.starts, ()),
    ("Training curves", lambda s: figures(of_section(s, "Training curves")), ()),
    ("What was cut, and why", cut.surgeries, ()),
    ("Conditioning", results.conditioning, ("kappa",)),
    ("Head importance", lambda s: figures(of_section(s, "Head importance")), ()),
    ("Memory and speed", results.cost, ("memory", "speed")),
    ("Speed apart from training", results.benches, ()),
    ("The paper", again.paper, ()),
    ("Do it again", again.reproduce, ()),
)
# What a section can hold, and how to get it where it is not there.
GET = {
    "Training curves": "Training curves: keep metrics.jsonl beside summary.json in the folder of a run.",
    "Conditioning": "Conditioning: `leansurgeon kappa RUN` measures it; or put `measure: {kappa: {}}` into the recipe.",
    "Speed apart from training": "Latency, throughput and memory by attention backend: `leansurgeon bench RUN`.",
    "Head importance": "Head importance: `leansurgeon heads RUN` measures it; this report then shows it.",
}
GET_PREDICTED = (
    "Predicted memory: it is that of a GPU, so runs on a CPU have no counterpart; `leansurgeon plan SOURCE` says it."
)


@dataclass(frozen=True)
class Chapter:
    """A section as the templates want it."""

    anchor: str
    name: str
    under: str
    tiles: tuple[Tile, ...]
    verdicts: tuple[str, ...]
    warnings: tuple[str, ...]
    parts: tuple[Part, ...]
    missing: tuple[str, ...]


def write(path: Path, sections: Sequence[Section], collection: Collection) -> None:
    """Write the page to `path`, whole or not at all; a link stays, and what it points to is written.

    Raises `UsageError` where that is no place for a file.
    """
    check_file(path)
    try:
        write_text(Path(os.path.realpath(path)), page(sections, collection))
    except UsageError as error:
        raise UsageError(f"--html {error.message}", "Choose another file.") from None


def page(sections: Sequence[Section], collection: Collection) -> str:
    """The whole page."""
    chapters = [chapter(section, i) for i, section in enumerate(sections, 1)]
    heading = chapters[0].name if len(chapters) == 1 else "leansurgeon report"
    return template("page.html.j2").render(
        chapters=chapters,
        heading=heading,
        unfinished=collection.unfinished,
        problems=collection.problems,
        policy=POLICY,
        foot=f"Made by leansurgeon {__version__}. {HOW}",
    )


def chapter(section: Section, index: int) -> Chapter:
    """One experiment, the runs of one task, or the untrained models."""
    parts = parts_of(section)
    return Chapter(
        anchor=f"s{index}",
        name=name_of(section),
        under=under_the_name(section),
        tiles=tuple(tiles(section)),
        verdicts=tuple(sentences(verdicts(section))),
        warnings=tuple(warnings(section)),
        parts=tuple(parts),
        missing=tuple(not_measured(section, {part.title for part in parts})),
    )


def parts_of(section: Section) -> list[Part]:
    """What a section has to show; every note stands with what it concerns, or in a part of its own at the end."""
    left, made = notes(section), []
    for title, show, about in PARTS:
        if section.kind == "glue" and title != "Results":  # its runs have a section of their own
            continue
        blocks = show(section)
        if not blocks:
            continue
        here = [note for note in left if note.about in about]
        left = [note for note in left if note not in here]
        quiet = words((note.says for note in here if not note.caveat), "quiet")
        caveats = tuple(note.says for note in here if note.caveat)
        made.append(Part(title, (*blocks, *quiet), caveats))
    if left:
        made.append(Part("How to read the figures", tuple(words((note.says for note in left), "quiet"))))
    return made


def not_measured(section: Section, shown: set[str]) -> list[str]:
    """What this section could have shown, and how to get it."""
    if section.kind == "glue":
        return []
    wanted = GET if section.kind != "models" else {}  # what these measure is kept in the folders of runs
    missing = [how for name, how in wanted.items() if name not in shown]
    if any(row.memory and not row.on_gpu for row in section.rows):
        missing.append(GET_PREDICTED)
    if cut.cut_but_not_compared(section):
        missing.append(cut.GET_STARTS)
    return missing


# -- templates ------------------------------------------------------------------------------------


def template(name: str) -> Any:
    """A template of the page by its file's name; undefined names in it are errors."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["style"] = Markup(style())  # our own file
    made.filters["svg"] = lambda chart: Markup(svg(chart))  # written by an XML library, which escapes
    made.filters["pieces"] = lambda line: line.split("`")
    return made.get_template(name)


def printable(value: str | float | None) -> str | float | None:
    """Names from a file must steer neither the browser nor the encoder; escaping comes behind this."""
    from markupsafe import Markup

    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in "\n\t\u00a0" else "?" for c in value)


def variables(index: int) -> str:
    """The palette as CSS variables; `index` 0 is the light scheme, 1 the dark one."""
    return "".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items())


def style() -> str:
    """The style sheet, with the colours of the charts as variables: for screen, phone and print, light and dark."""
    sheet = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    return (
        f":root{{color-scheme:light dark;{variables(0)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"
        f"@media print{{:root{{color-scheme:light;{variables(0)}}}}}\n{sheet}"
    )
