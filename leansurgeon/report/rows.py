"""`Row`, one line of a table with all that a report draws of it, and `Section`, one table with what must be said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leansurgeon.reading.jsonfile import value_at
from leansurgeon.report.humans import Spread, spread
from leansurgeon.report.kappa import Kappa, kappa_of
from leansurgeon.report.runs import CutSummary, Run, Seconds, Task
from leansurgeon.training.runs.summary import Scores, Summary, own_test

GLUE = {  # its tasks as the paper's Table 1 has them
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
    """How a figure came about, or why it must be read with care. `about` is what it concerns and where a page shows it:
    "quality", "speed", "memory", "kappa" or "runs"; `caveat` marks what may decide whether a comparison counts.
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
    macro_f1: Spread | None = None  # where one class has most samples, `largest_class` of all
    largest_class: float | None = None
    best: Spread | None = None
    before: Spread | None = None
    test: Spread | None = None  # of the test split, by the weights that were best in validation
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
    size: int | None = None  # bytes of the weights on the disk
    inference_memory: int | None = None
    latency: Seconds | None = None  # of one sample
    batch_latency: Seconds | None = None
    measured: str = ""  # the same for rows that were timed in turns
    kappa: Kappa | None = None
    init: str = ""
    epochs: float | None = None
    inherited_epochs: float | None = None  # epochs of the training here that its first weights come from
    began_trained: bool = False  # its first weights had learned something, here or elsewhere
    seeds_still_improving: int = 0
    device: str = ""
    precision: str = ""
    runs: tuple[Run, ...] = ()

    @property
    def trained(self) -> float:
        """Epochs that its last weights have seen in this experiment."""
        return (self.epochs or 0.0) + (self.inherited_epochs or 0.0)

    @property
    def on_gpu(self) -> bool:
        """Whether the row's memory is that of a CUDA device."""
        return "cuda" in self.memory_kind.lower()

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders of the row's runs, without the nameless one."""
        return tuple(str(run.path) for run in self.runs if str(run.path) != ".")

    @property
    def cut(self) -> CutSummary | None:
        """The surgery behind it: that of the first seed, or of the first whose result was proven."""
        cuts = [run.cut for run in sorted(self.runs, key=lambda run: run.summary.seed or 0) if run.cut]
        return next((cut for cut in cuts if cut.proven), cuts[0] if cuts else None)

    @property
    def mean_of_scores(self) -> float | None:
        """Mean of the means of GLUE's eight tasks; None while one is missing."""
        scores = self.scores or {}
        return sum(s.mean for s in scores.values()) / len(GLUE) if len(scores) == len(GLUE) else None

    @property
    def change(self) -> float | None:
        """By how much it has more parameters than what it is compared with, as a share."""
        known = self.parameters and self.reference_parameters
        return self.parameters / self.reference_parameters - 1 if known else None


@dataclass(frozen=True)
class Section:
    """One table with what must be said about it. `kind` is "experiment", "runs", "models" or "glue"."""

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
    """What lies at a path such as `kappa.median` of attributes and keys; None where any step is missing."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return value


def make_row(name: str, role: str, runs: Sequence[Run], control_of: str | None = None) -> Row:
    """One row from the runs of one arm, one per seed."""
    first = runs[0]
    head = first.summary

    def over(path: str, of: Callable[[Summary], object] = lambda summary: summary) -> Spread | None:
        """Mean and deviation over the row's runs of a figure of their summaries, or of what lies `of` these."""
        return spread(follow(of(run.summary), path) for run in runs)

    best = over("best.metric")
    answering = next((run.inference for run in runs if run.inference), None)
    published = not any(own_test(run.summary) for run in runs)  # else the test's figure is the row's own
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
    """Whether the run was to make a model better that was there: what it was counts as a result, too."""
    saved = value_at(summary.recipe, "train", "checkpoint")
    return value_at(saved, "keep_start") is True and value_at(saved, "keep_best") is not False


def is_start_kept(summary: Summary) -> bool:
    """Whether a run that heals leaves the model as it was."""
    return heals(summary) and summary.best is not None and summary.best.step == 0


def scores_of_run(summary: Summary) -> Scores | None:
    """The scores that stand for a run: of the last step, which nothing has chosen; of healing those of the model that
    it leaves in model/, on samples that chose nothing where there are such.
    """
    if own_test(summary):
        return summary.test.best or summary.test.last
    return summary.best or summary.final if heals(summary) else summary.final


def metric(scores: Scores | None) -> float | None:
    """The metric of the scores, None without scores."""
    return scores.metric if scores else None
