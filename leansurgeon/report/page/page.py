"""The report as one HTML page: no script, no external resources; for screen, phone and paper, light and dark.

A section opens with the model's name, the date, three tiles (size, quality, speed) and the verdict. Then come the
results, the training, what was cut and why, conditioning, heads, cost, and how to reproduce it. Its end lists what was
not measured.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError, plural
from leansurgeon.reading.values import text
from leansurgeon.report import humans
from leansurgeon.report.charts.forms import COLOURS
from leansurgeon.report.charts.render import svg
from leansurgeon.report.charts.sections import of_section
from leansurgeon.report.collect import Collection
from leansurgeon.report.notes import notes, setting
from leansurgeon.report.page.parts import (
    Block,
    Cell,
    Code,
    Facts,
    Group,
    Part,
    cell,
    figures,
    shorten,
    show_benches,
    show_changes,
    show_conditioning,
    show_cost,
    show_cuts,
    show_results,
)
from leansurgeon.report.page.parts import sentences as as_words
from leansurgeon.report.rows import Row, Section
from leansurgeon.report.runs import Run, describe_comparison
from leansurgeon.report.tables.columns import define_columns, show_seconds
from leansurgeon.report.verdict import conclude, controls_of, warnings
from leansurgeon.training.runs.folder import call_in, write_text
from leansurgeon.version import __version__

# The browser blocks what the page must not do: run a script, load anything, send a form.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
HOW = "This page needs nothing but itself; `leansurgeon report --json` has the tables for programs."
TEMPLATES = Path(__file__).parent / "templates"
# What a section can hold, and how to get it if it is missing.
GET = {
    "Training curves": "Training curves: keep metrics.jsonl beside summary.json in the folder of a run.",
    "Conditioning": "Conditioning: `leansurgeon kappa RUN` measures it; or put `measure: {kappa: {}}` into the recipe.",
    "Speed apart from training": "Latency, throughput and memory by attention backend: `leansurgeon bench RUN`.",
    "Head importance": "Head importance: `leansurgeon heads RUN` measures it; this report then shows it.",
}
GET_SPEED = "`leansurgeon bench MODEL` measures it."


@dataclass(frozen=True)
class Tile:
    """One value with what it is compared with; `caveats` may decide whether the comparison counts."""

    name: str
    figure: Cell
    beside: str
    caveats: Sequence[str] = ()


def write(path: Path, sections: Sequence[Section], collection: Collection) -> None:
    """Write the page to `path` atomically; for a link, write its target. Raises `UsageError` if that cannot
    be written.
    """
    try:
        write_text(Path(os.path.realpath(path)), page(sections, collection))
    except UsageError as error:
        raise UsageError(f"--html {error.message}", "Choose another file.") from None


def page(sections: Sequence[Section], collection: Collection) -> str:
    """Return the whole page: a chapter for each experiment, the runs of each task, and the untrained models."""
    chapters = []
    for i, section in enumerate(sections, 1):
        row, shown = headline(section), make_parts(section)
        titles = {part.title for part in shown}
        # What the missing parts measure is stored in the folders of runs.
        get = {} if section.kind in ("glue", "models") else GET
        chapters.append(
            {
                "anchor": f"s{i}",
                "name": name_section(section, row),
                "under": describe_section(section, row),
                "tiles": make_tiles(section, row) if row and section.kind != "glue" else [],
                "verdicts": conclude(section),
                "warnings": warnings(section),
                "parts": shown,
                "missing": [how for title, how in get.items() if title not in titles],
            }
        )
    heading = chapters[0]["name"] if len(chapters) == 1 else "leansurgeon report"
    return load_template().render(
        chapters=chapters,
        heading=heading,
        unfinished=collection.unfinished,
        problems=collection.problems,
        policy=POLICY,
        foot=f"Made by leansurgeon {__version__}. {HOW}",
    )


def make_parts(section: Section) -> list[Part]:
    """Return the parts of a section; every note is placed where it belongs, or in a part of its own at the end."""
    left, made = notes(section), []
    for title, show, about in PARTS:
        if section.kind == "glue" and title != "Results":  # its runs have their own section
            continue
        blocks = show(section)
        if not blocks:
            continue
        here = [note for note in left if note.about in about]
        left = [note for note in left if note not in here]
        quiet = as_words((note.says for note in here if not note.caveat), "quiet")
        caveats = tuple(note.says for note in here if note.caveat)
        made.append(Part(title, (*blocks, *quiet), caveats))
    if left:
        made.append(Part("How to read the figures", tuple(as_words((note.says for note in left), "quiet"))))
    return made


# -- what a section opens with --------------------------------------------------------------------


def headline(section: Section) -> Row | None:
    """Return the row that the tiles show: the best lean arm, else the first row, which is the newest."""
    lean = [row for row in section.rows if row.role == "lean"]
    known = [row for row in lean if row.metric] if section.task else []
    if known:
        sign = 1 if section.task.higher_is_better else -1
        return max(known, key=lambda row: sign * row.metric.mean)
    return next(iter((*lean, *section.rows)), None)


def name_section(section: Section, row: Row | None) -> str:
    """Return the section's name for a reader: the experiment, or the run or model itself."""
    if section.kind in ("experiment", "glue") or row is None:
        return section.name
    return row.name if len(section.rows) == 1 else f"{row.name} and {plural(len(section.rows) - 1, 'other')}"


def describe_section(section: Section, row: Row | None) -> str:
    """Return `digits-vit, cut to 3 layers of 8 heads; digits, 360 evaluation samples, cpu; 31 January 2026`: the model
    that all began with, what was measured, and the day on which the newest run ended.
    """
    first, source = section.original or row, ""
    if first is not None and first.runs and section.kind != "glue":
        run = first.runs[0]
        source = shorten(run.summary.model.source or (text(run.cut.source.name, "?") if run.cut else ""))
    model = [source] if source not in ("", name_section(section, row)) else []
    if row is not None and row.shape and row.cut and row.cut.plan.before != row.cut.plan.after:
        model.append(f"cut to {row.shape['depth']} layers of {row.shape['heads']} heads")
    when = max((run.when for run in section.runs), default=0.0)
    day = datetime.fromtimestamp(when, UTC)
    date = f"{day.day} {day:%B %Y}" if when > 0 else ""
    return "; ".join(filter(None, [", ".join(model), ", ".join(setting(section)), date]))


def make_tiles(section: Section, row: Row) -> list[Tile]:
    """Return size, quality and speed of a row, each beside the rows it is compared with: for a lean one the original
    and the controls.
    """
    others = [section.original, *controls_of(row, section.rows)] if row.role == "lean" else []
    others = [other for other in others if other is not None and other.metric]

    def caveats(*about: str) -> list[str]:
        """Return the caveats of notes `about` these subjects."""
        return [note.says for note in notes(section) if note.caveat and note.about in about]

    beside = []
    if row.reference_parameters and row.role != "original":
        of, change = section.original, humans.change(row.parameters, row.reference_parameters)
        beside = [f"{change} against {of.name if of else 'its source'}: {row.reference_parameters:,}"]
    figure = cell(humans.count(row.parameters), row.parameters, "parameters")
    tiles = [Tile("Size", figure, join_clauses(beside))]
    if section.task is None or row.metric is None:
        tiles.append(Tile("Quality", Cell("not trained yet"), describe_comparison(row.cut) if row.cut else ""))
    else:
        shown, lean = define_columns(section)["metric"], [other for other in section.rows if other.role == "lean"]
        best = f"{row.name}, the best of {plural(len(lean), 'lean arm')} in this figure" if len(lean) > 1 else row.name
        beside = [best, *(f"{other.name} {shown.cell(other)}" for other in others)]
        figure = cell(shown.cell(row), row.metric.mean, section.task.label)
        tiles.append(Tile("Quality", figure, join_clauses(beside), caveats("quality")))
    if row.latency:
        beside = [f"{one.name} {show_seconds(one.latency)}" for one in others if one.latency]
        beside += [f"memory {humans.memory(row.inference_memory)}"] if row.inference_memory else []
        figure = cell(show_seconds(row.latency), row.latency.median, "to answer one sample")
        return [*tiles, Tile("Speed", figure, join_clauses(beside))]
    if row.step_ms is None:
        return [*tiles, Tile("Speed", Cell("not measured"), GET_SPEED)]
    beside = [f"{other.name} {humans.plain(other.step_ms.mean)} ms" for other in others if other.step_ms]
    if row.memory:
        beside.append(f"peak memory {humans.memory(row.memory.mean)}{'' if row.on_gpu else ' of the process'}")
    figure = cell(humans.plain(row.step_ms.mean), row.step_ms.mean, "ms a step of training")
    return [*tiles, Tile("Speed", figure, join_clauses(beside), caveats("speed", "memory"))]


def join_clauses(clauses: Iterable[str]) -> str:
    """Join the clauses by semicolons into a sentence, with non-breaking spaces before per cent signs."""
    said = "; ".join(clauses).replace(" %", "\u00a0%")
    return f"{said}." if said else ""


# -- how to do it again -----------------------------------------------------------------------------


def show_commands(section: Section) -> list[Block]:
    """Return what was run, on what, and how to run it again."""
    runs, kappas = section.runs, [row.kappa for row in section.rows if row.kappa]
    if not runs:
        return []
    first = runs[0].summary
    amounts = [(first.task.train_samples, "to train"), (first.task.eval_samples, "to evaluate")]
    source, licence = (text(first.task.data.get(key)) for key in ("source", "licence"))
    seeds = [(row.name, sorted(seed for seed in row.seeds if seed is not None)) for row in section.rows if row.seeds]
    by_row = {name: ", ".join(map(str, known)) for name, known in seeds}
    same = len(set(by_row.values())) == 1
    dates = sorted({run.summary.finished for run in runs} - {""})
    pairs = {
        "seeds": "; ".join(list(by_row.values())[:1] if same else (f"{name}: {said}" for name, said in by_row.items())),
        "samples": ", ".join(f"{n:,.0f} {what}" for n, what in amounts if n is not None),
        "kappa": f"{humans.join_words(dict.fromkeys(str(k.samples) for k in kappas))} samples" if kappas else "",
        "data": f"{source} ({licence})" if licence else source,
        "hardware": humans.join_words(dict.fromkeys(run.summary.device for run in runs if run.summary.device)),
        "precision": humans.join_words(dict.fromkeys(row.precision for row in section.rows if row.precision)),
        "software": ", ".join(f"{name} {version}" for name, version in first.versions.items()),
        "finished": " to ".join((*dates[:1], *dates[1:][-1:])),
    }
    file = next((run.experiment_file for run in runs if run.experiment_file), None)
    if section.kind != "experiment":
        lines = [line for row in section.rows for run in row.runs[:1] for line in list_commands(run)]
    elif file and file.call:  # as it was typed, with its --set and --seeds
        lines = [show_call(file.call)]
    else:
        name = shlex.quote(file.path.name if file else section.name.split(",")[0])
        note = "the file below" if file else "and the --set of the first call, if there was one"
        known = ",".join(map(str, seeds[0][1] if seeds else [0]))
        lines = [f"leansurgeon run {name} --seeds {known}    # {note}"]
    blocks = [Code("\n".join(lines))] if lines else []
    if facts := tuple(pair for pair in pairs.items() if pair[1]):
        blocks.append(Facts(facts))
    for run in runs:  # the settings in full: those of the experiment if `run` wrote them
        file = run.experiment_file
        said = file.text if file else run.recipe or ""
        # The command in the first line may name folders of this machine.
        said = said.split("\n", 1)[-1] if call_in(said) else said
        if said:
            whose = "the experiment" if file else f"{run.path.name} (every run has its own in its folder)"
            blocks.append(Group(f"Recipe of {whose}, with every setting", (Code(said.rstrip()),), folded=True))
            break
    return blocks


def list_commands(run: Run) -> list[str]:
    """Return the commands that lead to one model or run: the cut, and the training after it."""
    made = call_in(f"# {run.cut.call}") if run.cut else ""  # checked: a record may hold any text
    lines = [show_call(made)] if made else []
    if run.kind == "run":
        call = shlex.split(call_in(run.recipe or ""))  # its own recipe records the model it began with
        model = shlex.quote(shorten(call[2])) if len(call) > 2 else "MODEL"
        # A run's recipe is resolved and holds all its settings.
        lines.append(f"leansurgeon retrain {model} --recipe {shlex.quote(f'{run.path.name}/recipe.yaml')}")
    return lines


def show_call(call: str) -> str:
    """Return a recorded command without the folders of this machine."""
    return shlex.join(shorten(word) if word.startswith("/") else word for word in shlex.split(call))


# The headings of a section, their contents, and the notes that belong there.
PARTS: tuple[tuple[str, Callable[[Section], list[Block]], tuple[str, ...]], ...] = (
    ("Results", show_results, ("quality", "runs")),
    ("What changed for real samples", show_changes, ()),
    ("Training curves", lambda s: figures(of_section(s, "Training curves")), ()),
    ("What was cut, and why", show_cuts, ()),
    ("Conditioning", show_conditioning, ("kappa",)),
    ("Head importance", lambda s: figures(of_section(s, "Head importance")), ()),
    ("Memory and speed", show_cost, ("memory", "speed")),
    ("Speed apart from training", show_benches, ()),
    ("Do it again", show_commands, ()),
)


# -- template -------------------------------------------------------------------------------------


def load_template() -> Any:
    """Load the template of the page; undefined names in it are errors."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def printable(value: str | float | None) -> str | float | None:
        """Replace control characters, which could affect the browser or the encoder; escaping happens later."""
        if not isinstance(value, str) or isinstance(value, Markup):
            return value
        return "".join(c if c.isprintable() or c in "\n\t\u00a0" else "?" for c in value)

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    style = (
        f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"@media print{{:root{{color-scheme:light;{light}}}}}\n{(TEMPLATES / 'page.css').read_text(encoding='utf-8')}"
    )
    made.globals["style"] = Markup(style)  # a file of this package
    made.filters["svg"] = lambda chart: Markup(svg(chart))  # written by an XML library, which escapes
    made.filters["pieces"] = lambda line: line.split("`")
    made.filters["kind"] = lambda block: type(block).__name__
    return made.get_template("page.html.j2")
