"""Everything that `leansurgeon heads` measures, in one JSON document.

Importance is computed on training samples (`fit` of the calibration); ablations and curves use held-out ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NotRequired, TypedDict

import numpy as np
from numpy import ndarray

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.measure.data.batches import rows_of, thin
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.heads import pruning
from leansurgeon.measure.heads.importance import importance
from leansurgeon.measure.heads.judge import TEXT, HeadScorer, Labelled, OutputScorer, judge_of
from leansurgeon.measure.heads.sites import Site, count, sites, split
from leansurgeon.progress import phase
from leansurgeon.reading.jsonfile import JsonObject


class HeadsDocument(TypedDict):
    """What `study` measures; the command adds the model (`model`, ...) and saves it as `heads.json`."""

    data: JsonObject
    judged_by: str
    options: JsonObject
    samples: dict[str, int]  # used for each part: importance, ablation, curve
    attentions: list[JsonObject]  # as `sites.Site`, plus importance and ablation per head
    gini: float
    kinds: dict[str, dict[str, float]]  # heads of each kind of attention, and their share of all importance
    text: bool
    ablation: NotRequired[JsonObject]  # one head off at a time, summary over all heads; `spearman` with the importance
    curve: NotRequired[JsonObject]  # scores by the fraction pruned, in both orders
    whole: NotRequired[JsonObject]
    schema_version: NotRequired[int]
    kind: NotRequired[str]
    model: NotRequired[str]
    family: NotRequired[str]
    parameters: NotRequired[int]
    prune: NotRequired[JsonObject]


@dataclass(frozen=True)
class HeadOptions:
    """`ablate` costs a forward pass over the samples for every head; `curve` two for every step."""

    ablate: bool = False
    curve: bool = True
    steps: int = pruning.STEPS
    judge_samples: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Study:
    """Result of a study: the importance of all heads in the order of `sites`, and the document."""

    sites: list[Site]
    importance: ndarray
    document: HeadsDocument


def study(loaded: Loaded, calibration: Calibration, options: HeadOptions | None = None) -> Study:
    """Measure the heads of a loaded model."""
    options = options or HeadOptions()
    places = sites(loaded)
    judge = judge_of(loaded, calibration.task, options.seed)
    values = importance(judge, places, calibration.fit)
    bench = HeadScorer(judge, places, thin(calibration.heldout, options.judge_samples))
    document: HeadsDocument = {
        "data": calibration.as_record().as_dict(),
        "judged_by": judge.says,
        "options": asdict(options),
        "samples": {"importance": sum(map(rows_of, calibration.fit)), "ablation": 0, "curve": 0},
        "attentions": [
            asdict(site) | {"importance": part.tolist()}
            for site, part in zip(places, split(values, places), strict=True)
        ],
        "gini": pruning.gini(values),
        "kinds": kinds(places, values),
        "text": isinstance(judge, Labelled) and judge.task.head in TEXT,  # whether exp(loss) is a perplexity
    }
    if options.ablate:
        total = count(places)
        off = pruning.one_off(bench)
        deltas = np.array([row["change"] for row in off])
        for entry, part in zip(document["attentions"], split(np.arange(total), places), strict=True):
            entry["off"] = [off[i] for i in part]
        document["samples"]["ablation"] = len(bench.whole.losses)
        matter = [row for row in off if pruning.matters(row)]
        document["ablation"] = {
            "whole": bench.whole.as_dict(),
            "test": None if isinstance(judge, OutputScorer) else "paired t, two-sided, Holm over all heads, 5 %",
            "heads": total,
            "worse": sum(row["change"] > 0 for row in matter),
            "better": sum(row["change"] < 0 for row in matter),
            "lower_without": int((deltas < 0).sum()),
            "spearman": pruning.spearman(values, deltas),
        }
    if options.curve:
        document["curve"] = curves(bench, values, options)
    if options.curve or options.ablate:
        document["whole"] = bench.whole.as_dict()
        document["samples"]["curve"] = len(bench.whole.losses)
    return Study(places, values, document)


def curves(bench: HeadScorer, values: ndarray, options: HeadOptions) -> JsonObject:
    """Return the score by the fraction pruned, in both orders."""
    asked = pruning.fractions(options.steps)
    order = np.argsort(values, kind="stable")
    with phase("pruning", 2 * len(asked), "points/s") as step:
        orders = {
            "importance": pruning.curve(bench, order, asked, step),
            "reverse": pruning.curve(bench, order[::-1], asked, step),
        }
    able = {name: pruning.prunable(rows, bench) for name, rows in orders.items()}
    return {"tolerance": pruning.TOLERANCE, "orders": orders, "prunable": able}


def kinds(places: Sequence[Site], values: ndarray) -> dict[str, dict[str, float]]:
    """Return the number of heads of every kind of attention, and their share of all importance."""
    by_kind = {}
    for site, part in zip(places, split(values, places), strict=True):
        entry = by_kind.setdefault(site.kind, {"heads": 0, "share": 0.0})
        entry["heads"] += site.heads
        entry["share"] += float(part.sum() / (values.sum() or 1.0))
    return by_kind
