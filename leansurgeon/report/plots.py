"""`report --plots`: the charts of a report as PNG and SVG files, drawn by matplotlib (an extra, imported on use)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.report import by_heads, folder
from leansurgeon.report.collect import Collection
from leansurgeon.report.conditioning import Bound
from leansurgeon.report.html_results import entries_of, metric_format, short_count
from leansurgeon.report.html_style import COLOURS, SERIES
from leansurgeon.report.rows import Section
from leansurgeon.report.svg import Series, cropped, form, plain_small

FORMATS = ("png", "svg")
DASHES = ("-", "--", ":", "-.", (0, (12, 3)), (0, (6, 2, 1, 2, 1, 2)))
MARKS = ("o", "s", "^", "D", "v", "P")
SIZE = (6.4, 4.2)  # inches


def check(directory: Path) -> None:
    """Raises `UsageError` where matplotlib is missing or `directory` is no place for files, before any work."""
    above = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "cannot be written to" if above.is_dir() else "is a file"
        raise UsageError(f"--plots {directory} cannot be made: {above} {why}.", "Choose another folder.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        hint = "pip install 'leansurgeon[plots]', or leave it out."
        raise UsageError("--plots needs matplotlib, which is not installed.", hint) from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plots {directory} cannot be made: {error.strerror}.", "Choose another folder.") from None


def draw(directory: Path, found: Sequence[Section], collection: Collection) -> list[Path]:
    """Draw what every section has the figures for; returns the files, named after section and chart."""
    import matplotlib
    from matplotlib.figure import Figure

    entries = {str(entry.path): entry for entry in collection.entries}
    written: list[Path] = []
    # Names come from files, and `$` would begin a formula; text stays text in SVG, so that it can be searched.
    settings = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "leansurgeon", "font.size": 10}
    with matplotlib.rc_context(settings):
        for name, section in zip(names(found), found, strict=True):
            for chart, fill in CHARTS:
                figure = Figure(SIZE, layout="constrained")
                if fill(figure, section, entries):
                    written += saved(figure, directory / f"{name}-{chart}")
    return written


def names(found: Sequence[Section]) -> list[str]:
    """A file name for every section, each once."""
    made: list[str] = []
    for section in found:
        stem = re.sub(r"[^\w.-]+", "-", section.name).strip("-.") or "section"
        taken = made.count(stem) or any(other.startswith(f"{stem}-") for other in made)
        made.append(f"{stem}-{len(made) + 1}" if taken else stem)
    return made


def saved(figure: Any, stem: Path) -> list[Path]:
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in FORMATS]
    try:
        for file in files:
            # No date in a file: the same figures give the same bytes.
            figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise LeanSurgeonError(f"{file} cannot be written: {error.strerror}.", "Choose another --plots.") from None
    return files


def look(section: Section, name: str, *, points: bool = True) -> dict[str, Any]:
    """Colour, dash and mark of a row, the same in every chart of its section."""
    i = [row.name for row in section.rows].index(name)
    found = {"color": COLOURS[f"c{i % SERIES}"][0], "label": name}
    return found | {"linestyle": DASHES[form(i)]} | ({"marker": MARKS[form(i)]} if points else {})


def finished(axes: Any, x: str, y: str, *, legend: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#d0d5dc", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not legend:
        return
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), fontsize=8, frameon=False)


def logarithmic(axes: Any) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(lambda value, _: plain_small(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def metric_axis(axis: Any, section: Section) -> None:
    show = metric_format(section)
    axis.set_major_formatter(lambda value, _: show(value))


def parameters(figure: Any, section: Section, _entries: dict) -> bool:
    """The metric against parameters, with the standard deviation over seeds."""
    known = [row for row in section.rows if row.metric and row.parameters]
    if section.task is None or len(known) < 2:
        return False
    axes = figure.subplots()
    for row in known:
        style = look(section, row.name) | {"linestyle": "none", "capsize": 3}
        axes.errorbar(row.parameters, row.metric.mean, yerr=row.metric.sd or None, **style)
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
    metric_axis(axes.yaxis, section)
    finished(axes, "parameters", section.task.label)
    return True


def curves(figure: Any, section: Section, entries: dict) -> bool:
    """The metric over the epochs, and the training loss, one line for every seed."""
    found = [(row, c) for row in section.rows for e in entries_of(row, entries) if (c := folder.curve(e))]
    if section.task is None or not found:
        return False
    figure.set_size_inches(SIZE[0] * 1.7, SIZE[1])
    left, right = figure.subplots(1, 2)
    for row, curve in found:
        style = look(section, row.name, points=False)
        for axes, points in ((left, curve.metric), (right, curve.loss)):
            if points:
                axes.plot(*zip(*points, strict=True), **style)
    metric_axis(left.yaxis, section)
    _, edge = cropped([Series(row.name, curve.metric) for row, curve in found], section.task.higher_is_better)
    if edge is not None:  # the first steep way would squeeze all else
        left.set_ylim(**{"bottom" if section.task.higher_is_better else "top": edge})
    if all(b > 0 for _, curve in found for _, b in curve.loss):
        logarithmic(right)
    finished(left, "epoch", section.task.label)
    finished(right, "epoch", "training loss")
    return True


def heads(figure: Any, section: Section, _entries: dict) -> bool:
    """Metric and kappa against heads, one curve for every depth and MLP: the paper's figures 3 and 5."""
    found = by_heads.sweep(section)
    if section.task is None or not found:
        return False
    figure.set_size_inches(SIZE[0] * 1.7, SIZE[1])
    left, right = figure.subplots(1, 2)
    for i, curve in enumerate(found):
        style = {"color": COLOURS[f"c{i % SERIES}"][0], "label": curve.name}
        style |= {"linestyle": DASHES[form(i)], "marker": MARKS[form(i)]}
        if arms := [(n, row.metric) for n, row in curve.arms if row.metric]:
            spread = [metric.sd or 0.0 for _, metric in arms]
            bars = {"yerr": spread, "capsize": 3} if any(spread) else {}
            left.errorbar(*zip(*((n, metric.mean) for n, metric in arms), strict=True), **bars, **style)
        if arms := [(n, row.kappa.median) for n, row in curve.arms if row.kappa and row.kappa.median]:
            bounds(right, arms, style)
    metric_axis(left.yaxis, section)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    finished(left, "heads", section.task.label, legend=False)
    if right.has_data():
        logarithmic(right)
        finished(right, "heads", "kappa, median over layers", legend=False)
    else:
        right.set_axis_off()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return True


def bounds(axes: Any, points: Sequence[tuple[int, Bound]], style: dict[str, Any]) -> None:
    """A line, with hollow marks where a figure is only a lower bound."""
    axes.plot([x for x, _ in points], [bound.value for _, bound in points], **style)
    hollow = [(x, bound.value) for x, bound in points if not bound.exact]
    if hollow:
        edge = {"linestyle": "none", "marker": style["marker"], "color": style["color"], "markerfacecolor": "white"}
        axes.plot(*zip(*hollow, strict=True), **edge)


def kappa(figure: Any, section: Section, _entries: dict) -> bool:
    """Kappa of every layer; hollow marks are lower bounds."""
    known = [(row, [(x.layer, x.median) for x in row.kappa.layers if x.median]) for row in section.rows if row.kappa]
    known = [(row, points) for row, points in known if points]
    if not known:
        return False
    axes = figure.subplots()
    for row, points in known:
        style = look(section, row.name)
        bounds(axes, points, style)
    logarithmic(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    finished(axes, "layer", "kappa, median over samples")
    return True


CHARTS = (("parameters", parameters), ("heads", heads), ("curves", curves), ("kappa", kappa))
