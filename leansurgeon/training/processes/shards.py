"""FSDP2 (`parallel: fsdp2`): every process keeps a part of each weight, of its gradient and of its optimizer state, and
borrows the rest of a block while that block runs.

torch's own `fully_shard`, on a CPU and on GPUs. (Accelerate's FSDP plugin calls the same function, but on CPU processes
1.15 passes over it without a word and trains by DDP, so its path could not be tested here.) Names of parameters do not
change. A tensor in parts is a `DTensor`; whatever leaves the training, a checkpoint or a model, is put together again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.training.watch.flops import without_memory


def split(module: nn.Module, blocks: list[nn.Module], device: torch.device, processes: int) -> None:
    """Let every process keep its part of the parameters of `module`; those of a block are borrowed together. All
    processes must hold the same weights before.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    for block in dict.fromkeys(blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def are_in(module: nn.Module) -> bool:
    """Whether `split` has been here."""
    return hasattr(module, "set_requires_gradient_sync")


def give_back(module: nn.Module) -> None:
    """Drop what was borrowed and not given back: a forward pass without a backward pass keeps the root's weights."""
    if are_in(module):
        for part in module.modules():
            if are_in(part):
                part.reshard()


def local(tensor: Tensor) -> Tensor:
    """The part of this process, sharing memory with `tensor`; a whole tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """All parts together, on every process; to be called by all of them. A whole tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def collected(tensors: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The tensors put together, on the CPU where they were in parts; to be called by all processes, and kept by those
    with `keep`. One is put together at a time, so that the device holds no second model.
    """
    by_name = {}
    for name, tensor in tensors.items():
        in_parts = hasattr(tensor, "full_tensor")
        together = whole(tensor.detach())
        if keep:
            by_name[name] = together.cpu() if in_parts else together
    return by_name


def parted(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, the same on every process, in parts as `like` is; no process talks to another."""
    if not hasattr(like, "to_local"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(like.device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def twin(loaded: Loaded, *, main: bool) -> Any:
    """A copy of `loaded` for what needs a whole model: on the CPU on the main process, without memory on the others.
    To be taken before `split`.
    """
    other = copy.copy(loaded)
    other.model = copy.deepcopy(loaded.model).cpu() if main else without_memory(loaded.model)
    return other


class _Silence:
    """An exchange of FSDP2 that takes the memory of a real one and talks to nobody."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *how: Any, **more: Any) -> None:
        output_tensor.zero_()  # whatever lay in this memory could be no number, or a slow one


def rehearsal(
    loaded: Loaded,
    scored_of: Callable[[Any], nn.Module],
    blocks_of: Callable[[Any], list[nn.Module]],
    device: torch.device,
    processes: int,
) -> Callable[[], nn.Module]:
    """What makes a copy of `scored_of(loaded)` in parts that takes the memory of the real one and runs on one process
    alone: a process that is out of memory there leaves no other waiting. Its weights are nothing, its buffers those of
    the model. To be taken before `split`; to be called by all processes, since the group is made again.
    """
    bare, buffers = without_memory(loaded.model), dict(loaded.model.named_buffers())

    def made() -> nn.Module:
        other = copy.copy(loaded)
        other.model = without_memory(bare)
        module = scored_of(other)
        split(module, blocks_of(other), device, processes)
        module.to_empty(device=device)
        with torch.no_grad():
            for name, buffer in other.model.named_buffers():
                buffer.copy_(buffers[name])
        for part in filter(are_in, module.modules()):
            part.set_custom_all_gather(_Silence())
            part.set_custom_reduce_scatter(_Silence())
        return module

    return made


def fill(twin: Any, model: nn.Module, *, main: bool) -> None:
    """Give the twin the weights and buffers of `model`; to be called by all processes."""
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = collected(there, keep=main)
    if not main:
        return
    here = {**dict(twin.model.named_parameters()), **dict(twin.model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            here[name].copy_(tensor)
