"""What a section opens with: the model, the date, and three tiles: size, quality, speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from leansurgeon.errors import plural
from leansurgeon.report import humans
from leansurgeon.report.notes import notes, setting
from leansurgeon.report.page.blocks import Cell, cell
from leansurgeon.report.page.cut import shortened
from leansurgeon.report.rows.rows import Row, Section
from leansurgeon.report.tables.columns import metric_columns
from leansurgeon.report.verdict import controls_of

GET_SPEED = "`leansurgeon bench MODEL` measures it."


@dataclass(frozen=True)
class Tile:
    """One figure with what it is compared with; `caveats` may decide whether the comparison counts."""

    name: str
    figure: Cell
    beside: str
    caveats: tuple[str, ...] = ()


def headline(section: Section) -> Row | None:
    """The row whose figures the tiles show: the best lean arm, else the first row, which is the newest."""
    lean = [row for row in section.rows if row.role == "lean" and row.metric]
    if lean and section.task is not None:
        sign = 1 if section.task.higher_is_better else -1
        return max(lean, key=lambda row: sign * row.metric.mean)
    return next((row for row in section.rows if row.role == "lean"), section.rows[0] if section.rows else None)


def name_of(section: Section) -> str:
    """What a reader calls it: the experiment, or the run or model itself."""
    row = headline(section)
    if section.kind in ("experiment", "glue") or row is None:
        return section.name
    return row.name if len(section.rows) == 1 else f"{row.name} and {plural(len(section.rows) - 1, 'other')}"


def under_the_name(section: Section) -> str:
    """`digits-vit, cut to 3 layers of 8 heads; digits, 360 evaluation samples, cpu; 31 January 2026`."""
    row = headline(section)
    model = [source_of(section)] if source_of(section) not in ("", name_of(section)) else []
    if row is not None and row.shape and row.cut and row.cut.changes_shape:
        model.append(f"cut to {row.shape['depth']} layers of {row.shape['heads']} heads")
    said = [", ".join(model), ", ".join(setting(section)), date_of(section)]
    return "; ".join(filter(None, said))


def source_of(section: Section) -> str:
    """The model that all of it began with."""
    row = section.original or headline(section)
    run = row.runs[0] if row is not None and row.runs else None
    if run is None or section.kind == "glue":
        return ""
    return shortened(run.summary.model.source or (run.cut.source if run.cut else ""))


def date_of(section: Section) -> str:
    """The day on which the newest of its runs ended."""
    when = max((run.when for run in section.runs), default=0.0)
    if when <= 0:
        return ""
    day = datetime.fromtimestamp(when, UTC)
    return f"{day.day} {day:%B %Y}"


def tiles(section: Section) -> list[Tile]:
    """Size, quality and speed of the section's foremost row; none for GLUE."""
    row = headline(section)
    if row is None or section.kind == "glue":
        return []
    return [size(section, row), quality(section, row), speed(section, row)]


def caveats(section: Section, *about: str) -> tuple[str, ...]:
    """The sentences of those notes that qualify a figure `about` such a thing."""
    return tuple(note.says for note in notes(section) if note.caveat and note.about in about)


def size(section: Section, row: Row) -> Tile:
    """The row's parameters, and their change from the original or the source."""
    beside = []
    if row.reference_parameters and row.role != "original":
        of = section.original.name if section.original else "its source"
        beside.append(
            f"{humans.change(row.parameters, row.reference_parameters)} against {of}: {row.reference_parameters:,}"
        )
    return Tile("Size", cell(humans.count(row.parameters), row.parameters, "parameters"), sentence(beside))


def quality(section: Section, row: Row) -> Tile:
    """The row's metric beside that of the rows it is compared with."""
    if section.task is None or row.metric is None:
        return Tile("Quality", Cell("not trained yet"), row.cut.compared if row.cut else "")
    shown = next(column for column in metric_columns(section) if column.key == "metric")
    lean = [other for other in section.rows if other.role == "lean"]
    best = f"{row.name}, the best of {plural(len(lean), 'lean arm')} in this figure" if len(lean) > 1 else row.name
    beside = [best, *(f"{other.name} {shown.cell(other)}" for other in compared_with(section, row))]
    figure = cell(shown.cell(row), row.metric.mean, section.task.label)
    return Tile("Quality", figure, sentence(beside), caveats(section, "quality"))


def compared_with(section: Section, row: Row) -> list[Row]:
    """The original and the controls of a lean row, those that have a metric."""
    if row.role != "lean":
        return []
    others = [section.original, *controls_of(row, section.rows)]
    return [other for other in others if other is not None and other.metric]


def speed(section: Section, row: Row) -> Tile:
    """Milliseconds a training step takes, beside those of the rows compared, and peak memory."""
    if row.step_ms is None:
        return Tile("Speed", Cell("not measured"), GET_SPEED)
    beside = [
        f"{other.name} {humans.plain(other.step_ms.mean)} ms" for other in compared_with(section, row) if other.step_ms
    ]
    if row.memory:
        beside.append(f"peak memory {humans.memory(row.memory.mean)}{'' if row.on_gpu else ' of the process'}")
    figure = cell(humans.plain(row.step_ms.mean), row.step_ms.mean, "ms a step of training")
    return Tile("Speed", figure, sentence(beside), caveats(section, "speed", "memory"))


def sentence(parts: Iterable[str]) -> str:
    """The parts joined by semicolons into a sentence, with unbroken percentages."""
    said = "; ".join(parts).replace(" %", "\u00a0%")
    return f"{said}." if said else ""
