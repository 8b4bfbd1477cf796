"""`plan` and `shrink`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from leansurgeon.commands import in_memory
from leansurgeon.commands.results import Cut, Folder
from leansurgeon.commands.surface import Number, Progress, public, speaker, trusting, word

if TYPE_CHECKING:
    import torch

    from leansurgeon.commands.plan import Plan
    from leansurgeon.commands.shrink import ShrinkOptions, Shrunk
    from leansurgeon.surgery.plan.method import Method
    from leansurgeon.surgery.plan.wanted import Wanted

Place = str | os.PathLike[str] | Folder


@public
def plan(
    source: Place | torch.nn.Module,
    *,
    heads: Number | None = None,
    layers: Number | None = None,
    head_dim: int | str = "auto",
    mlp_dim: Number | None = None,
    mlp_ratio: float | str | Sequence[float] | None = None,
    class_attention: bool = False,
    memory: bool = False,
    batch: int | None = None,
    tokens: int | None = None,
    precision: str | None = None,
    attention: str | None = None,
    optimizer: str | None = None,
    checkpointing: bool = False,
    world_size: int | None = None,
    gpu: str | None = None,
    tower: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Plan:
    """Parameters, operations and peak training memory of a model before and after a cut. Nothing is written.

    `source` is a preset, a folder, a hub id, `timm/NAME`, or a model in memory; `heads`, `layers` and `mlp_dim` are
    numbers, `"2x"`, or one number for each stage. Memory is predicted where `memory` or anything from
    there to `gpu` is given.

    Raises `errors.UsageError` for a shape that cannot be, `errors.UnsupportedModel` for a source that cannot be read.

    >>> import leansurgeon
    >>> found = leansurgeon.plan("vit-b", heads=16, layers=7)
    >>> found.before.parameters.total, found.after.parameters.total
    (86567656, 56638696)
    """
    from leansurgeon.commands import plan as command
    from leansurgeon.surgery.plan.wanted import Wanted

    shape = (word(heads, "heads"), word(layers, "layers"), str(head_dim), word(mlp_dim, "mlp_dim"))
    wanted = Wanted(*shape, word(mlp_ratio, "mlp_ratio"), class_attention=class_attention)
    training = command.Training(memory, batch, tokens, precision, attention, optimizer, checkpointing, world_size, gpu)
    held = in_memory.written(source) if in_memory.is_model(source) else None
    name = str(held.folder) if held else in_memory.place(source)
    with trusting(trust_remote_code):
        made = command.plan(name, wanted, training, tower=tower, allow_pickle=allow_pickle)
    return replace(made, costs=replace(made.costs, source=held.folder.name)) if held else made


@overload
def shrink(source: Place, **options: Any) -> Cut: ...
@overload
def shrink(source: torch.nn.Module, **options: Any) -> torch.nn.Module: ...
@public
def shrink(
    source: Place | torch.nn.Module,
    *,
    heads: Number | None = None,
    layers: Number | None = None,
    params: int | float | str | None = None,
    head_dim: int | str = "auto",
    mlp_dim: Number | None = None,
    mlp_ratio: float | str | Sequence[float] | None = None,
    class_attention: bool = False,
    data: in_memory.Data | None = None,
    judge: in_memory.Data | None = None,
    columns: str | None = None,
    classes: str | Sequence[str] | None = None,
    samples: int | None = None,
    uncalibrated: bool = False,
    init: str = "transfer",
    method: str = "auto",
    keep: str | Sequence[int] | None = None,
    more_heads: str = "add",
    heal: str = "local",
    heal_time: str | float | None = None,
    balance: bool = False,
    compare: bool = False,
    proof: bool = True,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    workspace: str | os.PathLike[str] = "runs",
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    tokenizer: object | None = None,
    tower: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = True,
) -> Cut | torch.nn.Module:
    """Rewrite a model to more heads and fewer layers, keep what can be kept, and prove that the result loads.

    A path (preset, folder, hub id, `timm/NAME`) gives a `Cut`: its folder, the record and the proof; `.model` loads it.
    A model in memory gives a model, on the same device and in the same precision, whose `Cut` is `model.leansurgeon`;
    the source is left as it is. Copies of both lie in the system's temporary folder as long as the result lives, since
    `heal` learns from the source; with `out` the result stays there.

    `data` chooses the layers and heals: texts, a path to texts or images, or `"task:NAME"`; `judge` is other data, for
    the proof alone. `tokenizer` is needed for texts where the model does not say where it came from. Everything else is
    as `leansurgeon shrink --help` has it. `progress` is True (lines on stderr), False, or takes the lines.

    Raises `errors.UsageError` for what cannot be, `errors.UnsupportedModel` for a source that cannot be read,
    `errors.OutOfMemory`, and `errors.Diverged` for weights that are no numbers.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", heads="2x", layers=3, out=f"{folder}/lean", progress=False)
    >>> cut.before.depth, cut.after.depth, cut.after.column("heads")
    (6, 3, '8')
    >>> cut.proof.parameters == sum(p.numel() for p in cut.model.parameters())
    True
    """
    from leansurgeon.commands import shrink as command
    from leansurgeon.surgery.plan.method import Method
    from leansurgeon.surgery.plan.wanted import Wanted
    from leansurgeon.tasks.classes import naming

    shape = (word(heads, "heads"), word(layers, "layers"), str(head_dim), word(mlp_dim, "mlp_dim"))
    wanted = Wanted(*shape, word(mlp_ratio, "mlp_ratio"), init, class_attention)
    longest = command.seconds(f"{heal_time:g}s" if isinstance(heal_time, int | float) else heal_time, "--heal-time")
    how = Method(method, word(keep, "keep"), more_heads, heal, balance, uncalibrated, longest)
    asked = command.ShrinkOptions(
        data=in_memory.data(data),
        columns=columns,
        samples=samples,
        judge=in_memory.data(judge, "judge"),
        params=share(params),
        compare=compare,
        proof=proof,
        seed=seed,
        out=None if out is None else Path(out),
        workspace=Path(workspace),
        force=force,
        tower=tower,
        allow_pickle=allow_pickle,
        device=device,
        resume=resume,
    )
    with trusting(trust_remote_code), naming(classes):
        if in_memory.is_model(source):
            return of_model(source, tokenizer, wanted, how, asked, progress)
        return cut_of(command.shrink(in_memory.place(source), wanted, how, asked, speaker(progress)))


def share(params: float | str | None) -> str | None:
    """A number of parameters, or a share of them, as `--params` takes it.

    >>> share(0.7), share(60_000_000), share("-30%")
    ('70%', '60000000', '-30%')
    """
    return f"{100 * params:g}%" if isinstance(params, float) and 0 < params < 1 else params and str(params)


def cut_of(shrunk: Shrunk, held: tuple[object, ...] = ()) -> Cut:
    """The result for the folder that was written."""
    return Cut(shrunk.folder, shrunk.record, shrunk.as_dict(), shrunk.told(), held)


def of_model(
    source: torch.nn.Module,
    tokenizer: object | None,
    wanted: Wanted,
    how: Method,
    asked: ShrinkOptions,
    progress: Progress,
) -> torch.nn.Module:
    """The same for a model in memory, by way of two folders."""
    from leansurgeon.commands.shrink import shrink as carry_out

    held = [in_memory.written(source, tokenizer)]
    asked = replace(asked, called=held[0].folder.name)
    if asked.out is None:
        held.append(in_memory.Copy())
        asked = replace(asked, out=held[-1].folder / f"{asked.called}-lean")
    shrunk = carry_out(str(held[0].folder), wanted, how, asked, speaker(progress))
    return in_memory.returned(cut_of(shrunk, tuple(held)), source)
