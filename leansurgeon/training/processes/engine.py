"""Accelerate, set up from the recipe alone: device, processes and precision, whatever the environment says.

Accelerate gives device placement, DDP, autocast and unscaled clipping. The schedule, the data order and the division of
losses are ours (its scheduler steps once per process, its loaders do not restore their order, its loss division ignores
token counts).
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from leansurgeon import rank
from leansurgeon.errors import LeanSurgeonError, UsageError, plural
from leansurgeon.measure.costs.precision import forbid_tf32
from leansurgeon.progress import Say, silent
from leansurgeon.training.processes import environment
from leansurgeon.training.processes.agree import COLLECTIVE_TIMEOUT

if TYPE_CHECKING:
    from accelerate import Accelerator

    from leansurgeon.training.recipe.settings import Train


def start(*, cpu: bool = False, train: Train | None = None, say: Say = silent) -> Accelerator:
    """An `Accelerator` on the GPU if there is one, in the process group if there is one.

    Precision is `autocast` and `scaler` below, the same on a CPU and on a GPU. Environment variables that would change
    the computation are set aside, or where that cannot be done and `train` is overridden, named to `say` all the same.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import GradientAccumulationPlugin

    wanted, store = environment.group_size(), None
    cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    # Without a word Accelerate would let every process that torchrun starts on a machine without GPUs train alone.
    cpu = cpu or (wanted > 1 and not torch.accelerator.is_available())
    # Accelerate keeps its state for the life of the process; a second training with another precision starts anew.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    aside = environment.set_aside()
    forbid_tf32()  # "precision: fp32" means it
    if wanted > 1 and not torch.distributed.is_initialized():
        store = met(say)
    alone = {} if wanted > 1 else {name: os.environ.pop(name) for name in rank.said()}  # one needs nobody to meet
    try:
        accelerator = Accelerator(
            mixed_precision="no",
            cpu=cpu,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
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
        raise UsageError(f"{wanted} processes were started, and {accelerator.num_processes} of them found each other.")
    told = environment.sentence(aside, environment.in_force(train, accelerator.device.type) if train else [])
    if told and accelerator.is_main_process:
        say(told)
    return accelerator


def met(say: Say) -> object:
    """Wait for the other processes, in a thread, so that a signal ends the wait; what they met at is for the caller to
    hold until Accelerate meets there, too. Whoever is not there soon is named.

    Raises `LeanSurgeonError` where they cannot meet.
    """
    from torch.distributed.rendezvous import rendezvous

    made: list[object] = []

    def wait() -> None:
        try:
            made.append(next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT)))
        except Exception as error:  # torch has a class for every way in which a network fails
            made.append(error)

    there = rank.said()
    size, mine, host, port = (there[name] for name in (rank.SIZE, rank.RANK, rank.HOST, rank.PORT))
    how = " ".join(f"{name}={value}" for name, value in there.items())
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    # A launcher that is there starts all of them within some seconds; without one the variables may be left over.
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
    """Whether the processes share the weights (FSDP2). Raises `UsageError` for what does not go together with it."""
    if train.parallel != "fsdp2":
        return False
    if processes == 1:
        say("train.parallel fsdp2 shares the weights among processes, and there is one: it changes nothing.")
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


def prepared(accelerator: Accelerator, module: nn.Module) -> nn.Module:
    """`module` behind DDP where there are several processes."""
    with warnings.catch_warnings():
        # The new name of this option does not exist in every torch that we support.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        return accelerator.prepare(module)


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """What the forward pass runs under: matrix products in bf16 or fp16 where `precision` says so."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """fp16 alone needs its losses scaled, since its small gradients are zero."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's generator on the CPU and on `device`.

    `torch.manual_seed` visits every kind of device that torch knows, which takes 0.1 ms; this takes a hundredth of it.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def all_reduced(sums: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    """The sum over all processes, in place; nothing happens on one."""
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(sums)
    return sums


def average_statistics(model: nn.Module, accelerator: Accelerator) -> None:
    """Give every process the mean of the running statistics of batch norms, which each has seen its own samples of."""
    if accelerator.num_processes == 1:
        return
    from torch.nn.modules.batchnorm import _BatchNorm

    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            for statistic in (module.running_mean, module.running_var):
                torch.distributed.all_reduce(statistic)
                statistic /= accelerator.num_processes


def device_name(accelerator: Accelerator) -> str:
    """`NVIDIA H200`, or `cpu, 2 threads`: what timings and memory of a run refer to."""
    if accelerator.device.type == "cuda":
        return torch.cuda.get_device_name(accelerator.device)
    if accelerator.device.type == "cpu":
        return f"cpu, {plural(torch.get_num_threads(), 'thread')}"
    return accelerator.device.type
