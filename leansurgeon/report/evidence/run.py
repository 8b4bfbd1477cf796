"""One training, or one model that nobody trained yet, as a report needs it: `summary.json` or `surgery.json` read once.

This is the only reader of a summary in this room. What lies beside it (curves, recipe, what other commands left) is
read when it is first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from leansurgeon.report.evidence import folder
from leansurgeon.report.evidence.collect import Entry
from leansurgeon.report.evidence.predicted import Predicted, predicted_of, setting_of
from leansurgeon.report.evidence.studies import Bench, HeadStudy, bench_of, heads_of
from leansurgeon.report.evidence.surgery import Cut, cut_of
from leansurgeon.report.evidence.values import figures, number, part, stamp, text, whole, words

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
class Part:
    """Where a run belongs in an experiment."""

    name: str
    arm: str
    control_of: str | None
    own_task: str
    init: str
    digest: str


@dataclass(frozen=True)
class Score:
    metric: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Run:
    """`kind` is "run" or "model" (of which only what surgery.json says is known)."""

    path: Path
    kind: str
    when: float = field(compare=False)
    finished: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    cut: Cut | None = None
    source: str = ""
    parameters: int | None = None
    parameters_of_source: int | None = None
    parts: dict[str, int | None] | None = None
    shape: dict[str, str] | None = None
    width: int | None = None
    task: Task | None = None
    train_samples: float | None = None
    data_source: str = ""
    licence: str = ""
    glue_task: str = ""
    status: str = "done"
    seed: int | None = None
    experiment: Part | None = None
    start_name: str = ""
    start_files: dict[str, str] = field(default_factory=dict)
    began_trained: bool = False  # its first weights had learned something, here or elsewhere
    init_std: float | None = None
    final: Score = Score()
    best: Score = Score()
    before: Score = Score()
    test_best: float | None = None
    test_last: float | None = None
    steps: float | None = None
    epochs: float | None = None
    still_falling: bool = False
    started_at: float | None = None
    finished_at: float | None = None
    memory: float | None = None
    memory_kind: str = ""
    step_ms: float | None = None
    throughput: float | None = None
    throughput_unit: str = ""
    seconds: float | None = None
    device: str = ""
    precision: str = ""
    kappa: dict[str, Any] | None = None  # as `measure.kappa` left it; `evidence.kappa` reads it
    expected: dict[str, dict[str, float]] = field(default_factory=dict)  # what its recipe expects of each arm
    setting: tuple[tuple[str, Any], ...] | None = None  # to predict its memory on a GPU by

    @property
    def named_part(self) -> bool:
        return self.experiment is not None and bool(self.experiment.name)

    @cached_property
    def curve(self) -> folder.Curve | None:
        return folder.curve(self.path, self.seed, self.epochs, self.steps) if self.kind == "run" else None

    @cached_property
    def heads(self) -> HeadStudy | None:
        return heads_of(folder.left_by(self.path, folder.HEADS))

    @cached_property
    def bench(self) -> Bench | None:
        return bench_of(folder.left_by(self.path, folder.BENCH))

    @cached_property
    def recipe(self) -> str | None:
        """The resolved recipe of a run, as it stands in its folder."""
        return folder.recipe_text(self.path) if self.kind == "run" else None

    @cached_property
    def experiment_file(self) -> folder.ExperimentFile | None:
        """What `leansurgeon run` left beside the runs of its arms."""
        return folder.experiment_file(self.path) if self.kind == "run" else None

    @cached_property
    def predicted(self) -> Predicted | None:
        return predicted_of(self.path, self.memory_kind, self.setting)


def run_of(entry: Entry) -> Run:
    return model(entry) if entry.kind == "model" else training(entry)


def model(entry: Entry) -> Run:
    after = of_plan(entry.data, "parameters_after")
    return Run(
        path=entry.path,
        kind="model",
        when=entry.when,
        finished=text(entry.data.get("created")),
        versions=words(entry.data.get("versions")),
        cut=cut_of(entry.data),
        parameters=whole(after),
        parameters_of_source=whole(of_plan(entry.data, "parameters_before")),
        parts=parts_of(after),
        shape=shape_of(of_plan(entry.data, "after")),
    )


def training(entry: Entry) -> Run:
    """From a summary; unknown or odd values become gaps."""
    data, model = entry.data, entry.data["model"]
    task, surgery = data["task"], model.get("surgery")
    experiment = part_of(data.get("experiment"))
    fresh = (of_plan(surgery, "init") or "fresh") == "fresh"
    stages = part(model.get("shape"), "stages")
    return Run(
        path=entry.path,
        kind="run",
        when=entry.when,
        finished=text(data.get("finished")),
        versions=words(data.get("versions")),
        cut=cut_of(surgery),
        source=text(model.get("source")),
        parameters=whole(model.get("parameters")),
        parameters_of_source=whole(of_plan(surgery, "parameters_before")),
        parts=parts_of(model.get("parts")),
        shape=shape_of(model.get("shape")),
        width=whole(part(stages[0], "width")) if isinstance(stages, list) and stages else None,
        task=task_of(task),
        train_samples=number(task.get("train_samples")),
        data_source=text(part(task, "data", "source")),
        licence=text(part(task, "data", "licence")),
        glue_task=text(part(task, "data", "task")) if task.get("name") == "glue" else "",
        status=text(data.get("status"), "done" if data.get("status") is None else "?"),
        seed=whole(data.get("seed")),
        experiment=experiment,
        start_name=text(part(model, "start", "name")),
        start_files=words(part(model, "start", "files")),
        began_trained=(experiment is not None and experiment.init == "transfer")
        or text(part(surgery, "initialised")) not in ("", "fresh"),
        init_std=number(model.get("init_std")) if fresh else None,
        final=score(data.get("final")),
        best=score(data.get("best")),
        before=score(data.get("before")),
        test_best=number(part(data, "test", "best", "metric")),
        test_last=number(part(data, "test", "last", "metric")),
        steps=number(data.get("steps")),
        epochs=number(data.get("epochs")),
        still_falling=data.get("last_losses_still_falling") is True,
        started_at=stamp(data.get("started")),
        finished_at=stamp(data.get("finished")),
        memory=number(part(data, "memory", "bytes")),
        memory_kind=text(part(data, "memory", "kind")),
        step_ms=number(data.get("step_ms")),
        throughput=number(data.get("throughput")),
        throughput_unit=text(data.get("throughput_unit")),
        seconds=number(data.get("seconds")),
        device=text(data.get("device")),
        precision=text(data.get("precision")),
        kappa=data.get("kappa") if isinstance(data.get("kappa"), dict) else None,
        expected=expected_of(part(data, "recipe", "expected")),
        setting=setting_of(data),
    )


def task_of(task: dict[str, Any]) -> Task:
    samples = number(task.get("eval_samples"))
    return Task(
        name=text(task.get("name"), "?"),
        metric=text(task.get("metric"), "?"),
        label=text(task.get("metric_label")) or text(task.get("metric"), "?"),
        higher_is_better=task.get("higher_is_better") is not False,
        percent=task.get("percent") is True,
        eval_samples=int(samples) if samples else None,
    )


def part_of(found: Any) -> Part | None:
    if not isinstance(found, dict):
        return None
    return Part(
        name=text(found.get("name")),
        arm=text(found.get("arm")),
        control_of=text(found.get("control_of")) or None,
        own_task=text(found.get("own_task")),
        init=text(found.get("init")),
        digest=text(found.get("digest")),
    )


def score(found: Any) -> Score:
    return Score(number(part(found, "metric")), number(part(found, "loss")))


def expected_of(found: Any) -> dict[str, dict[str, float]]:
    arms = found if isinstance(found, dict) else {}
    return {text(arm): known for arm, values in arms.items() if (known := figures(values))}


def of_plan(surgery: Any, key: str) -> Any:
    """A value of surgery.json, which may keep its plan under a key of its own."""
    found = part(surgery, key)
    return part(surgery, "plan", key) if found is None else found


def parts_of(found: Any) -> dict[str, int | None] | None:
    return {key: whole(found.get(key)) for key in PARTS} if isinstance(found, dict) else None


def shape_of(shape: Any) -> dict[str, str] | None:
    """`{"depth": "12", ...}`, with `4,8,16,32` where stages differ."""
    stages = part(shape, "stages")
    if not isinstance(stages, list) or not stages:
        return None
    return {key: ",".join(str(whole(part(stage, key)) or "?") for stage in stages) for key in SHAPE}
