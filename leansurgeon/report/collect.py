"""Find runs and shrunk models in folders and read them; each unreadable file is reported in one sentence.

A run is a folder with `summary.json`, a model one with `surgery.json` that is not part of a run; a folder with only
`metrics.jsonl` is an unfinished training.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from leansurgeon.checkpoints import record
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.reading.jsonfile import JsonObject, read_object_if_whole
from leansurgeon.reading.values import stamp, text
from leansurgeon.report.runs import KAPPA, Run, display_name, find_experiment_file, read_metrics, read_run, text_of
from leansurgeon.training.runs import summary
from leansurgeon.training.runs.checkpoint import all_of
from leansurgeon.training.runs.folder import METRICS, RECIPE, STARTS, SUMMARY, call_in, is_held
from leansurgeon.training.runs.summary import Summary

CONFIG = "config.json"
DEPTH = 3  # runs of an experiment are at workspace/experiment/arm/seed at most
MAKE_ONE = "`leansurgeon run digits-vit` makes some."


@dataclass(frozen=True)
class Unfinished:
    """An unfinished training: interrupted, or in progress (`running`). `resume` is the command to resume it, "" if
    unknown.
    """

    path: Path
    name: str
    step: int | None
    running: bool
    resume: str

    @property
    def sentence(self) -> str:
        """How far the run got, and whether it is still running, in one sentence."""
        how_far = "before its first step" if self.step is None else f"at step {self.step:,}"
        return f"{self.name} {'is being trained, now' if self.running else 'was interrupted'} {how_far}."

    def as_dict(self) -> JsonObject:
        """Return the run for the report's JSON document."""
        return asdict(self) | {"path": str(self.path), "resume": self.resume or None}


@dataclass
class Collection:
    """Everything found, newest first, and a sentence about each file that could not be used."""

    runs: list[Run] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def collect(paths: Sequence[Path] = (), workspace: Path = Path("runs")) -> Collection:
    """Read the named runs, models or folders of runs; without a name, every run in `workspace` and every model that is
    not trained yet.

    Raises `UsageError` if a name does not exist or there is nothing to report.
    """
    collected = Collection()
    for path in paths or [workspace]:
        if not path.is_dir():
            if not paths:
                raise UsageError(f"There is no workspace {path}, so there are no runs.", MAKE_ONE)
            raise UsageError(f"There is no folder {path}.", "Name a run, a shrunk model, or a folder that holds runs.")
        if paths and (path / CONFIG).is_file() and not (path / record.NAME).is_file():
            from leansurgeon.checkpoints.source import open_source

            try:
                collected.runs.append(read_run(path, open_source(str(path)), (path / CONFIG).stat().st_mtime))
            except LeanSurgeonError as error:
                collected.problems.append(error.message)
        else:
            _walk(path, DEPTH, collected)
    if not collected.runs and not collected.unfinished:
        where = ", ".join(map(str, paths or [workspace]))
        raise UsageError(
            collected.problems[0] if collected.problems else f"No run and no shrunk model in {where}.", MAKE_ONE
        )
    unique = {run.path.resolve(): run for run in collected.runs}.values()
    collected.runs = sorted(unique, key=lambda run: (-run.when, str(run.path)))
    collected.unfinished = list({one.path.resolve(): one for one in collected.unfinished}.values())
    if not paths:
        trained = [run.summary.model.record for run in collected.runs if run.kind == "run"]
        collected.runs = [run for run in collected.runs if run.kind == "run" or run.summary.model.record not in trained]
    return collected


def _walk(path: Path, depth: int, collected: Collection) -> None:
    """Collect what is at `path` and below; unreadable folders are reported and skipped."""
    try:
        inside = _look(path, collected)
        for below in inside if depth else ():
            _walk(below, depth - 1, collected)
    except OSError as error:
        collected.problems.append(f"{error.filename or path} cannot be read: {error.strerror or error}.")


def _look(path: Path, collected: Collection) -> list[Path]:
    """Add a folder that is a run or a model; for any other return its subfolders. What is inside a run
    belongs to it.
    """
    for name, read in ((SUMMARY, summary.read), (record.NAME, record.read)):
        if not (path / name).is_file():
            continue
        try:
            evidence = read(path)
        except (UsageError, record.DamagedRecord) as error:
            collected.problems.append(error.message)
            return []
        when = None
        if isinstance(evidence, Summary):
            if evidence.kappa is None:  # measured after the training, if ever
                evidence = replace(evidence, kappa=read_object_if_whole(path / KAPPA))
            when = stamp(evidence.finished)  # the summary's own time, else the file's date
        collected.runs.append(read_run(path, evidence, (path / name).stat().st_mtime if when is None else when))
        return []
    if (path / METRICS).is_file():
        step = next((int(step) for step, _ in read_metrics(path, newest_first=True)), None)
        name = text(display_name(path), "?")
        collected.unfinished.append(Unfinished(path, name, step, is_held(path), resume_line(path)))
        return []
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name != STARTS)


def resume_line(run: Path) -> str:
    """Return the command to resume a run: that of its experiment, or its own `retrain` with --resume; without a
    checkpoint it starts again in its folder.
    """
    experiment = find_experiment_file(run)
    if experiment:
        return experiment.call or f"leansurgeon run {shlex.quote(str(experiment.path))}"
    if (run.parent / STARTS).is_dir():
        return ""  # an experiment's arm whose command is unknown
    place = shlex.quote(str(run))
    call = call_in(text_of(run / RECIPE) or "")
    call = call or f"leansurgeon retrain MODEL --recipe {shlex.quote(str(run / RECIPE))}"
    return f"{call} --resume {place}" if all_of(run) else f"{call} -o {place} --resume auto"
