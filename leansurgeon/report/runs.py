"""One training, or one model that is not trained yet, in the form that reports need: its typed summary or surgery
record, and the files beside it (curves, recipe, results of `heads` and `bench`), which are read on first use.

A file that is missing, malformed or truncated gives None, and the report continues without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.proof.report_numbers import sentence
from leansurgeon.checkpoints.record import FRESH, Comparison, Origin, PairedFigure, SurgeryRecord
from leansurgeon.checkpoints.recorded.part import Recorded
from leansurgeon.checkpoints.whereabouts import holding
from leansurgeon.errors import UsageError
from leansurgeon.reading import jsonfile
from leansurgeon.reading.files import read_text
from leansurgeon.reading.jsonfile import Json, JsonObject, value_at
from leansurgeon.reading.values import figures, items, number, text, whole, words
from leansurgeon.training.runs import summary
from leansurgeon.training.runs.folder import BEST, EXPERIMENT, LAST, METRICS, RECIPE, call_in
from leansurgeon.training.runs.summary import OnTest, Summary, own_test

if TYPE_CHECKING:
    from leansurgeon.checkpoints.source import Source

SHAPE = ("depth", "heads", "head_dim", "mlp_dim")
PARTS = ("embeddings", "attention", "mlp", "rest")
PREPARED = (  # task options that change what a held-out sample is
    "image_size", "channels", "crop_pct", "interpolation", "mean", "std", "seq_len", "mask_prob", "prose",
)  # fmt: skip
KAPPA = "kappa.json"  # written by `leansurgeon kappa` in a run's folder
UNTRAINED = Summary(model=summary.Model(), task=summary.Task())


def kappa_name(model: Path) -> str:
    """Return the file in a run that holds the result of `leansurgeon kappa MODEL --data RUN` for another model."""
    return f"kappa-{display_name(model)}.json"


def read_cut(record: SurgeryRecord | None) -> SurgeryRecord | None:
    """Return the record of a surgery; None if there is none, or it has no plan."""
    return record if record and record.plan else None


def describe_proof(cut: SurgeryRecord) -> str:
    """Return the sentence about the reload in a fresh process; empty if it was not verified."""
    if cut.proof is None:
        return ""
    return (
        f"Proof: reloaded in a fresh process with {text(cut.proof.loaded_with, '?')}; "
        f"{cut.proof.parameters:,} parameters, {cut.proof.tensors}."
    )


def describe_comparison(cut: SurgeryRecord) -> str:
    """Return the result of the comparison with its source; empty without one."""
    return text(sentence(cut.proof.compared, cut.language)) if cut.proof and cut.proof.compared else ""


def read_judged(record: SurgeryRecord | None) -> tuple[tuple[str, str], ...]:
    """Return the data that a model was scored on and the result as a sentence; empty if there is none."""
    if record is None:
        return ()
    return tuple((text(name), text(sentence(other, record.language))) for name, other in record.judged.items())


@dataclass(frozen=True)
class Seconds:
    """Median and quartiles of a time."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Inference:
    """Inference costs: bytes on disk and peak bytes of a batch, times for one sample and for a batch. `together` is the
    same for models that were timed in turns.
    """

    size: int | None
    memory: int | None
    one: Seconds | None
    batch: Seconds | None
    together: str
    load: str
    device: str


def inference_of(document: Json) -> Inference | None:
    """Read the document of `measure.costs.inference`; None if it is not one."""
    if not isinstance(document, dict):
        return None
    times = {}
    for key in ("one", "batch"):
        figures = [number(value_at(document, key, part)) for part in ("median", "low", "high")]
        times[key] = None if None in figures else Seconds(*figures)
    batch, tokens = (whole(value_at(document, "load", key)) for key in ("batch", "tokens"))
    load = f"batches of {batch}" + (f" x {tokens} tokens" if (tokens or 1) > 1 else "")
    texts = {key: text(document.get(key)) for key in ("measured", "device")}
    known = {key: whole(document.get(key)) for key in ("size", "memory")}
    return Inference(**known, **times, together=texts["measured"], load=load, device=texts["device"])


@dataclass(frozen=True)
class Task:
    """What was measured: the task, the paper's name of its metric, and the number of samples. `samples` identifies the
    samples and how they were prepared: rows of one table share it. They are `held_out` if they chose nothing.
    """

    name: str
    metric: str
    label: str
    higher_is_better: bool
    percent: bool
    eval_samples: int | None
    samples: str = ""
    held_out: bool = False

    @property
    def decimals(self) -> int:
        """Decimals of a percentage that the number of evaluation samples supports."""
        return 2 if (self.eval_samples or 0) >= 20_000 else 1


@dataclass(frozen=True)
class Run:
    """A run or, with `kind` "model", a model that was not trained here; its summary then holds what its record or files
    say.
    """

    path: Path
    kind: str
    when: float = field(compare=False)
    summary: Summary = UNTRAINED
    task: Task | None = None
    cut: SurgeryRecord | None = None
    judged_in: Path | None = None  # the run that scored it, if it is not a run itself
    judged: tuple[tuple[str, str], ...] = ()  # data it was scored on beside its source, and the result as a sentence
    measured: Inference | None = None  # measured by this report
    compared: Comparison | None = None  # with the first model of this report

    @property
    def parameters_of_source(self) -> int | None:
        """Parameters before the surgery."""
        return whole(value_at(self.summary.model.surgery, "plan", "parameters_before", "total"))

    @property
    def parts(self) -> Mapping[str, int | None] | None:
        """The number of parameters of each part; None if unknown."""
        parts = self.summary.model.parts
        return {key: whole(parts.get(key)) for key in PARTS} if isinstance(parts, dict) else None

    @property
    def shape(self) -> Mapping[str, str] | None:
        """`{"depth": "12", ...}`, with `4,8,16,32` if stages differ."""
        stages = items(value_at(self.summary.model.shape, "stages"))
        column = {key: ",".join(str(whole(value_at(stage, key)) or "?") for stage in stages) for key in SHAPE}
        return column if stages else None

    @property
    def began_trained(self) -> bool:
        """Whether its first weights were trained, here or elsewhere."""
        transferred = self.part is not None and self.part.init == "transfer"
        return transferred or text(value_at(self.summary.model.surgery, "initialised"), FRESH) != FRESH

    @property
    def expected(self) -> Mapping[str, Mapping[str, float]]:
        """What its recipe expects of each arm: the values that are numbers."""
        arms = self.summary.recipe.get("expected")
        return {text(arm): figures(values) for arm, values in arms.items()} if isinstance(arms, dict) else {}

    @property
    def part(self) -> summary.Part | None:
        """Where it belongs in an experiment; None if it is not part of one."""
        return self.summary.experiment

    @property
    def glue_task(self) -> str:
        """The GLUE task that it was trained on; "" for any other."""
        return text(self.summary.task.data.get("task")) if self.summary.task.name == "glue" else ""

    @cached_property
    def curve(self) -> Curve | None:
        """The curve that the training logged; None for a model, or a run without one.

        An evaluation is logged with its step only; its epoch follows from the epochs and steps of the summary.
        """
        epochs, steps = self.summary.epochs, self.summary.steps
        if self.kind != "run" or not epochs or not steps:
            return None
        loss, metric = [], []
        for step, entry in read_metrics(self.path):
            for kind, key, points in (("train", "loss", loss), ("eval", "metric", metric)):
                value = number(entry.get(key))
                if entry.get("type") == kind and value is not None:
                    points.append((step * epochs / steps, value))
        return Curve(thin_points(loss), thin_points(metric)) if loss or metric else None

    @cached_property
    def heads(self) -> HeadStudy | None:
        """The study of heads in the folder, if any."""
        document = jsonfile.read_object_if_whole(self.path / HEADS)
        return None if document is None else HeadStudy.from_dict(document)

    @cached_property
    def inference(self) -> Inference | None:
        """Inference costs, if they were measured."""
        return self.measured or inference_of(jsonfile.read_object_if_whole(self.path / INFERENCE))

    @cached_property
    def changes(self) -> JsonObject:
        """Samples on which models differ, as the experiment found them; empty outside of experiments."""
        return (self.part and jsonfile.read_object_if_whole(self.path.parent / CHANGES)) or {}

    @cached_property
    def bench(self) -> Bench | None:
        """The benchmark in the folder, if any; None without rows."""
        bench = Bench.from_dict(jsonfile.read_object_if_whole(self.path / BENCH) or {})
        return bench if bench.rows else None

    @cached_property
    def recipe(self) -> str | None:
        """The resolved recipe of a run, as stored in its folder."""
        return text_of(self.path / RECIPE) if self.kind == "run" else None

    @cached_property
    def experiment_file(self) -> ExperimentFile | None:
        """The file that `leansurgeon run` wrote beside the runs of its arms."""
        return find_experiment_file(self.path) if self.kind == "run" else None


def read_run(path: Path, evidence: Summary | SurgeryRecord | Source, when: float) -> Run:
    """Read a folder: a run by its summary, a model by its surgery record, or as it is."""
    if isinstance(evidence, Summary):
        cut, judged = read_cut(evidence.model.record), read_judged(record.read_if_whole(path / BEST))
        return Run(path, "run", when, evidence, task_of(evidence), cut, judged=judged)
    if not isinstance(evidence, SurgeryRecord):
        counts = evidence.parameters.as_dict()
        known = summary.Model(shape=evidence.shape.as_dict(), parameters=counts["total"], parts=counts)
        return Run(path, "model", when, replace(UNTRAINED, model=known))
    after, parts = evidence.plan.after, dict(evidence.plan.parameters_after)
    known = summary.Model(shape=after and after.as_dict(), parameters=parts.get("total"), parts=parts or None)
    known = replace(known, surgery=evidence.as_dict())
    made = replace(UNTRAINED, model=known, finished=text(evidence.created), versions=words(evidence.versions))
    return Run(path, "model", when, made, cut=read_cut(evidence), judged=read_judged(evidence))


def find_judged(one: Run, run: Run) -> Run | None:
    """Return the model as `run` scored it on held-out samples, if the run began with it or learned from it;
    else None.
    """
    test, began = run.summary.test, run.summary.model
    if not own_test(run.summary):
        return None
    for scores, files in ((test.before, began.start.files), (test.source, began.record and began.record.source.sha256)):
        if scores and files and holding(one.path, Origin(sha256=files)):
            kappa = jsonfile.read_object_if_whole(run.path / kappa_name(one.path))
            made = replace(one.summary, task=run.summary.task, test=OnTest(test.samples, scores), kappa=kappa)
            return replace(one, task=run.task, summary=made, judged_in=run.path)
    return None


def compare_models(runs: Sequence[Run]) -> dict[Path, list[Run]]:
    """For every model that was compared with its source, if that is here too, return both as measured then, one of each
    per data set, by folder.

    If no data set was named, the comparison of the verification counts.
    """
    found = {}
    # cached: it reads all weights of a model
    holds = cache(lambda path, digests: holding(path, Origin(sha256=dict(digests))))
    for cut in (run for run in runs if run.kind == "model" and run.cut):
        made = cut.cut
        proven = made.proof.compared if made.proof and made.decided.calibration else None
        judged = made.judged or ({made.decided.calibration.name: proven} if proven and proven.data != "noise" else {})
        digests = tuple(sorted(made.source.sha256.items())) if judged else ()
        others = (run for run in runs if run.kind == "model" and not (run.cut and run.cut.source == made.source))
        for source in (run for run in others if digests and holds(run.path, digests)):
            for name, compared in judged.items():
                if (figure := figure_of(compared, made.language)) is None:
                    continue
                metric, label, percent, both = figure
                samples = None if metric == "perplexity" else compared.scored or None
                held_out = compared.data == "held-out data"
                sample = made.decided.calibration.sha256 if not made.judged else ""
                same = f"{name} {both.source:.6g} {digests} {sample}"
                task = Task(
                    text(Path(name).name or name),
                    metric,
                    label,
                    metric != "perplexity",
                    percent,
                    samples,
                    same,
                    held_out,
                )
                for run, value in ((source, both.source), (cut, both.result)):
                    scores = replace(run.summary, final=summary.Scores(metric=value))
                    found.setdefault(run.path, []).append(replace(run, task=task, summary=scores))
    return found


def compared_on(runs: Sequence[Run], name: str, *, language: bool) -> tuple[Task | None, list[Run]]:
    """Return the task of a comparison with the first model, on data of this name, and the same models with their
    scores.
    """
    found = {run.path: figure for run in runs if run.compared and (figure := figure_of(run.compared, language))}
    if not found:
        return None, list(runs)
    metric, label, percent, both = next(iter(found.values()))
    one = next(run.compared for run in runs if run.path in found)
    higher = metric != "perplexity"
    rows = one.embeddings.samples if one.embeddings else one.scored if higher else None  # of a text, tokens are scored
    task = Task(name, metric, label, higher, percent, rows or None, held_out=one.data == "held-out data")
    figures = {run.path: found[run.path][3].result for run in runs if run.path in found} | {runs[0].path: both.source}
    made = []
    for run in runs:
        scores = summary.Scores(metric=figures[run.path]) if run.path in figures else None
        made.append(replace(run, task=task, summary=replace(run.summary, final=scores, best=None, test=None)))
    return task, made


def figure_of(compared: Comparison, language: bool) -> tuple[str, str, bool, PairedFigure] | None:
    """Return key, name, whether it is a share, and values of a comparison's metric; None if it has none."""
    if compared.loss and language:
        return (
            "perplexity",
            "perplexity",
            False,
            PairedFigure(*(math.exp(min(loss, 700)) for loss in (compared.loss.source, compared.loss.result))),
        )
    if compared.accuracy:
        return "accuracy", "accuracy", True, compared.accuracy
    if compared.scores:
        name, both = next(iter(compared.scores.items()))
        return name, name, name.endswith("F1"), both
    if compared.embeddings:
        return "cosine", "cosine to the source", False, PairedFigure(1.0, compared.embeddings.cosine)
    return None


def task_of(made: Summary) -> Task:
    """Return the task as reports name it; missing names become a question mark."""
    task, options = made.task, value_at(made.recipe, "task")
    name, metric = (said or "?" for said in (task.name, task.metric))
    label, count = task.metric_label or metric, made.test.samples if own_test(made) else task.eval_samples
    held = text(value_at(task.data, "split", "test"), text(task.data.get("source")))
    how = [f"{key} {options[key]}" for key in PREPARED if isinstance(options, dict) and options.get(key) is not None]
    words = [f"vocabulary {task.data.get('vocab_size')}"] if metric == "perplexity" else []
    same = ", ".join([held, *how, *words])
    return Task(name, metric, label, task.higher_is_better, task.percent, count or None, same, own_test(made))


HEADS, BENCH = "heads.json", "bench.json"  # written by `heads` and `bench`
CHANGES = "changes.json"  # beside the runs of an experiment (`training.changes`)
INFERENCE = "inference.json"  # written by `run` and `report --measure` (`measure.costs.inference`)
POINTS = 240  # of a curve at most: more than a drawing of 360 units can show
LARGEST = 64 * 2**20  # most bytes read of one file

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Training of one seed: (epoch, value) of the training loss, and of the task's metric on the evaluation data."""

    loss: Points
    metric: Points


@dataclass(frozen=True)
class ExperimentFile:
    """The resolved recipe of an experiment, and the command that made it ("" if unknown)."""

    path: Path
    text: str
    call: str


def display_name(path: Path) -> str:
    """Return the name of a run or model: that of its folder, not `model/` or `last/` inside a run."""
    whole = path.absolute()
    parts = [part for part in whole.parts if part not in (".", whole.anchor)]
    if ".." in parts:
        parts = list(whole.resolve().parts[1:])
    while len(parts) > 1 and parts[-1] in (BEST, LAST):
        parts.pop()
    return parts[-1] if parts else str(path)


def name_runs(runs: Sequence[Run]) -> dict[Path, str]:
    """Return the names for a table, by path: with the parent's name in front if two are equal."""
    short, names = [display_name(run.path) for run in runs], {}
    for run, name in zip(runs, short, strict=True):
        whole = run.path.absolute()
        names[run.path] = text(name if short.count(name) == 1 else f"{whole.parent.name}/{whole.name}", "?")
    return names


def read_metrics(run: Path, *, newest_first: bool = False) -> Iterator[tuple[float, JsonObject]]:
    """Yield the lines of a run's metrics that have a step, with the step."""
    lines = (text_of(run / METRICS) or "").splitlines()
    for line in reversed(lines) if newest_first else lines:
        try:
            entry = jsonfile.parse(line, "")
        except UsageError:  # truncated
            continue
        step = number(value_at(entry, "step"))
        if step is not None:
            yield step, entry


def thin_points(points: list[tuple[float, float]]) -> Points:
    """Return at most `POINTS` points: the smallest and the largest of every stretch, so that no peak is lost, and both
    ends.
    """
    if len(points) <= POINTS:
        return tuple(points)
    stretches, inner = POINTS // 2 - 1, points[1:-1]
    kept = {0, len(points) - 1}
    for i in range(stretches):
        stretch = range(i * len(inner) // stretches, (i + 1) * len(inner) // stretches)
        kept |= {1 + min(stretch, key=lambda j: inner[j][1]), 1 + max(stretch, key=lambda j: inner[j][1])}
    return tuple(points[i] for i in sorted(kept))


def find_experiment_file(run: Path) -> ExperimentFile | None:
    """Return the experiment's file beside the run's folder, with its command; None if it is missing or unreadable."""
    path = run.parent / EXPERIMENT
    content = text_of(path) if run != Path() and path.is_file() else None
    return ExperimentFile(path, content, call_in(content)) if content is not None else None


def text_of(path: Path) -> str | None:
    """Return a file's text; None if it is too large, unreadable or not text."""
    try:
        return read_text(path, LARGEST)
    except UsageError:
        return None


@dataclass(frozen=True)
class AttentionHeads(Recorded):
    """The heads of one layer, with a number for each."""

    kind: str = "self"
    stage: int = 0
    layer: int = 0  # from 0
    importance: tuple[float, ...] = ()


@dataclass(frozen=True)
class PruningPoint(Recorded):
    """A point of a pruning curve: the score with this share of heads switched off."""

    fraction: float | None = None
    accuracy: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class PruningCurve(Recorded):
    """The score as more heads are switched off, for each order."""

    orders: Mapping[str, tuple[PruningPoint, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadStudy(Recorded):
    """The document of `leansurgeon heads`: importance of heads, and the cost of removing them."""

    attentions: tuple[AttentionHeads, ...] = ()
    samples: Mapping[str, int] = field(default_factory=dict)
    curve: PruningCurve = PruningCurve()

    @property
    def score(self) -> str:
        """The curves' score: "accuracy" or "loss"."""
        return "accuracy" if any(p.accuracy is not None for p in self.curve.orders.get("importance", ())) else "loss"


@dataclass(frozen=True)
class Quartiles(Recorded):
    """A value over rounds and, if it compares two, the verdict."""

    median: float | None = None
    verdict: str = ""


@dataclass(frozen=True)
class BenchRow(Recorded):
    """One shape under one attention backend; times in seconds."""

    name: str = "?"
    backend: str = ""
    seconds: Mapping[str, Quartiles] = field(default_factory=dict)
    training_per_second: float | None = None
    forward_per_second: float | None = None
    peak_memory: float | None = None
    step_against_first: Quartiles = Quartiles()

    def time(self, key: str) -> float | None:
        """Return the median of a measured time."""
        return self.seconds[key].median if key in self.seconds else None


@dataclass(frozen=True)
class Load(Recorded):
    """What was timed."""

    batch: float | None = None
    tokens: float | None = None
    rounds: float | None = None
    precision: str = "?"


@dataclass(frozen=True)
class Bench(Recorded):
    """The document of `leansurgeon bench`."""

    rows: tuple[BenchRow, ...] = ()
    load: Load = Load()
    unit: str = "samples"
    device: str = "?"
    peak_memory_kind: str = ""
    skipped: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
