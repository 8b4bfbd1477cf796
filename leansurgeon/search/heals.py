"""Try candidates by short heals: calibrated shrink on a share of the sample data, judged on its guard samples. Imports
torch. On the last rung a candidate is healed as by `shrink`: refitted in closed form and by the growing local fit,
which `surgery.spans` bounds in passes of the source over the samples; on earlier rungs only in closed form.

The guard samples of every cut choose among candidates. The held-out ones are used once, for the winner, its control and
the source, since the score that selected the best of many is biased upwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import torch

from leansurgeon.architectures.towers import of_section
from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import Diverged, UsageError
from leansurgeon.intervals import binomial_variance
from leansurgeon.measure.data.batches import inner
from leansurgeon.measure.data.calibration import Batch, Calibration
from leansurgeon.measure.heads.judge import OutputScorer
from leansurgeon.progress import Say, silent, track
from leansurgeon.reading import jsonfile
from leansurgeon.reading.pooling import read_pooling
from leansurgeon.search.halving import Result, Results, Rung, Score
from leansurgeon.search.space import Candidate
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.shrink import decide
from leansurgeon.surgery.transfer import apply
from leansurgeon.tasks.base import Sums
from leansurgeon.training.runs.folder import write_json

PARTS = ("choosing", "untouched")


@dataclass
class HealTrial:
    """Heals candidates and judges them. Every result is a file in `folder`, so an interrupted search can resume."""

    source: Source
    data: Calibration
    folder: Path
    seed: int = 0
    say: Say = silent
    device: str = "cpu"  # for healing; candidates are judged on the CPU
    references: dict[str, list[torch.Tensor]] = field(init=False, default_factory=dict)

    def attempt(self, rung: Rung, candidates: Sequence[Candidate]) -> Results:
        """Return the scores of one rung on the samples that choose."""
        results = {}
        for number, candidate in track(list(enumerate(candidates, 1)), f"rung {rung.number}", "candidates/s"):
            results[candidate.name] = result = self.of(candidate, rung.share)["choosing"]
            told = f"{result.score.label} {result.score.text}" if result.score else f"failed: {result.failed}"
            self.say(f"  [{number}/{len(candidates)}] {candidate.name}: {told}")
        return results

    def score_held_out(self, candidate: Candidate) -> Score | None:
        """Return the score on held-out samples of a fully healed candidate."""
        return self.of(candidate, Fraction(1))["untouched"].score

    def of(self, candidate: Candidate, share: Fraction) -> Results:
        """Return scores on both parts, from the file if it exists."""
        file = self.folder / f"{candidate.name}-{share.numerator}of{share.denominator}-{heal_of(share)}.json"
        try:
            read = jsonfile.read_object(file)
            return {part: Result(one["score"] and Score(**one["score"]), one["failed"]) for part, one in read.items()}
        except (UsageError, ValueError, TypeError, KeyError):
            pass
        try:
            results = self.heal_candidate(candidate, share)
        except Diverged as error:  # concerns this shape only; other errors concern the source or the data
            results = {part: Result(None, error.message) for part in PARTS}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {part: asdict(result) for part, result in results.items()})
        return results

    def heal_candidate(self, candidate: Candidate, share: Fraction) -> Results:
        """Cut and refit a candidate, and return its scores on both parts."""
        if candidate.shape == self.source.shape:
            return self.judge_folder(self.source.folder)
        method = Method(heal=heal_of(share))
        steps = plan(self.source, candidate.wanted, self.seed, method, calibrated=True)
        decided = decide(steps, part_of(self.data, share), device=self.device)
        with scratch() as place:
            folder = place / "model"
            folder.mkdir()
            try:
                apply(decided.plan, folder, decided.edits)
            finally:
                decided.close()
            return self.judge_folder(folder)

    def judge_folder(self, folder: Path) -> Results:
        """Return the scores of the model in a folder on both parts (on held-out samples only if there are any)."""
        loaded = self.load_tower(folder)
        parts = zip(PARTS, (self.data.guard, self.data.heldout), strict=True)
        return {part: Result(self.score(loaded, part, batches)) for part, batches in parts if batches}

    def load_tower(self, folder: Path) -> Loaded:
        """Load a model for measuring; of several towers, the one that is searched."""
        opened = load(folder, tower=of_section(self.source.architecture.section)).alone()
        opened.model.eval()
        return opened

    @torch.no_grad()
    def score(self, loaded: Loaded, part: str, batches: list[Batch]) -> Score:
        """Return the task's metric, or without a task the mean cosine to the source's output."""
        if self.data.task is not None:
            return task_score(loaded, self.data, batches)
        judge = OutputScorer(loaded, pooling=read_pooling(self.source.folder))
        if part not in self.references:
            source = self.load_tower(self.source.folder)
            self.references[part] = [OutputScorer(source).forward(batch) for batch in batches]
        losses = [judge.losses(judge.forward(b), b, r) for b, r in zip(batches, self.references[part], strict=True)]
        lost = torch.cat(losses)
        if not torch.isfinite(lost).all():
            raise Diverged("its output is no finite number.")
        return Score(1 - float(lost.double().mean()), "cosine", True, False, samples=len(lost))


def heal_of(share: Fraction) -> str:
    """Return how candidates are healed on a rung with this share of the sample data; the last rung has all of it."""
    return "local" if share == 1 else "closed"


def task_score(loaded: Loaded, data: Calibration, batches: list[Batch]) -> Score:
    """Return the task's metric over all batches. Raises `Diverged` if the loss is not finite."""
    scores = [data.task.score(loaded.forward(batch), batch) for batch in batches]
    totals = [sum(map(float, parts)) for parts in zip(*(score[:4] for score in scores), strict=True)]
    sums = Sums(*totals, None if scores[0].extra is None else sum(score.extra.double().numpy() for score in scores))
    samples = sum(len(batch["labels"]) for batch in batches)
    loss = sums.loss_sum / max(1.0, sums.loss_count)
    if not math.isfinite(loss):
        raise Diverged("its loss is no finite number.")
    metric = data.task.metric
    value = data.task.metric_value(sums)[metric.key]
    right = metric.percent and "accuracy" in metric.key and int(sums.metric_count) == samples
    error = math.sqrt(binomial_variance(value, samples)) if right else None
    return Score(value, metric.label, metric.higher_is_better, metric.percent, loss, samples, error)


# -- sample data ----------------------------------------------------------------------------------


def part_of(data: Calibration, share: Fraction) -> Calibration:
    """Return a `share` of the fit and guard samples: whole batches (at least one), evenly spread since sentences are
    sorted by length.
    """
    chosen = {}
    for part in ("fit", "guard"):
        batches = getattr(data, part)
        chosen[part] = [batches[i] for i in inner(len(batches), max(1, round(len(batches) * share)))]
    return replace(data, **chosen)
