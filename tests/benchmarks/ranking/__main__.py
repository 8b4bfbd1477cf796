"""Does search rank shapes as they stand after healing? Kendall's tau on the shapes of one trained model.

Each shape is scored twice on held-out samples: as search scores it on a rung (a closed form on a share of the data),
and after full healing (the cut with the growing local fit, then distillation from the model that was cut). Shapes that
the state file holds are kept, so that the command goes on where it was stopped:

    python -m tests.benchmarks.ranking --model RUN/original-s0/last --data task:digits --state ranking.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.publish.leftovers import scratch
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.search.evidence import outputs
from leansurgeon.search.heals import Heals, task_score
from leansurgeon.search.score import Score, kendall_tau
from leansurgeon.search.space import Budget, Candidate, Space, enumerate_shapes
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.shrink import decide
from leansurgeon.surgery.write.apply import apply
from leansurgeon.training.runs.sample_data import sample_data

RATE = 1e-3
Row = dict[str, float | str]


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


def healed(source: Source, candidate: Candidate, data: Calibration, how: Healing) -> Score:
    """The score on the samples to judge after the local fit and distillation."""
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
        loaded.model.eval()
        with torch.no_grad():
            return task_score(loaded, data, data.heldout)


def distil(student, teacher, data: Calibration, how: Healing) -> None:
    """The divergence of the student's predictions from the teacher's, by AdamW at a rate that falls as a cosine."""
    teacher.model.eval()
    student.model.train()
    steps, order = how.epochs * len(data.fit), torch.Generator().manual_seed(how.seed)
    optimizer = torch.optim.AdamW(student.model.parameters(), RATE, weight_decay=0.0)
    pace = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.no_grad():
        said = [outputs(teacher, batch).log_softmax(-1) for batch in data.fit]
    for _ in range(how.epochs):
        for i in torch.randperm(len(data.fit), generator=order).tolist():
            logs = outputs(student, data.fit[i]).log_softmax(-1)
            loss = torch.nn.functional.kl_div(logs, said[i], log_target=True, reduction="none").sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pace.step()


def rows_of(state: Path) -> list[Row]:
    """What was measured already."""
    return [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []


def tau(rows: list[Row]) -> float | None:
    """Kendall's tau between the losses of the evidence and those after healing."""
    return kendall_tau([row["evidence"] for row in rows], [row["healed"] for row in rows])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--between", default="0.3,0.7", help="shares of the source's parameters")
    parser.add_argument("--share", type=Fraction, default=Fraction(1), help="of the samples that the evidence fits to")
    parser.add_argument("--epochs", type=int, default=5, help="of distillation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("ranking.jsonl"))
    asked = parser.parse_args(words)
    torch.manual_seed(asked.seed)
    source = open_source(asked.model)
    data = sample_data(source, asked.data, None, None, asked.seed, print)
    done, how = {row["shape"] for row in rows_of(asked.state)}, Healing(asked.epochs, asked.seed)
    low, high = map(float, asked.between.split(","))
    with scratch() as place:
        heals = Heals(source, data, place, asked.seed)
        for candidate in shapes(source, asked.shapes, low, high):
            if candidate.name in done:
                continue
            start = time.process_time()
            found = heals.healed(candidate, asked.share)["choosing"].score
            middle = time.process_time()
            after = healed(source, candidate, data, how)
            row: Row = {"shape": candidate.name, "parameters": candidate.parameters, "evidence": found.loss}
            row |= {"evidence cpu": middle - start, "healed": after.loss, "healed cpu": time.process_time() - middle}
            with asked.state.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{candidate.name}: loss {found.loss:.4f} as search sees it, {after.loss:.4f} healed", flush=True)
    rows = rows_of(asked.state)
    print(tabulate(sorted(rows, key=lambda row: row["healed"]), headers="keys", tablefmt="github", floatfmt=".4f"))
    spent = sum(row["evidence cpu"] for row in rows) / 60
    print(f"Kendall's tau over {len(rows)} shapes: {tau(rows):+.2f}, after {spent:.1f} CPU minutes of evidence")


if __name__ == "__main__":
    main()
