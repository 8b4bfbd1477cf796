"""Choose the layers to keep by what they do on calibration data; every choice comes with its numbers. Imports torch.

    influence  a layer's influence is 1 - cos(its input, its output), mean over tokens (ShortGPT, arXiv 2403.03853);
               the least influential are dropped
    angular    drop the contiguous block of layers with the smallest angle between the hidden states at its ends:
               arccos(cos(h_l, h_l+n)) / pi (Gromov et al., arXiv 2403.17887)

Alternating layers (shifted windows) are kept or dropped in whole groups (`shape.Groups`). The stages of a pyramid are
treated one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import pi

import torch
from torch import Tensor

from leansurgeon.checkpoints.blockwise.skeleton import Skeleton
from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.progress import track
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import Groups
from leansurgeon.surgery.probes import check_finite, flat

Masks = Sequence[Tensor | None]
BLOCKS = 40  # maximum number of contiguous blocks to try


@dataclass(frozen=True)
class Evidence:
    """Measurements of one pass of the source: `influence` of every layer, and `angle[l, n]` between the input of layer
    l and the output of layer l + n - 1, for the block sizes n that may be dropped in its stage.
    """

    influence: list[float]
    angle: dict[tuple[int, int], float]
    stages: list[Groups]

    def as_dict(self) -> JsonObject:
        """Return influence per layer and angles per block size, rounded for the record."""
        sizes = sorted({n for _, n in self.angle})
        angles = {str(n): {str(i): round(a, 6) for (i, m), a in self.angle.items() if m == n} for n in sizes}
        return {
            "influence": [round(v, 6) for v in self.influence],
            "angle": angles,
            "lost_per_stage": [len(s.stage) - s.keep for s in self.stages],
        }


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of every token's vectors in float64; 1 for two zero vectors."""
    a, b = a.double(), b.double()
    size = (a.norm(dim=-1) * b.norm(dim=-1)).clamp(min=1e-300)
    return torch.where(size > 1e-299, (a * b).sum(-1) / size, 1.0).clamp(-1, 1)


def measure_layers(
    teacher: Skeleton,
    fill: Callable[[int], None],
    batches: list[dict],
    masks: Masks,
    stages: list[Groups],
    answers: Masks | None = None,
) -> Evidence:
    """Measure influence and angles in one pass of the source over `batches`.

    Memory holds one block (`fill` loads it), plus the hidden states of as many layers as a stage is to lose. `answers`
    are the masks of the decoder's input in an encoder-decoder.
    """
    influence = []
    angle: dict[tuple[int, int], float] = {}
    stream = Stream(teacher, batches)
    kept = {}
    by_layer = [groups for groups in stages for _ in groups.stage]
    for layer, groups in enumerate(track(by_layer, "choosing layers", "layers/s")):
        lost = groups.lost  # one block, or two halves
        sizes = sorted({n * groups.period for n in (lost, lost // 2, lost - lost // 2)} - {0})
        if layer == groups.stage.start:
            kept.clear()
            masks = answers if answers is not None and layer else masks
        if sizes:
            kept[layer] = stream.hidden
        fill(layer)
        outputs = stream.run()
        check_finite(outputs, f"behind layer {layer}")
        teacher.empty(layer)
        influence.append(mean_of(lambda a, b: 1 - cosine(a, b), stream.hidden, outputs, masks))
        for size in sizes:
            if (start := layer - size + 1) in kept:
                angle[start, size] = mean_of(lambda a, b: torch.arccos(cosine(a, b)) / pi, kept[start], outputs, masks)
        kept.pop(layer - max(sizes, default=0) + 1, None)
        stream.advance(outputs)
    return Evidence(influence, angle, stages)


def mean_of(what: Callable[[Tensor, Tensor], Tensor], a: list[Tensor], b: list[Tensor], masks: Masks) -> float:
    """Return the mean of `what` over the real tokens of all batches, in float64; 0 if there are none."""
    total, count = 0.0, 0
    for x, y, mask in zip(a, b, masks, strict=True):
        values = what(flat(x, mask), flat(y, mask))
        total, count = total + float(values.double().sum()), count + values.numel()
    return total / max(1, count)


def without(stages: list[Groups], gone: Collection[int]) -> tuple[int, ...]:
    """Return the layers of all stages except those in `gone`."""
    return tuple(layer for groups in stages for layer in groups.without(gone))


def by_influence(evidence: Evidence) -> tuple[int, ...]:
    """Return the most influential layers."""
    gone = set()
    for groups in evidence.stages:
        least = sorted(groups.all, key=lambda g: (sum(evidence.influence[i] for i in g), g))
        gone.update(*least[: groups.lost])
    return without(evidence.stages, gone)


def by_angle(evidence: Evidence, blocks: int = 1, rank: int = 0) -> tuple[int, ...] | None:
    """Drop one contiguous block, or two of half the size, with the smallest (sum of) angles; `rank` 1 takes the second
    best, and so on. Return the layers that stay, or None if there is no such block.

    The first layer of a stage stays if possible: without it, no layer before the cut could be refitted to compensate.
    At least one layer stays between two blocks.
    """
    gone = set()
    for groups in evidence.stages:
        if groups.lost == 0:
            continue
        places = list_places(evidence, groups, blocks)
        places = [place for place in places if groups.stage.start not in place] or places
        if rank >= len(places):
            return None
        gone.update(places[rank])
    return without(evidence.stages, gone)


def blocks(evidence: Evidence, most: int = BLOCKS) -> Mapping[str, tuple[int, ...]]:
    """Return the contiguous blocks that may be dropped: name of the block -> layers that stay. If several stages lose
    layers (an encoder and a decoder, a pyramid), blocks are tried stage by stage, while each other stage drops its
    block of the smallest angle. Angles set the order, and which blocks are beyond `most`; stages take turns.

    Blocks that begin with the first layer of a stage are excluded: no layer before them could be refitted to
    compensate.
    """
    losing = [
        [place for place in list_places(evidence, groups) if groups.stage.start not in place]
        for groups in evidence.stages
        if groups.lost
    ]
    if not all(losing):
        return {}
    by_name = {}
    for rank in range(max(map(len, losing), default=0)):
        for places in losing:
            if rank < len(places) and len(by_name) < most:
                here = places[rank]
                others = {layer for other in losing if other is not places for layer in other[0]}
                by_name[f"block {here[0]}-{here[-1]}"] = without(evidence.stages, others | set(here))
    return by_name


def combine_stages(stages: Sequence[range], tried: Mapping[tuple[int, ...], float]) -> tuple[int, ...]:
    """Combine the best block of every stage: for each stage, take its layers from the best set in which all other
    stages lost what they lost in most sets. `tried` maps sets of layers to scores, lower is better.
    """
    parts = {kept: [tuple(i for i in kept if i in stage) for stage in stages] for kept in tried}
    usual = [Counter(part[s] for part in parts.values()).most_common(1)[0][0] for s in range(len(stages))]
    best = []
    for s in range(len(stages)):
        alone = {
            kept: part[s]
            for kept, part in parts.items()
            if all(part[o] == usual[o] for o in range(len(stages)) if o != s)
        }
        best += alone[min(alone, key=lambda kept: (tried[kept], kept))] if alone else usual[s]
    return tuple(best)


def list_places(evidence: Evidence, groups: Groups, blocks: int = 1) -> list[tuple[int, ...]]:
    """Return the layers that a stage can lose as one block, or as two of half the size with a layer between them, the
    smallest (sum of) angles first.
    """
    sizes = [n * groups.period for n in ([groups.lost] if blocks == 1 else [groups.lost // 2, -(-groups.lost // 2)])]
    starts = [[group[0] for group in groups.all if (group[0], size) in evidence.angle] for size in sizes]
    places = [[range(start, start + size) for start, size in zip(at, sizes, strict=True)] for at in product(*starts)]
    apart = [p for p in places if all(a.stop < b.start or b.stop < a.start for a, b in combinations(p, 2))]
    ordered = sorted(apart, key=lambda p: (sum(evidence.angle[r.start, len(r)] for r in p), [r.start for r in p]))
    return [tuple(layer for block in place for layer in block) for place in ordered]
