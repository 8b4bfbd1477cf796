"""From summaries to rows: one row per arm of an experiment (its seeds together), per single run, or per untrained
model.

A `Section` is one table: an experiment, the single runs of one task, or the models that nobody trained yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leansurgeon.errors import plural
from leansurgeon.report.collect import Entry, side_by_side
from leansurgeon.report.conditioning import Kappa, kappa_of
from leansurgeon.report.humans import Spread, listed, number, part, spread, text, whole

SHAPE = ("depth", "heads", "head_dim", "mlp_dim")
PARTS = ("embeddings", "attention", "mlp", "rest")


@dataclass(frozen=True)
class Task:
    """What was measured: the task, the paper's name of its metric, and on how many samples."""

    name: str
    metric: str
    label: str
    higher_is_better: bool
    percent: bool
    eval_samples: int | None

    @property
    def decimals(self) -> int:
        return 2 if (self.eval_samples or 0) >= 20_000 else 1


@dataclass(frozen=True)
class Row:
    """One line of a table. `role` is "original", "lean", "control", "run" or "model"."""

    name: str
    role: str
    control_of: str | None = None
    seeds: tuple[int | None, ...] = ()
    metric: Spread | None = None
    best: Spread | None = None
    before: Spread | None = None
    test: Spread | None = None  # of the test split, by the weights that were best in validation
    test_last: Spread | None = None
    scores: dict[str, Spread] | None = None  # by GLUE task
    loss: Spread | None = None
    parameters: int | None = None
    reference_parameters: int | None = None
    parts: dict[str, int | None] | None = None
    shape: dict[str, str] | None = None
    memory: Spread | None = None
    memory_kind: str = ""
    step_ms: Spread | None = None
    throughput: Spread | None = None
    throughput_unit: str = ""
    seconds: Spread | None = None
    kappa: Kappa | None = None
    init: str = ""
    epochs: float | None = None
    inherited: float | None = None  # epochs of the training here that its first weights come from
    began_trained: bool = False  # its first weights had learned something, here or elsewhere
    still_falling: int = 0
    init_std: float | None = None
    width: int | None = None
    device: str = ""
    precision: str = ""
    paths: tuple[str, ...] = ()

    @property
    def trained(self) -> float:
        """Epochs that its last weights have seen in this experiment."""
        return (self.epochs or 0.0) + (self.inherited or 0.0)

    @property
    def on_gpu(self) -> bool:
        return "cuda" in self.memory_kind.lower()


@dataclass(frozen=True)
class Section:
    """One table with what must be said about it. `kind` is "experiment", "runs", "models" or "glue"."""

    kind: str
    name: str
    task: Task | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


# -- sections -------------------------------------------------------------------------------------


def sections(entries: Sequence[Entry]) -> list[Section]:
    """Group what was collected into tables, the one with the newest entry first, models at the end."""
    groups: dict[tuple, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: -e.when):
        groups.setdefault(_group_key(entry), []).append(entry)
    made = [_section(key[0], group) for key, group in groups.items()]
    from leansurgeon.report import glue  # which makes its rows by this module

    together = glue.section(entries)
    return sorted([*made, *([together] if together else [])], key=lambda s: s.kind == "models")


def experiment_section(summaries: Iterable[dict]) -> list[Section]:
    """The same for summaries in memory, in the order of their training."""
    return sections([Entry(Path(), "run", summary, float(i)) for i, summary in enumerate(summaries)])


def _group_key(entry: Entry) -> tuple:
    if entry.kind == "model":
        return ("models",)
    task, name, own = entry.data["task"], *(part(entry.data, "experiment", key) for key in ("name", "own_task"))
    # Debug runs of an experiment carry its name but not its data.
    sizes = tuple(number(task.get(key)) for key in ("train_samples", "eval_samples"))
    if not text(name):
        return ("runs", task_of(entry.data))
    # Arms with a task of their own compare only with each other.
    return ("experiment", text(name), text(task.get("name")), *sizes, text(own))


def _section(kind: str, entries: list[Entry]) -> Section:
    if kind == "models":
        names = _unique_names(entries)
        return Section(kind, "shrunk, not trained yet", None, tuple(_model_row(names[e.path], e) for e in entries))
    task = task_of(entries[0].data)
    if kind == "runs":
        names = _unique_names(entries)
        rows = tuple(make_row(names[e.path], "run", [e]) for e in entries)
        return Section(kind, task.name, task, rows)
    arms, notes = _arms(entries)
    rows = []
    for arm, group in arms.items():
        said = text(part(group[0].data, "experiment", "control_of")) or None
        rows.append(make_row(arm, _role(arm, said, group[0].data), group, control_of=said))
    original = next((r for r in rows if r.role == "original"), None)
    rows = [replace(r, reference_parameters=original and original.parameters) for r in rows]
    rows = [replace(r, inherited=original.epochs) if original and r.init == "transfer" else r for r in rows]
    # Trained side by side they end in any order, and a table that is shown again must be the same.
    rows.sort(key=lambda r: (("original", "lean", "control").index(r.role), by_number(r.name)))
    seeds = max((len(r.seeds) for r in rows), default=0)
    notes += [f"{r.name} has only {len(r.seeds)} of {seeds} seeds." for r in rows if len(r.seeds) < seeds]
    if side_by_side([entry for group in arms.values() for entry in group]):
        notes.append("Trainings ran side by side, so ms/step also shows what the others took: compare it with care.")
    name, own = (text(part(entries[0].data, "experiment", key)) for key in ("name", "own_task"))
    return Section(kind, f"{name}, {own}" if own else name, task, tuple(rows), tuple(notes))


def by_number(name: str) -> str:
    """A key that puts `h2` before `h10`."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), name)


def _role(arm: str, control_of: str | None, summary: dict[str, Any]) -> str:
    plan = part(summary, "model", "surgery", "plan")
    unchanged = isinstance(plan, dict) and plan.get("before") is not None and plan.get("before") == plan.get("after")
    if control_of or arm.startswith("control"):
        return "control"
    return "original" if arm == "original" or unchanged else "lean"


def _arms(entries: list[Entry]) -> tuple[dict[str, list[Entry]], list[str]]:
    """The runs of every arm, in the order of their training: the newest of each seed, and only of one recipe."""
    arms: dict[str, list[Entry]] = {}
    older, other, unfinished = [], [], []
    for entry in entries:  # newest first
        arm = text(part(entry.data, "experiment", "arm"), "?")
        group = arms.setdefault(arm, [])
        if entry.data.get("status", "done") != "done":
            unfinished.append(arm)
        elif group and _settings(entry) != _settings(group[0]):
            other.append(arm)
        elif any(entry.data.get("seed") == e.data.get("seed") for e in group):
            older.append(arm)
        else:
            group.append(entry)
    notes = []
    for left_out, why in (
        (older, "repeated by a newer one of the same seed"),
        (other, "with other settings than the newest"),
        (unfinished, "not finished"),
    ):
        if left_out:
            which = listed(dict.fromkeys(left_out))
            notes.append(f"Left out: {plural(len(left_out), 'run')} {why} ({which}).")
    kept = {arm: sorted(group, key=lambda e: e.when) for arm, group in arms.items() if group}
    return dict(sorted(kept.items(), key=lambda item: item[1][0].when)), notes


def _settings(entry: Entry) -> tuple:
    """What seeds of one arm must share: the number of steps, and the digest of all settings where it was written."""
    return entry.data.get("steps"), part(entry.data, "experiment", "digest")


def _unique_names(entries: list[Entry]) -> dict[Path, str]:
    """Folder names, with the parent's in front where two runs share one."""
    names = [e.path.name for e in entries]
    return {
        e.path: text(e.path.name if names.count(e.path.name) == 1 else f"{e.path.parent.name}/{e.path.name}", "?")
        for e in entries
    }


# -- rows -----------------------------------------------------------------------------------------


def task_of(summary: dict[str, Any]) -> Task:
    task = summary["task"]
    samples = number(task.get("eval_samples"))
    return Task(
        name=text(task.get("name"), "?"),
        metric=text(task.get("metric"), "?"),
        label=text(task.get("metric_label")) or text(task.get("metric"), "?"),
        higher_is_better=task.get("higher_is_better") is not False,
        percent=task.get("percent") is True,
        eval_samples=int(samples) if samples else None,
    )


def make_row(name: str, role: str, entries: list[Entry], control_of: str | None = None) -> Row:
    """One row from the runs of one arm, one per seed. Unknown or odd values become gaps."""
    data = [e.data for e in entries]
    first, model = data[0], data[0]["model"]

    def over(*keys: str) -> Spread | None:
        return spread(number(part(d, *keys)) for d in data)

    surgery = model.get("surgery")
    return Row(
        name=name,
        role=role,
        control_of=control_of,
        seeds=tuple(whole(d.get("seed")) for d in data),
        metric=over("final", "metric") or over("best", "metric"),
        best=over("best", "metric"),
        before=over("before", "metric"),
        test=over("test", "best", "metric") or over("test", "last", "metric"),
        test_last=over("test", "last", "metric"),
        loss=over("final", "loss"),
        parameters=whole(model.get("parameters")),
        reference_parameters=whole(_of_plan(surgery, "parameters_before")),
        parts=_parts(model.get("parts")),
        shape=_shape(model.get("shape")),
        memory=over("memory", "bytes"),
        memory_kind=text(part(first, "memory", "kind")),
        step_ms=over("step_ms"),
        throughput=over("throughput"),
        throughput_unit=text(first.get("throughput_unit")),
        seconds=over("seconds"),
        kappa=kappa_of([d.get("kappa") for d in data]),
        init=text(part(first, "experiment", "init")),
        began_trained=text(part(first, "experiment", "init")) == "transfer"
        or text(part(surgery, "initialised")) not in ("", "fresh"),
        epochs=number(first.get("epochs")),
        still_falling=sum(d.get("last_losses_still_falling") is True for d in data),
        init_std=number(model.get("init_std")) if (_of_plan(surgery, "init") or "fresh") == "fresh" else None,
        width=whole(part(_stage(model.get("shape")), "width")),
        device=text(first.get("device")),
        precision=text(first.get("precision")),
        paths=tuple(str(e.path) for e in entries if e.path != Path()),
    )


def _model_row(name: str, entry: Entry) -> Row:
    after = _of_plan(entry.data, "parameters_after")
    return Row(
        name=name,
        role="model",
        parameters=whole(after),
        reference_parameters=whole(_of_plan(entry.data, "parameters_before")),
        parts=_parts(after),
        shape=_shape(_of_plan(entry.data, "after")),
        paths=(str(entry.path),),
    )


def _parts(found: Any) -> dict[str, int | None] | None:
    return {key: whole(found.get(key)) for key in PARTS} if isinstance(found, dict) else None


def _of_plan(surgery: Any, key: str) -> Any:
    """A value of surgery.json, which may keep its plan under a key of its own."""
    found = part(surgery, key)
    return part(surgery, "plan", key) if found is None else found


def _stage(shape: Any, index: int = 0) -> Any:
    stages = part(shape, "stages")
    return stages[index] if isinstance(stages, list) and len(stages) > index else None


def _shape(shape: Any) -> dict[str, str] | None:
    """`{"depth": "12", ...}`, with `4,8,16,32` where stages differ."""
    stages = part(shape, "stages")
    if not isinstance(stages, list) or not stages:
        return None
    return {key: ",".join(str(whole(part(stage, key)) or "?") for stage in stages) for key in SHAPE}
