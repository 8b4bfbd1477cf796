"""`leansurgeon plan`: what a shape costs before and after, before anything is written."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from leansurgeon.cli import common, completion
from leansurgeon.commands.plan import DEFAULT_BATCH


def plan(
    source: common.SourceName,
    heads: common.Heads = None,
    layers: common.Layers = None,
    head_dim: common.HeadDim = "auto",
    mlp_dim: common.MlpDim = None,
    mlp_ratio: common.MlpRatio = None,
    class_attention: common.ClassAttention = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Predict peak training memory; --batch to --gpu imply it.")
    ] = False,
    batch: Annotated[int | None, typer.Option(help=f"Micro batch of one GPU. Default: {DEFAULT_BATCH}.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a text sample. Default: what the model takes, at most 1024.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 (default), fp16 or fp32; weights are fp32.")] = None,
    attention: Annotated[
        str | None, typer.Option(help="sdpa (default): fused. eager: score matrices in memory.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw (default, fused), adamw-foreach, adam or sgd.")] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Activations are computed again in the backward pass.")
    ] = False,
    world_size: Annotated[int | None, typer.Option(help="GPUs of a DDP training.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.gpus, help="a100-40, a100-80, h100, h200 or a6000: does it fit, and how much?"
        ),
    ] = None,
    as_json: common.AsJson = False,
    tower: common.WhichTower = None,
    allow_pickle: common.AllowPickle = False,
    trust_remote_code: common.TrustRemoteCode = False,
) -> None:
    """Parameters, operations and peak training memory of SOURCE before and after surgery; needs no GPU.

    Counts alone answer at once; memory takes a rehearsal of a training step on tensors without memory, a few seconds.
    """
    from leansurgeon.commands import plan as command
    from leansurgeon.surgery.plan.wanted import Wanted

    wanted = Wanted(heads, layers, head_dim, mlp_dim, mlp_ratio, class_attention=class_attention)
    training = command.Training(memory, batch, tokens, precision, attention, optimizer, checkpointing, world_size, gpu)
    options = {"tower": tower and tower.value, "allow_pickle": allow_pickle}
    # With --json and memory, torch counts the operations too.
    made = command.plan(source, wanted, training, **options, cross_check=as_json)
    print(json.dumps(made.as_dict()) if as_json else made)
