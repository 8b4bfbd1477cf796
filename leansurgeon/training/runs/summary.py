"""summary.json: what a training came to. Typed, made at one place (`training.finish`), with one reader and one writer;
every other room asks `Summary` and never the file.

A figure that is missing or odd is None: a summary is read to be shown, and a gap can be shown. What a summary cannot do
without (its form, model and task) is refused. What a later version adds is kept as it is (`other`).

The recipe in it names data and teacher by the paths that were given, absolute ones too: by them an experiment knows
whether a finished arm is still the one that is asked for (`experiment.jobs`), and two sets of data may lie in folders
of one name. `recipe.yaml` has them since a training goes on with them. Both stay in the run folder; what is published,
`model/`, holds none (`checkpoints.places`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from leansurgeon.checkpoints.record import DamagedRecord, SurgeryRecord
from leansurgeon.checkpoints.recorded import part
from leansurgeon.errors import UsageError, raised_as
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.reading.values import whole
from leansurgeon.training.runs import folder as runfolder

FORM = 1  # raised where an older reader would misread what is written
DONE = "done"
UNEVEN = 0.7  # share of the largest class, from which on accuracy alone says little


class DamagedSummary(UsageError):
    """A summary.json that cannot be read, or is none."""


@dataclass(frozen=True)
class Scores(part.Recorded):
    """What one evaluation found: the mean loss, the task's metric, all metrics by name where there are several, the
    step after which it came, where that is not said elsewhere, and between which figures the metric lies with 95 %.
    """

    required = ("loss", "metric")

    loss: float | None = None
    metric: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    low: float | None = None
    high: float | None = None

    @property
    def largest_class(self) -> float | None:
        """The share of the largest class where it is so large that macro F1 must stand beside accuracy; else None."""
        share = self.metrics.get("largest_class")
        return share if share is not None and share > UNEVEN else None

    def as_dict(self) -> JsonObject:
        """As the file holds it: one metric has no name."""
        document = super().as_dict()
        return {key: value for key, value in document.items() if key != "metrics" or len(value) > 1}


@dataclass(frozen=True)
class OnTest(part.Recorded):
    """Of the test split, read once at the end: by the last weights and by those that the evaluation split chose (None
    where these were not kept). Of one's own data by those that the training began with, too, and by the `source` that
    they were cut from where that teaches; the `gain` of the best over the first lies between `gain_low` and `gain_high`
    with 95 %, on the same samples (of a perplexity, F1 and a correlation: that of the loss). `sums` and `counts` are
    what the metric of the best is a mean of, by batches, which are the same ones in every run of an experiment.
    """

    required = ("samples", "last", "best")

    samples: int | None = None
    last: Scores | None = None
    best: Scores | None = None
    before: Scores | None = None
    source: Scores | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    sums: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()


class Shown(part.RecordedInFull):
    """A part that is read to be shown, so that nothing odd in it is damage."""

    SURE = ()


@dataclass(frozen=True)
class Start(Shown):
    """The folder that a training began with, and the SHA-256 of its files."""

    name: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model(Shown):
    """The trained model: where it came from, its shape and parameters by part, the surgery before the training, and
    what the training began with.
    """

    source: str = ""
    shape: JsonObject | None = None
    parameters: int | None = None
    parts: dict[str, int] | None = None
    surgery: JsonObject | None = None
    init_std: float | None = None
    start: Start = Start()

    @cached_property
    def record(self) -> SurgeryRecord | None:
        """The surgery, typed; None where there was none or it cannot be read."""
        try:
            return SurgeryRecord.from_dict(self.surgery)
        except DamagedRecord:
            return None


@dataclass(frozen=True)
class Task(Shown):
    """What was trained and measured; `data` is what the task says of its data."""

    name: str = ""
    metric: str = ""
    metric_label: str = ""
    higher_is_better: bool = True
    percent: bool = False
    train_samples: int | None = None
    eval_samples: int | None = None
    data: JsonObject = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Json) -> Self:
        """A metric without a label is called by its name."""
        made = super().from_dict(data)
        return replace(made, metric_label=made.metric_label or made.metric)

    def format_metric(self, metric: float | None) -> str:
        """`97.2 %`, `31.415`: the metric as a line of talk says it."""
        if metric is None:
            return "unknown"
        return f"{100 * metric:.1f} %" if self.percent else f"{metric:.3f}"


@dataclass(frozen=True)
class Part(Shown):
    """Where a run belongs in an experiment. `settings` are the values that decide its result, by key; `digest` is
    theirs.
    """

    OPTIONAL = ("settings",)

    name: str = ""
    arm: str = ""
    seed: int | None = None
    digest: str = ""
    control_of: str | None = None
    init: str = ""
    own_task: str = ""
    settings: JsonObject | None = None


@dataclass(frozen=True)
class Memory(Shown):
    """The peak of a training, and of which kind it is."""

    bytes: int | None = None
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Summary(Shown):
    """One training. Times are in seconds but for `step_ms`; `kappa` and `heads` are documents of the measuring room;
    `recipe` is the resolved recipe.
    """

    schema_version: int = FORM
    name: str = ""
    status: str = DONE
    model: Model
    task: Task
    seed: int | None = None
    device: str = ""
    world_size: int | None = None
    micro_batch: int | None = None
    precision: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    before: Scores | None = None
    final: Scores | None = None
    best: Scores | None = None
    averaged: bool = False
    epochs: float | None = None
    steps: int | None = None
    stopped_early: bool = False
    left_out_steps: tuple[int, ...] = ()
    resumed_after: tuple[int, ...] = ()
    seconds: float | None = None
    step_ms: float | None = None
    throughput: float | None = None
    throughput_unit: str = ""
    data_wait: float | None = None
    memory: Memory = Memory()
    test: OnTest | None = None
    kappa: JsonObject | None = None
    heads: JsonObject | None = None
    recipe: JsonObject = field(default_factory=dict)
    started: str = ""
    finished: str = ""
    experiment: Part | None = None
    last_losses_still_falling: bool = False

    @classmethod
    def from_dict(cls, data: Json) -> Self:
        """Raises `DamagedSummary`, whose message is the end of a sentence about the file."""
        if trouble := what_is_wrong(data):
            raise DamagedSummary(trouble)
        made = super().from_dict(data)
        return made if isinstance(data.get("status") or DONE, str) else replace(made, status="")


def own_test(made: Summary) -> bool:
    """Whether a run on somebody's own data was judged on a part of it that chose nothing: then that is its figure."""
    return made.test is not None and "split" in made.task.data and (made.test.best or made.test.last) is not None


def read(run_dir: Path) -> Summary:
    """The summary of a run folder. Raises `DamagedSummary`, naming the file."""
    path = run_dir / runfolder.SUMMARY
    with raised_as(DamagedSummary):
        data = jsonfile.read(path)
    try:
        return Summary.from_dict(data)
    except DamagedSummary as error:
        raise DamagedSummary(f"{path} {error.message}.") from None


def read_if_whole(run_dir: Path) -> Summary | None:
    """`read`, None where there is none or it cannot be read."""
    try:
        return read(run_dir)
    except UsageError:
        return None


def write(run_dir: Path, summary: Summary) -> None:
    """At once: a folder that has a summary is complete."""
    runfolder.write_json(run_dir / runfolder.SUMMARY, summary.as_dict())


def what_is_wrong(data: object) -> str | None:
    """Why this is no summary, as the end of a sentence; None when it is one."""
    if not isinstance(data, Mapping):
        return "does not hold a JSON object"
    version = data.get("schema_version")
    if whole(version) is None:
        return "was not written by leansurgeon: it has no schema_version"
    if version > FORM:
        return f"has schema {version}, and this leansurgeon reads {FORM}; update it"
    lacking = [key for key in ("model", "task") if not isinstance(data.get(key), Mapping)]
    if not isinstance(jsonfile.value_at(data, "task", "metric"), str):
        lacking.append("task.metric")
    return f"lacks {', '.join(lacking)}" if lacking else None
