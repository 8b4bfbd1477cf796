"""summary.json: the results of a training, as a typed value that `training.finish` makes, with one reader and one
writer; the rest of the package uses `Summary` and never the file.

A missing or malformed value is read as None: a summary is read to be shown, and a gap can be shown. A summary without
its required parts (schema version, model and task) is refused. Keys of later versions are kept (`other`).

The recipe in it names data and teacher by the paths that were given, absolute ones too: an experiment needs them to
decide whether a finished arm matches the request (`experiment.jobs`), since different data may be in folders of the
same name. `recipe.yaml` has them too, since a training resumes with them. Both stay in the run folder; the published
`model/` holds none (`checkpoints.places`).
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

FORM = 1  # increased when an older reader would misread the file
DONE = "done"
UNEVEN = 0.7  # share of the largest class above which accuracy alone says little


class DamagedSummary(UsageError):
    """A file that is not a summary.json or cannot be read."""


@dataclass(frozen=True)
class Scores(part.Recorded):
    """The result of one evaluation: mean loss, the task's metric, all metrics by name if there are several, the step if
    nothing else states it, and the 95 % confidence interval of the metric.
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
        """The share of the largest class if it is so large that macro F1 must be shown beside accuracy; else None."""
        share = self.metrics.get("largest_class")
        return share if share is not None and share > UNEVEN else None

    def as_dict(self) -> JsonObject:
        """Return the values as the file holds them; a single metric needs no name."""
        document = super().as_dict()
        return {key: value for key, value in document.items() if key != "metrics" or len(value) > 1}


@dataclass(frozen=True)
class OnTest(part.Recorded):
    """Scores on the test split, read once at the end, of the last weights and of those chosen on the evaluation split
    (None if these were not kept).

    On the user's own data also of the starting weights (`before`) and of the `source` that they were cut from, if it is
    the teacher. The gain of the best over `before` has the 95 % confidence interval `gain_low` to `gain_high`, on the
    same samples (for perplexity, F1 and correlation it is the gain in loss). `sums` and `counts` are the batches' parts
    of the best weights' metric; batches are the same in every run of an experiment.
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
    """A part that is only shown, so that malformed values in it do not count as damage."""

    SURE = ()


@dataclass(frozen=True)
class Start(Shown):
    """The folder that a training began with, and the SHA-256 of its files."""

    name: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model(Shown):
    """The trained model: its source, shape and parameters by part, the surgery before the training, and the starting
    folder.
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
        """The surgery as a typed value; None if there was none or it cannot be read."""
        try:
            return SurgeryRecord.from_dict(self.surgery)
        except DamagedRecord:
            return None


@dataclass(frozen=True)
class Task(Shown):
    """What was trained and measured; `data` is the task's description of its data."""

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
        """Read the task; a metric without a label is called by its name."""
        made = super().from_dict(data)
        return replace(made, metric_label=made.metric_label or made.metric)

    def format_metric(self, metric: float | None) -> str:
        """Return the metric as text: `97.2 %`, `31.415`."""
        if metric is None:
            return "unknown"
        return f"{100 * metric:.1f} %" if self.percent else f"{metric:.3f}"


@dataclass(frozen=True)
class Part(Shown):
    """Where a run belongs in an experiment. `settings` are the values that determine its result, by key; `digest` is
    their hash.
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
    """The peak memory of a training, and how it was measured."""

    bytes: int | None = None
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Summary(Shown):
    """One training. Times are in seconds except `step_ms`; `kappa` and `heads` are documents of `leansurgeon.measure`;
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
        """Read a summary. Raises `DamagedSummary`, whose message is the end of a sentence about the file."""
        if trouble := what_is_wrong(data):
            raise DamagedSummary(trouble)
        made = super().from_dict(data)
        return made if isinstance(data.get("status") or DONE, str) else replace(made, status="")


def own_test(made: Summary) -> bool:
    """Return whether a run on the user's own data was scored on a held-out part that chose nothing; that score is then
    its result.
    """
    return made.test is not None and "split" in made.task.data and (made.test.best or made.test.last) is not None


def read(run_dir: Path) -> Summary:
    """Return the summary of a run folder. Raises `DamagedSummary`, naming the file."""
    path = run_dir / runfolder.SUMMARY
    with raised_as(DamagedSummary):
        data = jsonfile.read(path)
    try:
        return Summary.from_dict(data)
    except DamagedSummary as error:
        raise DamagedSummary(f"{path} {error.message}.") from None


def read_if_whole(run_dir: Path) -> Summary | None:
    """Like `read`, but return None if there is none or it cannot be read."""
    try:
        return read(run_dir)
    except UsageError:
        return None


def write(run_dir: Path, summary: Summary) -> None:
    """Write atomically: a folder that has a summary is complete."""
    runfolder.write_json(run_dir / runfolder.SUMMARY, summary.as_dict())


def what_is_wrong(data: object) -> str | None:
    """Return why this is not a summary, as the end of a sentence; None if it is one."""
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
