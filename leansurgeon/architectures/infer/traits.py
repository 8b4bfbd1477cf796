"""Facts about a stage besides its units: paths of its projections, position of norms, keys that depend on layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from leansurgeon.architectures.infer import cuts, tiny
from leansurgeon.architectures.infer.cuts import Trial
from leansurgeon.architectures.infer.differences import Level
from leansurgeon.architectures.infer.finding import Stage
from leansurgeon.architectures.infer.library import Unbuildable, difference, outputs


def describe_stage(trial: Trial, stage: Stage, level: Level) -> Stage:
    """Add these facts to a stage."""
    paths = []
    for template in stage.heads.sinks if stage.heads else ():
        for i in range(level.depth):
            if at := trial.memory.get(level.layer.format(i=i) + template):
                own = level.modules.format(i=i)
                paths += [level.modules + at.removeprefix(own).removesuffix(".weight")] if at.startswith(own) else []
                break
    words = {w for axes in (stage.heads.axes if stage.heads else {}).values() for _, w in axes}
    config, alone = trial.config, len(trial.levels) == 1
    return replace(
        stage,
        projections=tuple(paths),
        buffers=tuple(sorted({place[1] for name in list_buffers(trial) if (place := trial.locate(name))})),
        norm=norm(trial, stage, level),
        standard=bool(words) and words <= {"q", "kv", "q+kv+kv", "heads*qkv"},
        counters=tuple(k for k in cuts.COUNTERS if alone and isinstance(config.get(k), int)),
        index_lists=tuple(k for k in tiny.INDEX_LISTS if alone and isinstance(config.get(k), list)),
    )


def list_buffers(trial: Trial) -> list[str]:
    """Return the tensors in files that are not parameters."""
    tables = dict(trial.model.named_buffers())
    return [name for name, at in trial.memory.items() if at in tables]


def norm(trial: Trial, stage: Stage, level: Level) -> str:
    """Return "pre" if a block whose output projections are zero returns its input, else "post"."""
    if not (stage.heads and stage.mlp):
        return "post"
    start, state = level.layer.format(i=1), dict(trial.state)
    for template in (*stage.heads.sinks, *stage.mlp.sinks):
        for name in (start + template, start + template.removesuffix("weight") + "bias"):
            if name in state:
                state[name] = torch.zeros_like(state[name])
    try:
        with cuts.skip_blocks(trial.model, level, [1]):
            without = outputs(trial.model, trial.inputs)
        return "pre" if difference(without, trial.run(trial.config, state)) <= cuts.EQUAL else "post"
    except Unbuildable:
        return "post"


def is_causal(trial: Trial) -> bool:
    """Return whether changing the last token leaves all earlier outputs unchanged."""
    ids = trial.inputs.get("input_ids")
    out = trial.output
    if ids is None or out.dim() != 3 or out.shape[1] != ids.shape[1]:
        return False
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 3) % 60 + 10
    changed = outputs(trial.model, {**trial.inputs, "input_ids": other})
    return difference(out[:, :-1], changed[:, :-1]) <= cuts.EQUAL < difference(out, changed)
