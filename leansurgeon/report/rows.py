"""`Row`, one line of a table with everything that a report shows of it, and `Section`, one table with its notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.reading.jsonfile import value_at
from leansurgeon.report.humans import Spread, spread
from leansurgeon.report.kappa import Kappa, kappa_of
from leansurgeon.report.runs import Run, Seconds, Task
from leansurgeon.training.runs.summary import Scores, Summary, own_test

GLUE = {  # tasks as named in the paper's Table 1
    "mnli": "MNLI",
    "sst2": "SST-2",
    "stsb": "STS-B",
    "rte": "RTE",
    "qnli": "QNLI",
    "qqp": "QQP",
    "mrpc": "MRPC",
    "cola": "CoLA",
}


@dataclass(frozen=True)
class Note:
    """How a value was measured, or why to read it with care. `about` is its subject, which decides where a page shows
    it: "quality", "speed", "memory", "kappa" or "runs"; `caveat` marks what may decide whether a comparison counts.
    """

    says: str
    about: str
    caveat: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a table. `role` is "original", "lean", "control", "run" or "model"; `runs` are its seeds, or the one
    model.
    """

    name: str
    role: str
    control_of: str | None = None
    seeds: tuple[int | None, ...] = ()
    metric: Spread | None = None
    macro_f1: Spread | None = None  # if one class, with share `largest_class`, dominates
    largest_class: float | None = None
    best: Spread | None = None
    before: Spread | None = None
    test: Spread | None = None  # on the test split, with the weights that were best in validation
    test_last: Spread | None = None
    scores: dict[str, Spread] | None = None  # by GLUE task
    loss: Spread | None = None
    parameters: int | None = None
    reference_parameters: int | None = None
    parts: Mapping[str, int | None] | None = None
    shape: Mapping[str, str] | None = None
    memory: Spread | None = None
    memory_kind: str = ""
    step_ms: Spread | None = None
    throughput: Spread | None = None
    throughput_unit: str = ""
    seconds: Spread | None = None
    size: int | None = None  # bytes of the weights on disk
    inference_memory: int | None = None
    latency: Seconds | None = None  # for one sample
    batch_latency: Seconds | None = None
    measured: str = ""  # the same for rows that were timed together, in turns
    kappa: Kappa | None = None
    init: str = ""
    epochs: float | None = None
    inherited_epochs: float | None = None  # epochs of the training here that its first weights come from
    began_trained: bool = False  # its first weights were trained, here or elsewhere
    seeds_still_improving: int = 0
    device: str = ""
    precision: str = ""
    runs: tuple[Run, ...] = ()

    @property
    def trained(self) -> float:
        """Epochs that its last weights were trained for in this experiment."""
        return (self.epochs or 0.0) + (self.inherited_epochs or 0.0)

    @property
    def on_gpu(self) -> bool:
        """Whether the row's memory is that of a CUDA device."""
        return "cuda" in self.memory_kind.lower()

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders of the row's runs, without nameless ones."""
        return tuple(str(run.path) for run in self.runs if str(run.path) != ".")

    @property
    def cut(self) -> SurgeryRecord | None:
        """The surgery of its first seed, or of the first whose result was verified."""
        cuts = [run.cut for run in sorted(self.runs, key=lambda run: run.summary.seed or 0) if run.cut]
        return next((cut for cut in cuts if cut.proof), cuts[0] if cuts else None)

    @property
    def mean_of_scores(self) -> float | None:
        """Mean of the means of GLUE's eight tasks; None if one is missing."""
        scores = self.scores or {}
        return sum(s.mean for s in scores.values()) / len(GLUE) if len(scores) == len(GLUE) else None

    @property
    def change(self) -> float | None:
        """Relative change in parameters against what it is compared with."""
        known = self.parameters and self.reference_parameters
        return self.parameters / self.reference_parameters - 1 if known else None


@dataclass(frozen=True)
class Section:
    """One table with its notes. `kind` is "experiment", "runs", "models", "comparison" or "glue"."""

    kind: str
    name: str
    task: Task | None
    rows: tuple[Row, ...]
    notes: tuple[Note, ...] = ()

    @property
    def original(self) -> Row | None:
        """The row of the unchanged model, if the section has one."""
        return next((row for row in self.rows if row.role == "original"), None)

    @property
    def runs(self) -> list[Run]:
        """The runs of all rows, in the rows' order."""
        return [run for row in self.rows for run in row.runs]


def follow(value: Any, path: str) -> Any:
    """Follow a path such as `kappa.median` through attributes and keys; return None if any step is missing."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return value


def make_row(name: str, role: str, runs: Sequence[Run], control_of: str | None = None) -> Row:
    """Return one row from the runs of one arm, one per seed."""
    first = runs[0]
    head = first.summary

    def over(path: str, of: Callable[[Summary], object] = lambda summary: summary) -> Spread | None:
        """Return mean and deviation over the row's runs of a value in their summaries, or in what `of` returns for
        these.
        """
        return spread(follow(of(run.summary), path) for run in runs)

    best = over("best.metric")
    answering = next((run.inference for run in runs if run.inference), None)
    published = not any(own_test(run.summary) for run in runs)  # else the test score is the row's main metric
    return Row(
        name=name,
        role=role,
        control_of=control_of,
        seeds=tuple(run.summary.seed for run in runs if run.kind == "run"),
        metric=over("metric", scores_of_run) or best,
        macro_f1=over("metrics.macro_f1", lambda s: (scores := scores_of_run(s)) and scores.largest_class and scores),
        largest_class=(scores := scores_of_run(head)) and scores.largest_class,
        best=best,
        before=over("metric", lambda s: (own_test(s) and s.test.before) or s.before),
        test=over("test.best.metric") or over("test.last.metric") if published else None,
        test_last=over("test.last.metric") if published else None,
        loss=over("loss", scores_of_run),
        parameters=head.model.parameters,
        reference_parameters=first.parameters_of_source,
        parts=first.parts,
        shape=first.shape,
        memory=over("memory.bytes"),
        memory_kind=head.memory.kind,
        step_ms=over("step_ms"),
        throughput=over("throughput"),
        throughput_unit=head.throughput_unit,
        seconds=over("seconds"),
        size=answering and answering.size,
        inference_memory=answering and answering.memory,
        latency=answering and answering.one,
        batch_latency=answering and answering.batch,
        measured=answering.together if answering else "",
        kappa=kappa_of([run.summary.kappa for run in runs]),
        init=first.part.init if first.part else "",
        began_trained=first.began_trained,
        epochs=head.epochs,
        seeds_still_improving=sum(run.summary.last_losses_still_falling for run in runs),
        device=head.device,
        precision=head.precision,
        runs=tuple(runs),
    )


def heals(summary: Summary) -> bool:
    """Return whether the run healed an existing model, which then counts as a result too."""
    saved = value_at(summary.recipe, "train", "checkpoint")
    return value_at(saved, "keep_start") is True and value_at(saved, "keep_best") is not False


def scores_of_run(summary: Summary) -> Scores | None:
    """Return the scores that represent a run.

    They are those of the last step, which nothing selected; for healing, those of the model in model/, on samples that
    chose nothing if there are any.
    """
    if own_test(summary):
        return summary.test.best or summary.test.last
    return summary.best if shows_best(summary) else summary.final


def shows_best(summary: Summary) -> bool:
    """Return whether the scores that represent a run are those of its best model, by validation."""
    if own_test(summary):
        return summary.test.best is not None
    return heals(summary) and summary.best is not None
