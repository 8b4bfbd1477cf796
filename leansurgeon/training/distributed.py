"""Set up Accelerate from the recipe alone (device, processes, precision), whatever the environment says; and FSDP2
(`parallel: fsdp2`).

Accelerate provides device placement, DDP, autocast and unscaled clipping. The schedule, the data order and the division
of losses are our own: its scheduler steps once per process, its loaders do not restore their order, its loss division
ignores token counts.

With FSDP2 every process holds a shard of each weight, gradient and optimizer state, and gathers the rest of a block
while that block runs: torch's own `fully_shard`, on a CPU and on GPUs. (Accelerate's FSDP plugin calls the same
function, but on CPU processes 1.15 silently skips it and trains with DDP, so its path could not be tested here.)
Parameter names do not change. A sharded tensor is a `DTensor`; checkpoints and exported models hold whole tensors.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leansurgeon import rank
from leansurgeon.checkpoints.model import Loaded
from leansurgeon.errors import LeanSurgeonError, UsageError, plural
from leansurgeon.measure.costs.precision import forbid_tf32
from leansurgeon.progress import Say, silent
from leansurgeon.training.processes import launch
from leansurgeon.training.processes.agree import COLLECTIVE_TIMEOUT

if TYPE_CHECKING:
    from accelerate import Accelerator

    from leansurgeon.training.recipe.schema import Train


Tensors = dict[str, Tensor]  # by name


def start_accelerator(*, cpu: bool = False, train: Train | None = None, say: Say = silent) -> Accelerator:
    """Return an `Accelerator` on the GPU if there is one, in the process group if there is one.

    Precision comes from `autocast` and `make_scaler` below, the same on a CPU and on a GPU. Environment variables that
    would change the computation are removed; those that cannot be removed and override `train` are reported to `say`.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState

    wanted, store = launch.group_size(), None
    cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    # Without a GPU, Accelerate would silently let every process that torchrun starts train alone.
    cpu = cpu or (wanted > 1 and not torch.accelerator.is_available())
    # Accelerate keeps its state for the life of the process; reset it for a second training with another precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    aside = launch.set_aside()
    forbid_tf32()  # "precision: fp32" means full fp32
    if wanted > 1 and not torch.distributed.is_initialized():
        store = meet_others(say)
    # A single process needs no rendezvous.
    alone = {name: os.environ.pop(name) for name in rank.group_variables() if wanted == 1}
    try:
        accelerator = Accelerator(
            mixed_precision="no",
            cpu=cpu,
            # Buffers are constant tables in these models: broadcasting them at every forward would only cost time.
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
                InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT),
            ],
        )
    finally:
        os.environ.update(alone)
    del store
    if accelerator.num_processes != wanted:
        raise UsageError(f"{wanted} processes were started, and {accelerator.num_processes} of them connected.")
    told = [f"Ignored: {', '.join(aside)} in the environment; the recipe decides."] if aside else []
    if train and (forced := ", ".join(launch.list_overrides(train, accelerator.device.type))):
        told += [f"The environment overrides the recipe: {forced}; unset it if that is unwanted."]
    if told:
        say(" ".join(told))
    return accelerator


def meet_others(say: Say) -> object:
    """Wait for the other processes in a thread, so that a signal ends the wait, and report a wait that takes long.

    The caller must hold the returned store until Accelerate joins it too. Raises `LeanSurgeonError` if the processes
    cannot meet.
    """
    from torch.distributed.rendezvous import rendezvous

    made: list[object] = []

    def wait() -> None:
        try:
            made.append(next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT)))
        except Exception as error:  # torch has an exception class for each kind of network failure
            made.append(error)

    there = rank.group_variables()
    size, mine, host, port = (there[name] for name in (rank.SIZE, rank.RANK, rank.HOST, rank.PORT))
    how = " ".join(f"{name}={value}" for name, value in there.items())
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    # A launcher starts all processes within seconds; without one, the variables may be left over.
    thread.join(10.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.5)
    if thread.is_alive():
        text = f"Process {mine} of {size} waits for the others at {host}:{port}, as the environment says ({how})."
        text += f" For one process: Ctrl-C, and unset {' '.join(there)}."
        say(text) if mine == "0" else print(text, file=sys.stderr, flush=True)
    while thread.is_alive():
        thread.join(0.2)
    if isinstance(error := made[0], Exception):
        used = "EADDRINUSE" in str(error)
        why = f"port {port} is in use on this machine" if used else str(error).strip().split("\n")[0].rstrip(".")
        raise LeanSurgeonError(
            f"Process {mine} of {size} cannot meet the others at {host}:{port} ({how}): {why}.",
            f"For one process: unset {' '.join(there)}. For several: another {rank.PORT}, or torchrun --standalone.",
        ) from error
    return made[0]


def check_parallel(train: Train, processes: int, say: Say) -> bool:
    """Return whether the processes share the weights (FSDP2). Raises `UsageError` for settings that FSDP2 does not
    support.
    """
    if train.parallel != "fsdp2":
        return False
    if processes == 1:
        say("train.parallel fsdp2 shards the weights among processes, but there is only one: it changes nothing.")
        return False
    if train.lora:
        raise UsageError(
            "fsdp2 shares whole weights, and lora freezes most of them.", "Use --set train.parallel=ddp with --lora."
        )
    if train.precision == "fp16":
        raise UsageError(
            "fp16 scales its losses, and fsdp2 would let every process scale by itself.",
            "Use --set train.precision=bf16 or --set train.parallel=ddp.",
        )
    if train.optim.name == "lamb":
        raise UsageError(
            "lamb needs the norm of every whole weight, and with fsdp2 a process has only a part of it.",
            "Use --set train.optim.name=adamw or --set train.parallel=ddp.",
        )
    return True


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a gradient scaler for fp16, whose small gradients would become zero, else None."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's generator on the CPU and on `device`.

    `torch.manual_seed` visits every kind of device that torch knows, which takes 0.1 ms; this takes a hundredth of
    that.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def all_reduce(sums: Tensor, accelerator: Accelerator) -> Tensor:
    """Sum over all processes, in place; does nothing on one."""
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(sums)
    return sums


def device_name(device: torch.device) -> str:
    """Return `NVIDIA H200`, or `cpu, 2 threads`: what a run's timings and memory refer to."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {plural(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else device.type


def split_weights(module: nn.Module, device: torch.device, processes: int) -> None:
    """Shard the parameters of the `Objective` `module`; those of a block are gathered together. All processes must hold
    the same weights before.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    for block in dict.fromkeys(module.loaded.blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def is_split(module: nn.Module) -> bool:
    """Return whether `split_weights` was applied."""
    return hasattr(module, "set_requires_gradient_sync")


def reshard(module: nn.Module) -> None:
    """Free gathered weights: a forward pass without a backward pass keeps those of the root."""
    for part in filter(is_split, module.modules()):
        part.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard, sharing memory with `tensor`; an unsharded tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def list_tensors(model: nn.Module) -> Tensors:
    """Return parameters and buffers by name, tied ones once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every process; an unsharded one as it is. All processes must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather_all(tensors: Tensors, *, keep: bool) -> Tensors:
    """Gather the sharded tensors, one at a time, so that the device holds no second model.

    All processes must call this; those with `keep` get the result, with formerly sharded tensors on the CPU.
    """
    by_name = {}
    for name, tensor in tensors.items():
        in_parts = hasattr(tensor, "full_tensor")
        together = gather(tensor.detach())
        if keep:
            by_name[name] = together.cpu() if in_parts else together
    return by_name


def split_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard `tensor`, the same on every process, as `like` is sharded, without communication."""
    if not hasattr(like, "to_local"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(like.device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def copy_whole(loaded: Loaded, *, main: bool) -> Loaded:
    """Return an unsharded copy of `loaded`: on the CPU on the main process, on the meta device on the others. Call it
    before `split_weights`.
    """
    other = copy.copy(loaded)
    other.model = copy.deepcopy(loaded.model).cpu() if main else without_memory(loaded.model)
    return other


class _Silence:
    """Replaces an FSDP2 collective: takes the memory of a real one, but does not communicate."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *how: Any, **more: Any) -> None:
        output_tensor.zero_()  # uninitialized memory could hold NaN, or slow denormals


def make_rehearsal(
    loaded: Loaded,
    scored_of: Callable[[Any], nn.Module],
    device: torch.device,
    processes: int,
) -> Callable[[], nn.Module]:
    """Return a function that makes a sharded copy of `scored_of(loaded)` for a memory test without other processes.

    The copy takes as much memory as the real one but does not communicate, so running out of memory leaves no process
    waiting. Its weights are uninitialized, its buffers the model's. Call this before `split_weights`; all processes
    must call the result, since it makes the process group again.
    """
    bare, buffers = without_memory(loaded.model), dict(loaded.model.named_buffers())

    def make_module() -> nn.Module:
        other = copy.copy(loaded)
        other.model = without_memory(bare)
        module = scored_of(other)
        split_weights(module, device, processes)
        module.to_empty(device=device)
        with torch.no_grad():
            for name, buffer in other.model.named_buffers():
                buffer.copy_(buffers[name])
        for part in filter(is_split, module.modules()):
            part.set_custom_all_gather(_Silence())
            part.set_custom_reduce_scatter(_Silence())
        return module

    return make_module


def without_memory(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device: every parameter and buffer is replaced while copying."""
    shadows = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        shadows[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, shadows)
