"""Report: runs and shrunk models side by side, as tables, charts and one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.report.evidence.collect import Collection, collect
from leansurgeon.report.places import check_file, check_folder
from leansurgeon.report.rows.rows import Section
from leansurgeon.report.rows.sections import sections
from leansurgeon.report.tables.table import render

if TYPE_CHECKING:
    from leansurgeon.report.charts.forms import Chart


@dataclass(frozen=True)
class Picture:
    """A chart with its words, as SVG; a notebook shows it."""

    title: str
    says: str
    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


def pictures(charts: Iterable[Chart]) -> list[Picture]:
    """Charts as pictures."""
    from leansurgeon.report.charts.render import drawn

    return [Picture(chart.title, chart.says, drawn(chart.drawing)) for chart in charts]


@dataclass(frozen=True)
class Report:
    """What was found, and its tables. `problems` has a sentence for each file that could not be used."""

    collection: Collection
    sections: tuple[Section, ...]

    @property
    def problems(self) -> list[str]:
        """What was passed over, and why."""
        return self.collection.problems

    def text(self, format: str = "table", *, wide: bool = False, kappa: bool = False) -> str:
        """The tables as table, markdown, csv, json or latex. Raises `UsageError` for another format."""
        return render(
            self.sections, format, wide=wide, kappa=kappa, problems=self.problems, unfinished=self.collection.unfinished
        )

    def __str__(self) -> str:
        return self.text()

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        return jsonfile.parse(self.text("json"), "the report")

    def charts(self) -> list[Picture]:
        """The charts of every table, as a notebook shows them."""
        from leansurgeon.report.charts.sections import every

        return pictures(chart for section in self.sections for chart in every(section))

    def html(self, file: str | Path) -> Path:
        """Write everything into one page."""
        path = Path(file)
        check_file(path)  # before altair is imported
        from leansurgeon.report.page.page import write

        write(path, self.sections, self.collection)
        return path

    def plots(self, folder: str | Path) -> list[Path]:
        """Write the charts as SVG, PNG and PDF; returns the files. Raises `UsageError` for a folder that cannot be."""
        check_folder(Path(folder))
        from leansurgeon.report.charts.render import draw

        return list(draw(Path(folder), self.sections))


def report(paths: Sequence[Path] = (), workspace: Path = Path("runs")) -> Report:
    """Collect the named runs and models, or all in the workspace. Raises `UsageError` where there is nothing."""
    collection = collect(paths, workspace)
    return Report(collection, tuple(sections(collection.entries)))
