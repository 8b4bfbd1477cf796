"""Find runs and shrunk models in folders and read them; what cannot be read becomes one sentence.

A run is a folder with `summary.json`, a model one with `surgery.json` and no run of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints import record
from leansurgeon.errors import UsageError
from leansurgeon.reading import jsonfile
from leansurgeon.report.humans import number, part
from leansurgeon.training.runs.folder import METRICS, STARTS, SUMMARY

SCHEMA_VERSION = 1
DEPTH = 3  # runs of an experiment lie at workspace/experiment/arm/seed at most


@dataclass(frozen=True)
class Entry:
    """One folder that was read: `kind` is "run" (`data` is its summary) or "model" (its surgery.json)."""

    path: Path
    kind: str
    data: dict[str, Any]
    when: float


@dataclass
class Collection:
    """Everything found, newest first, and a sentence about each file that could not be used."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Entry]:
        return [e for e in self.entries if e.kind == kind]


def collect(paths: Sequence[Path] = (), workspace: Path = Path("runs")) -> Collection:
    """Read the named runs, models or folders of runs; without a name, every run in `workspace` and every model not
    trained yet.

    Raises `UsageError` when a name does not exist or nothing at all can be reported.
    """
    found = Collection()
    for path in paths or [workspace]:
        if not path.is_dir():
            if not paths:
                raise UsageError(f"There is no workspace {path}, so there are no runs.", MAKE_ONE)
            raise UsageError(f"There is no folder {path}.", "Name a run, a shrunk model, or a folder that holds runs.")
        _walk(path, DEPTH, found)
    if not found.entries:
        where = ", ".join(map(str, paths or [workspace]))
        raise UsageError(found.problems[0] if found.problems else f"No run and no shrunk model in {where}.", MAKE_ONE)
    unique = {entry.path.resolve(): entry for entry in found.entries}.values()
    found.entries = sorted(unique, key=lambda e: (-e.when, str(e.path)))
    if not paths:
        trained = [_same_form(run.data["model"].get("surgery")) for run in found.of("run")]
        found.entries = [e for e in found.entries if e.kind == "run" or e.data not in trained]
    return found


def _same_form(surgery: Any) -> dict[str, Any] | None:
    """The record that a summary keeps, as `collect` reads it from a file."""
    try:
        return record.SurgeryRecord.from_dict(surgery).as_dict()
    except record.DamagedRecord:
        return None


KAPPA = "kappa.json"  # what `leansurgeon kappa` leaves in the folder of a run
MAKE_ONE = "`leansurgeon run digits-vit` makes some."


def _walk(folder: Path, depth: int, found: Collection) -> None:
    for name, kind in ((SUMMARY, "run"), (record.NAME, "model")):
        if (folder / name).is_file():
            entry = _read(folder / name, kind, found.problems)
            if entry:
                found.entries.append(entry)
            return  # what lies inside a run belongs to it
    if (folder / METRICS).is_file():
        found.problems.append(f"{folder} is not finished: it has no {SUMMARY} yet.")
        return
    if depth:
        try:
            inside = sorted(
                p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name != STARTS
            )
        except OSError as error:
            found.problems.append(f"{folder} cannot be read: {error.strerror}.")
            return
        for path in inside:
            _walk(path, depth - 1, found)


def _read(path: Path, kind: str, problems: list[str]) -> Entry | None:
    if kind == "model":
        return _read_model(path, problems)
    try:
        data = jsonfile.read(path)
    except UsageError as error:
        problems.append(error.message)
        return None
    if trouble := what_is_wrong(data):
        problems.append(f"{path} {trouble}.")
        return None
    if data.get("kappa") is None:  # measured after the training, if ever
        data |= {"kappa": _kappa_of(path.parent)}
    return Entry(path.parent, kind, data, _when(data, path))


def _read_model(path: Path, problems: list[str]) -> Entry | None:
    try:
        data = record.read(path.parent).as_dict()
    except record.DamagedRecord as error:
        problems.append(error.message)
        return None
    return Entry(path.parent, "model", data, _when(data, path))


def _kappa_of(folder: Path) -> Any:
    return jsonfile.read_object_if_whole(folder / KAPPA)


def what_is_wrong(data: Any) -> str | None:
    """Why this is no summary that a report can use, as the end of a sentence; None when it is one."""
    if not isinstance(data, dict):
        return "does not hold a JSON object"
    version = data.get("schema_version")
    if not isinstance(version, int):
        return "was not written by leansurgeon: it has no schema_version"
    if version > SCHEMA_VERSION:
        return f"has schema {version}, and this leansurgeon reads {SCHEMA_VERSION}; update it"
    lacking = [key for key in ("model", "task") if not isinstance(data.get(key), dict)]
    if not isinstance(part(data, "task", "metric"), str):
        lacking.append("task.metric")
    return f"lacks {', '.join(lacking)}" if lacking else None


def _when(data: dict[str, Any], path: Path) -> float:
    """When it was finished, in seconds since 1970: by its own word, else by the date of the file."""
    said = stamp(data.get("finished"))
    return path.stat().st_mtime if said is None else said


def stamp(said: Any) -> float | None:
    """Seconds since 1970 of an ISO date or a number."""
    if number(said) is not None:
        return float(said)
    try:
        return datetime.fromisoformat(said).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def side_by_side(entries: Sequence[Entry]) -> bool:
    """Whether any of these trainings ran while another one did."""
    spans = [(stamp(e.data.get("started")), stamp(e.data.get("finished"))) for e in entries]
    known = sorted((start, end) for start, end in spans if start is not None and end is not None)
    return any(later[0] < earlier[1] for earlier, later in pairwise(known))
