"""The report as one HTML page: no script, nothing from elsewhere, for screen, phone and paper, light and dark.

The order of a section is that of a reader's questions: what came out, from which start, how it got there, what was cut
and why, conditioning, heads, cost, the paper, and how to do it again. What was not measured is named at its end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import leansurgeon
from leansurgeon.errors import UsageError
from leansurgeon.report import html_bench, html_heads, html_reproduce, html_results, html_surgery
from leansurgeon.report.collect import Collection
from leansurgeon.report.html import Markup, join, prose, sentence, tag
from leansurgeon.report.html_results import Entries
from leansurgeon.report.html_style import STYLE
from leansurgeon.report.notes import notes, title
from leansurgeon.report.rows import Section
from leansurgeon.report.verdict import sentences, verdicts, warnings
from leansurgeon.training.runs.folder import write_text

# The browser itself refuses what the page must not do: run a script, load anything, send a form.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
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


def write(path: Path, found: Sequence[Section], collection: Collection) -> None:
    """Write the page to `path`, whole or not at all; a link stays, and what it points to is written.

    Raises `UsageError` where that is no place for a file.
    """
    if path.is_dir():
        raise UsageError(f"--html {path}: that is a folder.", f"Name a file, such as {path / 'report.html'}.")
    if path.exists() and not path.is_file():  # a page that is put in its place would replace /dev/null itself
        raise UsageError(f"--html {path}: that is no ordinary file.", "Name a file, such as report.html.")
    if not path.parent.is_dir():
        raise UsageError(f"--html {path}: there is no folder {path.parent}.", "Make it first, or choose another file.")
    try:
        write_text(Path(os.path.realpath(path)), page(found, collection))
    except UsageError as error:
        raise UsageError(f"--html {error.message}", "Choose another file.") from None


def page(found: Sequence[Section], collection: Collection) -> str:
    """The whole page."""
    entries = {str(entry.path): entry for entry in collection.entries}
    heading = "leansurgeon report"
    name = f"{heading}: {', '.join(section.name for section in found)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", name),
        tag("style", Markup(STYLE)),
    )
    links = [tag("li", tag("a", s.name, href=f"#s{i}")) for i, s in enumerate(found, 1)]
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", heading),
            tag("nav", tag("ul", links), aria_label="Contents") if len(found) > 1 else None,
        ),
        tag("main", [section_block(s, i, entries) for i, s in enumerate(found, 1)]),
        left_out(collection.problems),
        tag("footer", sentence(f"Made by leansurgeon {leansurgeon.__version__}. {HOW}"), class_="foot"),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


HOW = "This page needs nothing but itself; `leansurgeon report --json` has the tables for programs."


def left_out(problems: Sequence[str]) -> Markup | None:
    return tag("section", tag("h3", "Could not be read"), prose(problems)) if problems else None


def section_block(section: Section, index: int, entries: Entries) -> Markup:
    """One experiment, the runs of one task, or the untrained models."""
    parts: list[tuple[str, Markup | None]] = [("Results", html_results.results(section))]
    if section.kind != "glue":  # its runs have a section of their own
        parts += details(section, entries)
    parts.append(("How to read the figures", prose(notes(section), "quiet")))
    missing = [] if section.kind == "glue" else not_measured(section, entries, {name for name, made in parts if made})
    return tag(
        "section",
        tag("h2", title(section)),
        prose(sentences(verdicts(section)), "lead"),
        [tag("p", sentence(warning), class_="warn") for warning in warnings(section)],
        [join(tag("h3", name), made) for name, made in parts if made],
        join(tag("h3", "Not measured"), prose(missing)) if missing else None,
        id=f"s{index}",
    )


def details(section: Section, entries: Entries) -> list[tuple[str, Markup | None]]:
    """Everything about a section that stands behind its results, with its heading; None where there is nothing."""
    return [
        ("Starting points", html_results.starts(section, entries)),
        ("Training curves", html_results.curves(section, entries)),
        ("What was cut, and why", html_surgery.surgeries(section, entries)),
        ("Conditioning", html_results.conditioning(section)),
        ("Head importance", html_heads.head_maps(section, entries)),
        ("Memory and speed", html_results.cost(section, entries)),
        ("Speed apart from training", html_bench.benches(section, entries)),
        ("The paper", html_reproduce.paper(section, entries)),
        ("Do it again", html_reproduce.reproduce(section, entries)),
    ]


def not_measured(section: Section, entries: Entries, shown: set[str]) -> list[str]:
    """What this section could have shown, and how to get it."""
    wanted = GET if section.kind != "models" else {}  # what these measure is kept in the folders of runs
    missing = [how for name, how in wanted.items() if name not in shown]
    if any(row.memory and not row.on_gpu for row in section.rows):
        missing.append(GET_PREDICTED)
    if html_surgery.cut_but_not_compared(section, entries):
        missing.append(html_surgery.GET_STARTS)
    return missing
