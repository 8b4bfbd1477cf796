"""Which layers to keep, by what they do on calibration data; every choice comes with its numbers. Imports torch.

    influence  a layer's influence is 1 - cos(its input, its output), mean over tokens (ShortGPT, arXiv 2403.03853);
               the least influential go
    angular    one contiguous block of layers, between whose ends the hidden state turns least:
               arccos(cos(h_l, h_l+n)) / pi (Gromov et al., arXiv 2403.17887)

Layers that alternate (shifted windows) go in whole groups (`shape.Groups`). Stages of a pyramid are chosen one by one.
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
BLOCKS = 40  # contiguous blocks that are tried at most
Fill = Callable[[int], None]  # fills a block of the skeleton with the source's weights


@dataclass(frozen=True)
class Evidence:
    """What one pass of the source says: `influence` of every layer, and `angle[l, n]` between the input of layer l and
    the output of layer l + n - 1, for the sizes n of blocks that may be dropped in its stage.
    """

    influence: list[float]
    angle: dict[tuple[int, int], float]
    stages: list[Groups]

    def as_dict(self) -> JsonObject:
        """Influence of every layer and angles over runs of layers, rounded for the record."""
        sizes = sorted({n for _, n in self.angle})
        angles = {str(n): {str(i): round(a, 6) for (i, m), a in self.angle.items() if m == n} for n in sizes}
        return {
            "influence": [round(v, 6) for v in self.influence],
            "angle": angles,
            "lost_per_stage": [len(s.stage) - s.keep for s in self.stages],
        }


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of every token's vectors in float64; of two zeros it is 1."""
    a, b = a.double(), b.double()
    size = (a.norm(dim=-1) * b.norm(dim=-1)).clamp(min=1e-300)
    return torch.where(size > 1e-299, (a * b).sum(-1) / size, 1.0).clamp(-1, 1)


def measure_layers(
    teacher: Skeleton,
    fill: Fill,
    batches: list[dict],
    masks: Masks,
    stages: list[Groups],
    answers: Masks | None = None,
) -> Evidence:
    """One pass of the source over `batches`, one block in memory, and the hidden states of as many layers as a stage
    is to lose. `answers` are the masks of what a decoder beside an encoder reads, where it has other ones.
    """
    influence: list[float] = []
    angle: dict[tuple[int, int], float] = {}
    stream = Stream(teacher, batches)
    kept: dict[int, list[Tensor]] = {}
    by_layer = [groups for groups in stages for _ in groups.stage]
    for layer, groups in enumerate(track(by_layer, "choosing layers", "layers/s")):
        lost = groups.lost  # in one block, or in two halves
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
    """Mean of `what` over the real tokens of all batches, in float64; 0 without any."""
    total, count = 0.0, 0
    for x, y, mask in zip(a, b, masks, strict=True):
        values = what(flat(x, mask), flat(y, mask))
        total, count = total + float(values.double().sum()), count + values.numel()
    return total / max(1, count)


def without(stages: list[Groups], gone: Collection[int]) -> tuple[int, ...]:
    """The layers of all stages but those gone."""
    return tuple(layer for groups in stages for layer in groups.without(gone))


def by_influence(evidence: Evidence) -> tuple[int, ...]:
    """Keep the most influential layers."""
    gone: set[int] = set()
    for groups in evidence.stages:
        least = sorted(groups.all, key=lambda g: (sum(evidence.influence[i] for i in g), g))
        gone.update(*least[: groups.lost])
    return without(evidence.stages, gone)


def by_angle(evidence: Evidence, blocks: int = 1, rank: int = 0) -> tuple[int, ...] | None:
    """Drop one contiguous block, or two of half the size, with the smallest (sum of) angles; `rank` 1 takes the second
    best, and so on. None where there is none.

    The first layer of a stage stays if it can: without it nothing stands before the cut that could make up for it. A
    layer stays between two blocks.
    """
    gone: set[int] = set()
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
    """Contiguous blocks that may go: the block's layers in words, and the layers that stay. Where several stages lose
    layers (an encoder and a decoder, a pyramid), they are tried stage by stage, while each of the others loses its
    block of the smallest angle. Angles only order them, and leave out what is beyond the first `most`, of which every
    stage has as many.

    A block that begins with the first layer of its stage is none of them: no layer of the stage stands before it that
    could be refitted to make up for it.
    """
    losing = [
        [place for place in list_places(evidence, groups) if groups.stage.start not in place]
        for groups in evidence.stages
        if groups.lost
    ]
    if not all(losing):
        return {}
    by_name: dict[str, tuple[int, ...]] = {}
    for rank in range(max(map(len, losing), default=0)):
        for places in losing:
            if rank < len(places) and len(by_name) < most:
                here = places[rank]
                others = {layer for other in losing if other is not places for layer in other[0]}
                by_name[f"block {here[0]}-{here[-1]}"] = without(evidence.stages, others | set(here))
    return by_name


def combine_stages(stages: Sequence[range], tried: Mapping[tuple[int, ...], float]) -> tuple[int, ...]:
    """The layers that stay where every stage loses what it lost in the best of all sets in which the other stages lost
    what they lost in most; `tried` are sets of layers with their scores, the lower the better.
    """
    parts = {kept: [tuple(i for i in kept if i in stage) for stage in stages] for kept in tried}
    usual = [Counter(part[s] for part in parts.values()).most_common(1)[0][0] for s in range(len(stages))]
    best: list[int] = []
    for s in range(len(stages)):
        alone = {
            kept: part[s]
            for kept, part in parts.items()
            if all(part[o] == usual[o] for o in range(len(stages)) if o != s)
        }
        best += alone[min(alone, key=lambda kept: (tried[kept], kept))] if alone else usual[s]
    return tuple(best)


def list_places(evidence: Evidence, groups: Groups, blocks: int = 1) -> list[tuple[int, ...]]:
    """The layers that a stage loses in one block, or in two of half the size with a layer between them, the smallest
    (sum of) angles first.
    """
    sizes = [n * groups.period for n in ([groups.lost] if blocks == 1 else [groups.lost // 2, -(-groups.lost // 2)])]
    starts = [[group[0] for group in groups.all if (group[0], size) in evidence.angle] for size in sizes]
    places = [[range(start, start + size) for start, size in zip(at, sizes, strict=True)] for at in product(*starts)]
    apart = [p for p in places if all(a.stop < b.start or b.stop < a.start for a, b in combinations(p, 2))]
    ordered = sorted(apart, key=lambda p: (sum(evidence.angle[r.start, len(r)] for r in p), [r.start for r in p]))
    return [tuple(layer for block in place for layer in block) for place in ordered]
