"""Does search rank shapes as they stand after healing? Kendall's tau on the shapes of one trained model.

Evidence is gathered as `search` gathers it, for so many minutes of processor time (`--minutes`): a round in closed
form on a share of the sample data over all shapes, then, the best first, one with all data and the growing local fit,
as far as the time goes. Who was fitted later stands before who was not, as on the rungs of a search. Then every shape
is healed in full: the cut with the local fit, then distillation from the model that was cut. The half of the held-out
samples that gives the evidence is not the half that scores the healed ones; `--judge N` takes so many further images
to score them, where those of a search are too few to tell shapes apart. What the state file holds is kept, so that the
command goes on where it was stopped:

    python -m tests.benchmarks.ranking --model RUN/original-s0/last --data task:digits --state ranking.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.commands.samples import sample_data
from leansurgeon.measure.data import calibration
from leansurgeon.measure.data.calibration import Batch, Calibration
from leansurgeon.search.findings import kendall_tau
from leansurgeon.search.halving import Score
from leansurgeon.search.heals import HealTrial, task_score
from leansurgeon.search.space import Budget, Candidate, Space, enumerate_shapes
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.shrink import decide
from leansurgeon.surgery.transfer import apply

RATE = 1e-3
Row = dict[str, float | str | Sequence[float]]


@dataclass(frozen=True)
class Healing:
    """Rounds of distillation over the samples to fit, and the seed of their order."""

    epochs: int
    seed: int


def shapes(source: Source, count: int, low: float, high: float) -> list[Candidate]:
    """So many shapes at equal spacing, by parameters, among those between two shares of the source's parameters."""
    total = source.parameters.total
    found = enumerate_shapes(source, Space(), Budget(parameters=int(high * total)), init="transfer", calibrated=True)
    fitting = sorted((c for c in found.candidates if c.parameters >= low * total), key=lambda c: (c.parameters, c.name))
    places = np.unique(np.linspace(0, len(fitting) - 1, min(count, len(fitting))).round().astype(int))
    return [fitting[i] for i in places]


def healed(heals: HealTrial, candidate: Candidate, how: Healing) -> Score:
    """The score after the local fit and distillation, on the half of the held-out samples that no evidence saw."""
    source, data = heals.source, heals.data
    method = Method(heal="local")
    decided = decide(plan(source, candidate.wanted, how.seed, method, calibrated=True), data)
    with scratch() as place:
        (place / "model").mkdir()
        try:
            apply(decided.plan, place / "model", decided.edits)
        finally:
            decided.close()
        loaded = load(place / "model")
        distil(loaded, load(source.folder), data, how)
        with torch.no_grad():
            return task_score(loaded, data, heals.halves[1])


def distil(student, teacher, data: Calibration, how: Healing) -> None:
    """The divergence of the student's predictions from the teacher's, by AdamW at a rate that falls as a cosine;
    nothing is dropped at random, since the teacher drops nothing either.
    """
    teacher.model.eval()
    student.model.eval()
    steps, order = how.epochs * len(data.fit), torch.Generator().manual_seed(how.seed)
    optimizer = torch.optim.AdamW(student.model.parameters(), RATE, weight_decay=0.0)
    pace = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.no_grad():
        said = [teacher.forward(batch).log_softmax(-1) for batch in data.fit]
    for _ in range(how.epochs):
        for i in torch.randperm(len(data.fit), generator=order).tolist():
            logs = student.forward(data.fit[i]).log_softmax(-1)
            loss = torch.nn.functional.kl_div(logs, said[i], log_target=True, reduction="none").sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pace.step()


def with_judges(more: int) -> None:
    """Held-out images of this process are so many more than a search's."""
    for name in ("IMAGES", "SMALL_IMAGES"):
        usual = getattr(calibration, name)
        setattr(calibration, name, usual._replace(heldout=usual.heldout + more))


def apart(batches: list[Batch], more: int) -> tuple[list[Batch], list[Batch]]:
    """Every second batch of those that a search would have gives evidence; all the others score what was healed."""
    usual = len(batches) - more // len(batches[0]["labels"])
    evidence, rest = batches[:usual:2], batches[1:usual:2]
    return evidence, rest + batches[usual:]


def rows_of(state: Path) -> list[Row]:
    """What was measured already."""
    return [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []


def evidence(
    heals: HealTrial, candidates: Sequence[Candidate], rounds: Sequence[Fraction], limit: float, state: Path
) -> None:
    """Append what search would know of all candidates after `limit` seconds of processor time, those of earlier calls
    counted. The first round is for all, so that there is an order.
    """
    for number, share in enumerate(rounds):
        rows = [row for row in rows_of(state) if row["stage"] == "evidence"]
        known, first = standing(rows), {c.name: i for i, c in enumerate(candidates)}
        spent = sum(row["cpu"] for row in rows)
        done = {row["shape"] for row in rows if row["round"] == number}
        for candidate in sorted(candidates, key=lambda c: (known.get(c.name, ()), first[c.name])):
            if candidate.name in done:
                continue
            if number and spent >= limit:
                return
            begun = time.process_time()
            found = heals.heal_candidate(candidate, share)["choosing"].score
            spent += (cpu := time.process_time() - begun)
            append(state, {"stage": "evidence", "shape": candidate.name, "round": number, "key": found.key, "cpu": cpu})
            print(f"{candidate.name}: {found.label} {found.text} in round {number + 1}", flush=True)


def append(state: Path, row: Row) -> None:
    """One more row of the state file."""
    with state.open("a") as file:
        file.write(json.dumps(row) + "\n")


def standing(rows: Sequence[Row]) -> dict[str, tuple[float, ...]]:
    """Where each shape stands, the smaller the better: who came to a later round first, then the key of its score."""
    found: dict[str, tuple[float, ...]] = {}
    for row in sorted(rows, key=lambda row: row.get("round", 0)):
        found[row["shape"]] = (-row.get("round", 0), *row["key"])
    return found


def tau(rows: Sequence[Row], since: int = 0) -> float | None:
    """Kendall's tau between the order of the evidence and that after healing, by what search itself orders by: the
    metric, then the loss; `since` 1: by the loss alone.
    """
    cut = [row | {"key": row["key"][since:]} for row in rows]
    orders = [standing([row for row in cut if row["stage"] == stage]) for stage in ("evidence", "healed")]
    names = [name for name in orders[0] if name in orders[1]]
    places = [sorted(set(order.values())) for order in orders]
    return kendall_tau(*([place.index(order[n]) for n in names] for order, place in zip(orders, places, strict=True)))


def summary(rows: Sequence[Row], sizes: Mapping[str, int]) -> str:
    """The orders side by side, the tau and what the evidence cost."""
    first, last = (standing([row for row in rows if row["stage"] == stage]) for stage in ("evidence", "healed"))
    places = {name: place for place, name in enumerate(sorted(first, key=lambda name: first[name]), 1)}
    scores = {row["shape"]: row["score"] for row in rows if row["stage"] == "healed"}
    lines = [{"shape": name, "parameters": sizes.get(name), "place by evidence": places.get(name),
              "rounds": 1 - first[name][0] if name in first else 0, "healed": scores[name]}
             for name in sorted(last, key=lambda name: last[name])]  # fmt: skip
    spent = sum(row["cpu"] for row in rows if row["stage"] == "evidence") / 60
    told, by_loss = ("none, all alike" if found is None else f"{found:+.2f}" for found in (tau(rows), tau(rows, 1)))
    said = f"Kendall's tau over {len(lines)} shapes: {told}, after {spent:.1f} CPU minutes of evidence"
    return f"{tabulate(lines, headers='keys', tablefmt='github')}\n{said}; by loss alone {by_loss}"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--between", default="0.3,0.7", help="shares of the source's parameters")
    parser.add_argument("--minutes", type=float, default=10, help="of processor time for the evidence of all shapes")
    parser.add_argument("--share", type=Fraction, default=Fraction(1, 4), help="of the samples, in the first round")
    parser.add_argument("--judge", type=int, default=0, help="so many images more to score what was healed")
    parser.add_argument("--epochs", type=int, default=5, help="of distillation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("ranking.jsonl"))
    asked = parser.parse_args(words)
    torch.manual_seed(asked.seed)
    source = open_source(asked.model)
    with_judges(asked.judge)
    data = sample_data(source, asked.data, None, None, asked.seed, print)
    if data.task is None:
        raise SystemExit(f"{asked.data} has no labels for {source.name}, so there is no metric to rank by.")
    low, high = map(float, asked.between.split(","))
    candidates = shapes(source, asked.shapes, low, high)
    with scratch() as place:
        heals = HealTrial(source, data, place, asked.seed)
        if asked.judge:
            heals.halves = apart(data.heldout, asked.judge)
        evidence(heals, candidates, (asked.share, Fraction(1)), 60 * asked.minutes, asked.state)
        done = {row["shape"] for row in rows_of(asked.state) if row["stage"] == "healed"}
        for candidate in candidates:
            if candidate.name in done:
                continue
            begun = time.process_time()
            after = healed(heals, candidate, Healing(asked.epochs, asked.seed))
            row: Row = {"stage": "healed", "shape": candidate.name, "key": after.key, "score": after.text}
            append(asked.state, row | {"cpu": time.process_time() - begun})
            print(f"{candidate.name}: {after.label} {after.text} healed", flush=True)
    print(summary(rows_of(asked.state), {c.name: c.parameters for c in candidates}))


if __name__ == "__main__":
    main()
