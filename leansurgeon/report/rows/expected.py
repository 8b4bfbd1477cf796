"""What a recipe expects of its arms (`expected:`) beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from leansurgeon.intervals import degrees_of_freedom, needed_errors
from leansurgeon.report.humans import Spread
from leansurgeon.report.rows.rows import Row, Section, Task
from leansurgeon.report.verdict import variance_of_test

DEBUG = "-debug"  # ends the name of an experiment that was only tried out: nothing is expected of it


@dataclass(frozen=True)
class Expected:
    """One figure of one row. `agrees` is None where one seed cannot tell; parameters must be the same number."""

    name: str
    figure: str
    expected: float
    measured: float
    agrees: bool | None


def expectations(section: Section) -> list[Expected]:
    """Every figure that the recipe of a row expects and this report has measured."""
    return [one for row in section.rows for one in of_row(row, section)]


def of_row(row: Row, section: Section) -> Iterator[Expected]:
    """Every expected figure of a row that was measured, with whether it was met."""
    wanted = wanted_of(row, section)
    for figure, value in wanted.items():
        if figure == "parameters" and row.parameters is not None:
            yield Expected(row.name, figure, value, row.parameters, row.parameters == value)
            continue
        measured = measured_as(figure, row, section.task)
        if measured is not None:
            yield Expected(row.name, figure, value, measured.mean, within(value, measured, row, section.task))


def wanted_of(row: Row, section: Section) -> Mapping[str, float]:
    """By the name of its arm; a single run by its number of parameters, where the recipe tells its arms apart by it."""
    run = next(iter(row.runs), None)
    if run is None or section.name.endswith(DEBUG) or section.kind == "models":
        return {}
    if section.kind == "runs":
        same = [arm for arm in run.expected.values() if arm.get("parameters") == row.parameters]
        return same[0] if len(same) == 1 and row.parameters is not None else {}
    return run.expected.get(row.name, {})


def measured_as(figure: str, row: Row, task: Task | None) -> Spread | None:
    """The measured values that an expected figure's name stands for; None if there are none."""
    if row.scores and figure in row.scores:
        return row.scores[figure]
    if task is not None and figure == task.metric:
        return row.metric
    return row.loss if figure == "loss" else None


def within(value: float, measured: Spread, row: Row, task: Task | None) -> bool | None:
    """Whether the seeds and the size of the test set allow the expected value; None for one seed."""
    if measured.n < 2:
        return None
    of_test = variance_of_test(row, task) if task is not None and measured is row.metric else 0.0
    error = (measured.error**2 + of_test) ** 0.5
    freedom = degrees_of_freedom(error, [(measured.error, measured.n)])
    return abs(measured.mean - value) <= needed_errors(freedom) * error
