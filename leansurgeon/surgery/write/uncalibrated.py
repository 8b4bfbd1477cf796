"""Heads of another size without sample data, made layer by layer while the result is written. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from leansurgeon.checkpoints.weights import Arrays
from leansurgeon.surgery.layer import canonical, split_heads
from leansurgeon.surgery.plan.planning import Plan


def resizes_heads(plan: Plan) -> bool:
    """Whether heads of the source become heads of another size."""
    stages = zip(plan.before.stages, plan.after.stages, strict=True)
    return any(step.name == "split-heads" for step in plan.operators) and any(
        a.head_dim != b.head_dim for a, b in stages
    )


class SplitTensors(Mapping[str, np.ndarray]):
    """The attention tensors of every new layer, each layer made when its first tensor is asked for: exactly where heads
    grow, by the weights alone where they shrink.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.source = plan, plan.source
        inside = [s for s in plan.result.specs if s.layer is not None and s.role in (*canonical.ATTENTION_ROLES, "o")]
        self.layers = {s.name: s.layer for s in inside}
        self.now: tuple[int, dict[str, np.ndarray]] = (-1, {})

    def __getitem__(self, name: str) -> np.ndarray:
        layer = self.layers[name]
        if self.now[0] != layer:
            self.now = (layer, self.made(layer))
        return self.now[1][name]

    def made(self, layer: int) -> Arrays:
        """The layer's attention tensors with split heads, by name."""
        old = canonical.unpack(self.source, self.plan.layers[layer])
        stage = self.plan.after.stage_of(layer)
        after = self.plan.after.stages[stage]
        form = split_heads.exact if after.head_dim >= old.attention.head_dim else split_heads.weights_only
        gain = None if canonical.scale_is_derived(self.source) else 1.0
        made = form(old.attention, after, score_gain=gain, rotary=canonical.rotary(self.source))
        new = replace(old, attention=made)
        shape = self.plan.after.with_(mlp_dim=self.plan.before.stages[stage].mlp_dim)  # the MLP is not ours
        return canonical.pack(new, self.plan.result.at(shape), layer)

    def __contains__(self, name: object) -> bool:
        return name in self.layers  # without making the layer

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)
