"""What surgery wants to know of a stage besides its units: where projections are in memory, what stands before what,
which keys follow the layers.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from leansurgeon.architectures.infer import cuts, tiny
from leansurgeon.architectures.infer.differences import Level
from leansurgeon.architectures.infer.finding import Stage
from leansurgeon.architectures.infer.library import Unbuildable, difference, outputs
from leansurgeon.architectures.infer.units import ExploredFamily, Trial


def describe_stage(search: ExploredFamily, stage: Stage, level: Level) -> Stage:
    """Where projections are in memory, what stands before what, and which keys follow the layers."""
    memory, paths = search.memory, []
    tables = dict(search.trial.model.named_buffers())
    buffers = {p[1] for n, at in memory.items() if at in tables and (p := search.trial.locate(n))}
    for template in stage.heads.sinks if stage.heads else ():
        names = (level.layer.format(i=i) + template for i in range(level.depth))
        at = next((memory[name] for name in names if name in memory), None)
        path = at and re.sub(re.escape(level.modules).replace(r"\{i\}", r"\d+"), level.modules, at).removesuffix(
            ".weight"
        )
        paths += [path] if path and "{i}" in path else []
    words = {w for axes in (stage.heads.axes if stage.heads else {}).values() for _, w in axes}
    config = search.config
    return replace(
        stage,
        projections=tuple(paths),
        buffers=tuple(sorted(buffers)),
        norm=norm(search, stage, level),
        standard=bool(words) and words <= {"q", "kv", "q+kv+kv", "heads*qkv"},
        counters=tuple(k for k in cuts.COUNTERS if isinstance(config.get(k), int) and len(search.levels) == 1),
        index_lists=tuple(k for k in tiny.INDEX_LISTS if isinstance(config.get(k), list) and len(search.levels) == 1),
    )


def norm(search: ExploredFamily, stage: Stage, level: Level) -> str:
    """ "pre" where a block whose projections say nothing passes on what it receives."""
    sinks = [t for part in (stage.heads, stage.mlp) if part for t in part.sinks]
    if not (stage.heads and stage.mlp):
        return "post"
    start, state = level.layer.format(i=1), dict(search.trial.state)
    for template in sinks:
        for name in (template, template.removesuffix("weight") + "bias"):
            if start + name in state:
                state[start + name] = torch.zeros_like(state[start + name])
    try:
        with cuts.skip_blocks(search.trial.model, level, [1]):
            without = outputs(search.trial.model, search.trial.inputs)
        return "pre" if difference(without, search.trial.run(search.config, state)) <= cuts.EQUAL else "post"
    except Unbuildable:
        return "post"


def is_causal(trial: Trial) -> bool:
    """Whether the last token changes nothing before it."""
    ids = trial.inputs.get("input_ids")
    out = trial.output
    if ids is None or out.dim() != 3 or out.shape[1] != ids.shape[1]:
        return False
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 3) % 60 + 10
    changed = outputs(trial.model, {**trial.inputs, "input_ids": other})
    return difference(out[:, :-1], changed[:, :-1]) <= cuts.EQUAL < difference(out, changed)
