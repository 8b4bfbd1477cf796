"""Report: compare runs and shrunk models, as tables, charts and one page."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from leansurgeon.commands import in_memory
from leansurgeon.commands.command import Command
from leansurgeon.commands.options import Data, Seconds, Workspace
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject, parse
from leansurgeon.request import Opt, Request

if TYPE_CHECKING:
    from leansurgeon.report.charts.forms import Chart
    from leansurgeon.report.collect import Collection
    from leansurgeon.report.rows import Section


def list_folders(given: str | os.PathLike[str] | Iterable[os.PathLike[str]]) -> list[Path]:
    """Return paths and results as folders: for a training its run, which has the scores; for everything else its
    folder.
    """
    single = isinstance(given, str | os.PathLike) or hasattr(given, "folder")
    several = [given] if single else list(given or ())
    return [one.run if hasattr(one, "run") else Path(in_memory.place(one, "paths")) for one in several]


class ReportRequest(Request):
    """What to compare, and how to show it."""

    paths: Annotated[
        list[Path],
        BeforeValidator(list_folders),
        Opt(
            "Runs, shrunk models, or folders of them. Default: all in the workspace.",
            metavar="[RUN|MODEL ...]",
            positional=True,
        ),
    ] = Field(default_factory=list)
    format: Annotated[str, Opt("table, markdown, csv, json or latex.", "Output")] = "table"
    wide: Annotated[bool, Opt("All columns, however wide.", "Output")] = False
    kappa: Annotated[bool, Opt("Conditioning, one row per layer.", "Output")] = False
    html: Annotated[
        Path | None, Opt("Also write an HTML page with everything, to share.", "Output", metavar="FILE")
    ] = None
    plots: Annotated[Path | None, Opt("Also write charts as SVG, PNG and PDF.", "Output", metavar="DIR")] = None
    measure: Annotated[
        bool, Opt("Measure the models named, the original first: quality, memory, latency, kappa.", "Data")
    ] = False
    data: Annotated[
        Data | None, Opt("With --measure: what they are judged on. Default: what one was trained on.", "Data", cli=str)
    ] = None
    columns: Annotated[str | None, Opt("What a table's columns are: text=COLUMN,label=COLUMN.", "Data")] = None
    time: Annotated[Seconds | None, Opt("With --measure: how long it may take: 2m.", "Data", cli=str)] = None
    workspace: Workspace = Path("runs")


@dataclass(frozen=True)
class Report:
    """The runs found, and their tables. `problems` has a sentence for each file that could not be used."""

    collection: Collection
    sections: tuple[Section, ...]
    request: ReportRequest = field(repr=False)

    @property
    def problems(self) -> list[str]:
        """What was skipped, and why."""
        return self.collection.problems

    def text(self, format: str = "table", *, wide: bool = False, kappa: bool = False) -> str:
        """Return the tables as table, markdown, csv, json or latex. Raises `UsageError` for another format."""
        from leansurgeon.report.tables.render import render

        return render(
            self.sections, format, wide=wide, kappa=kappa, problems=self.problems, unfinished=self.collection.unfinished
        )

    def __str__(self) -> str:
        return self.text(self.request.format, wide=self.request.wide, kappa=self.request.kappa)

    def as_dict(self) -> JsonObject:
        """Return what --json prints."""
        return parse(self.text("json", wide=self.request.wide, kappa=self.request.kappa), "the report")

    def _repr_markdown_(self) -> str:
        """Return what a notebook shows."""
        return self.text("markdown")

    def charts(self) -> list[Chart]:
        """Return the charts of every table, as a notebook shows them."""
        from leansurgeon.report.charts.sections import every

        return [chart for section in self.sections for chart in every(section)]

    def html(self, file: str | Path) -> Path:
        """Write everything to one HTML page."""
        path = Path(file)
        if path.is_dir():
            raise UsageError(f"--html {path}: that is a folder.", f"Name a file, such as {path / 'report.html'}.")
        if path.exists() and not path.is_file():  # the finished page would replace /dev/null itself
            raise UsageError(f"--html {path}: that is no ordinary file.", "Name a file, such as report.html.")
        if not path.parent.is_dir():
            raise UsageError(
                f"--html {path}: there is no folder {path.parent}.", "Make it first, or choose another file."
            )
        from leansurgeon.report.page.page import write

        write(path, self.sections, self.collection)
        return path

    def plots(self, folder: str | Path) -> list[Path]:
        """Write the charts as SVG, PNG and PDF; return the files. Raises `UsageError` if the folder cannot
        be created.
        """
        check_folder(Path(folder))
        from leansurgeon.report.charts.render import draw

        return list(draw(Path(folder), self.sections))


def check_folder(directory: Path) -> None:
    """Create the folder for charts, before any work and before altair is imported. Raises `UsageError` if `directory`
    cannot be used.
    """
    above = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "cannot be written to" if above.is_dir() else "is a file"
        raise UsageError(f"--plots {directory} cannot be made: {above} {why}.", "Choose another folder.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plots {directory} cannot be made: {error.strerror}.", "Choose another folder.") from None


def report(request: ReportRequest, say: Say) -> Report:
    """Compare runs: task metric, parameters, peak memory, time per step, conditioning.

    The seeds of an experiment become one row with mean and spread, followed by the conclusions they allow.

    In Python the report has `.text(format)`, `.html(file)` and `.plots(folder)`, and prints as its table.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> "lean" in str(leansurgeon.report(cut))
    True

    Raises `UsageError` if there is nothing to report.
    """
    from leansurgeon.report.collect import collect
    from leansurgeon.report.sections import sections
    from leansurgeon.report.tables.render import check_format

    check_format(request.format)
    if request.plots is not None:
        check_folder(request.plots)
    collection = collect(request.paths, request.workspace)
    shown = tuple(sections(collection.runs))
    if request.measure:
        from leansurgeon.commands.compare import measure_models

        place = {path.resolve(): number for number, path in enumerate(request.paths)}
        runs = sorted(collection.runs, key=lambda run: place.get(run.path.resolve(), len(place)))
        shown = (measure_models(runs, request.data, request.columns, request.time, say), *shown)
    elif request.data or request.time:
        raise UsageError("--data and --time say how to measure.", "Add --measure.")
    found = Report(collection, shown, request)
    for problem in found.problems:
        say(f"skipped: {problem}")
    if request.html is not None:
        say(f"Page: {found.html(request.html)}")
    if request.plots is not None:
        for path in found.plots(request.plots):
            say(f"Chart: {path}")
    return found


EXAMPLES = (
    "leansurgeon report --html report.html",
    "leansurgeon report my-model runs/lean --measure --data texts/",
)
COMMAND = Command("report", ReportRequest, report, EXAMPLES, shows=True)
