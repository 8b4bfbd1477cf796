"""Predict the peak memory of training without a GPU (`training/observe.py` measures it).

The real model runs a real training step on tensors with sizes but no memory (torch's FakeTensorMode), while every live
storage is counted as CUDA's allocator would count it:

    found = predict(source.config, source.architecture, Setting(batch=128))
    found.total, found.activations                       # bytes

The order is that of `training/optimizer.py`: autocast forward, loss in fp32, backward, clipping, optimizer. The counted
step comes after the optimizer has its state. `cuda_rules.py` covers where CUDA differs from the CPU. Not counted: the
CUDA context (about 0.5 GiB, which no torch counter shows), workspaces of cuDNN, and torch.compile. Imports torch inside
functions only.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.data import inputs
from leansurgeon.reading.jsonfile import JsonObject

if TYPE_CHECKING:
    import torch
    from torch._subclasses import FakeTensorMode


OPTIMIZERS = ("adamw", "adamw-foreach", "adam", "sgd")
EMPTY = types.CellType()  # an empty closure cell
PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")
MIB = 2**20
MOST = 2**20  # largest batch to try
# What torch keeps for cuBLAS, once for the thread of the forward pass and once for that of the backward pass:
# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize. The larger one if the GPU is not known.
WORKSPACE = {"hopper": 2 * 32 * MIB, "older": 2 * (2 * 4096 + 8 * 16) * 1024}


@dataclass(frozen=True)
class Setting:
    """How a model is trained. `batch` is the micro batch of one GPU, `tokens` the length of a text sample (None: what
    the model takes, at most 1024), `world_size` the number of GPUs of a DDP training. `precision` is bf16, fp16 or
    fp32, `attention` sdpa or eager, `optimizer` one of `OPTIMIZERS`.
    """

    batch: int = 1
    tokens: int | None = None
    precision: str = "bf16"
    attention: str = "sdpa"
    optimizer: str = "adamw"
    checkpointing: bool = False
    world_size: int = 1

    def autocast(self, device: str) -> torch.autocast:
        """Return the autocast context for this precision."""
        import torch

        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return torch.autocast(device, narrow, enabled=narrow is not None)


@dataclass(frozen=True)
class Prediction:
    """Bytes at the peak, by purpose, and when the peak occurs. `temporary` holds short-lived tensors of the backward
    pass and the optimizer, and `workspace` bytes that torch keeps for cuBLAS.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    workspace: int
    when: str  # forward, backward or update
    setting: Setting

    @property
    def total(self) -> int:
        """What `torch.cuda.max_memory_allocated` would report."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary

    def as_dict(self) -> JsonObject:
        """Return bytes by part and in total, for JSON."""
        return asdict(self) | {"total": self.total, "unit": "bytes"}


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's cycle collector within the context. It would visit a million objects of the libraries seven
    times (one second of the five that a prediction may take), and could free a tensor at a moment that differs from run
    to run.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@without_collection()
def predict(config: Config, architecture: Architecture, setting: Setting, *, gpu: str = "hopper") -> Prediction:
    """Predict the peak memory of one GPU in a training step of a model with this config. `gpu` is a key of `WORKSPACE`.

    Raises `UsageError` for tokens that the model does not take and `UnsupportedModel` if the model cannot run on
    tensors without values.
    """
    return Rehearsal(config, architecture, setting).peak(gpu=gpu)


class Rehearsal:
    """A model on tensors without memory, whose training step can be tried with several batch sizes."""

    @without_collection()
    def __init__(self, config: Config, architecture: Architecture, setting: Setting, *, cuda: bool = True) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        tokens = inputs.sample_tokens(setting.tokens, config, architecture)
        self.config, self.architecture, self.setting = config, architecture, replace(setting, tokens=tokens)
        self.cuda = cuda
        self.known: dict[int, Any] = {}  # counts by batch size
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.model = fake_model(config, architecture, self.mode)
        choose_attention(self.model, setting.attention)
        if setting.checkpointing:
            checkpoint_activations(self.model, architecture.name)

    @without_collection()
    def peak(self, batch: int | None = None, *, gpu: str = "hopper") -> Prediction:
        """Return the peak for this number of samples (default: the setting's own)."""
        setting = replace(self.setting, batch=batch or self.setting.batch)
        make = partial(inputs.make, self.config, self.architecture, setting.batch, setting.tokens, "cpu")
        try:
            if (count := self.known.get(setting.batch)) is None:
                with leaving_no_fakes(self.model), self.mode:
                    count = self.known[setting.batch] = step(self.model, setting, make, cuda=self.cuda)
        except (RuntimeError, TypeError) as error:
            if "overflow" in str(error).lower():  # sizes beyond 64 bits
                raise UsageError(
                    f"--batch {setting.batch:,}: {setting.tokens or 1:,} tokens of so many samples are more than any "
                    "memory holds.",
                    "Give a smaller batch.",
                ) from error
            if isinstance(error, TypeError):
                raise
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise UnsupportedModel(
                f"{type(self.model).__name__} does not run on tensors without values, so its memory cannot be "
                f"predicted ({reason}).",
                "Measure it with `leansurgeon bench`.",
            ) from error
        parts = {part: count.at_peak[part] for part in PARTS}
        workspace = WORKSPACE[gpu] if self.cuda else 0
        parts["temporary"] += workspace
        return Prediction(**parts, workspace=workspace, when=count.peak_label, setting=setting)

    def largest_batch(self, memory: int, *, gpu: str = "hopper") -> int:
        """Return the largest batch whose peak stays within `memory` bytes, verified by a prediction; 0 if not even one
        sample fits.

        The peak is the maximum of a few linear functions, one for each moment of the step, so it is convex: the chord
        between a batch that fits and one that does not lies above it, and the batch where it crosses `memory` is safe.
        """

        def needs(batch: int) -> int:
            return self.peak(batch, gpu=gpu).total

        fits, too_many = 0, min(self.setting.batch, MOST)
        above = needs(too_many)
        if above > memory:
            fits, below = 1, needs(1) if too_many > 1 else above
            if below > memory:
                return 0
        while above <= memory:
            fits, below = too_many, above
            if fits == MOST:
                return MOST
            too_many = min(4 * fits, MOST)
            above = needs(too_many)
            if above <= memory and fits > 1:  # far beyond the bend, extrapolate
                slope = max(1.0, (above - below) / (too_many - fits))
                fits, below = too_many, above
                too_many = min(MOST, fits + int((memory - above) / slope) + 2)
                above = needs(too_many)
        while too_many - fits > 1:
            trial = fits + int((memory - below) * (too_many - fits) / (above - below))
            if trial <= fits:
                break
            fits, below = trial, needs(trial)
        return fits


def step(
    model: torch.nn.Module, setting: Setting, make: Callable[[], dict[str, torch.Tensor]], *, cuda: bool = True
) -> Any:
    """Run one training step, on the batch that `make` makes, after the optimizer's first; return the `Storages` that
    counted it.

    Works on fake and on real CPU tensors. `cuda` counts as CUDA would, else as the CPU does.
    """
    import torch

    from leansurgeon.hooks import Hooks
    from leansurgeon.measure.costs.cuda_rules import CudaRules
    from leansurgeon.measure.costs.storages import GRANULE, Storages
    from leansurgeon.tasks import wide_loss

    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    with ExitStack() as stack:
        count = stack.enter_context(Storages("weights", GRANULE if cuda else 1))
        count.tag([*model.parameters(), *model.buffers()], "weights")
        optimizer = make_optimizer(parameters, setting.optimizer)
        count.kind = "optimizer"
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # creates its state
        optimizer.zero_grad(set_to_none=True)
        count.kind = "gradients"
        hooks = stack.enter_context(Hooks())
        if setting.world_size > 1:
            # DDP with `gradient_as_bucket_view`: gradients live in permanent buckets, and autograd's results are copied
            # into them.
            for parameter in parameters:
                bucket = torch.empty_like(parameter).detach()
                hooks.gradient(parameter, lambda p, bucket=bucket: setattr(p, "grad", bucket))

        def tag_gradient(parameter: torch.nn.Parameter) -> None:
            if parameter.grad is not None:  # T5's cross-attention has a table without gradient
                count.tag([parameter.grad], "gradients")

        for parameter in parameters:
            hooks.gradient(parameter, tag_gradient)
        if cuda:
            stack.enter_context(CudaRules(fused=setting.attention == "sdpa"))
            stack.enter_context(mock.patch.dict(wide_loss.AT_ONCE, cpu=wide_loss.AT_ONCE["gpu"]))
        count.kind, count.label = "activations", "forward"
        count.mark()
        sample = make()
        scaler = torch.full((), 65536.0) if setting.precision == "fp16" else None
        with setting.autocast("cpu"):
            loss = inputs.loss(inputs.run(model, sample))
        count.kind, count.label = "temporary", "backward"
        backward(loss if scaler is None else loss * scaler)
        count.label = "update"
        if scaler is not None:  # in place
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / 65536)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return count


def backward(loss: torch.Tensor) -> None:
    """Run `loss.backward()` with function modes on. torch treats it as a function of its own and disables `CudaRules`
    inside, even while checkpointed activations are recomputed; so the engine is called directly, as torch does.
    """
    import torch

    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def make_optimizer(parameters: Iterable[torch.nn.Parameter], name: str) -> torch.optim.Optimizer:
    """Create the optimizer as `training/optimizer.py` does on CUDA: fused, or (`adamw-foreach`) as torch does."""
    import torch

    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
    if name == "adamw-foreach":
        return torch.optim.AdamW(parameters, foreach=True)
    return (torch.optim.AdamW if name == "adamw" else torch.optim.Adam)(parameters, fused=True)


def fake_model(config: Config, architecture: Architecture, mode: FakeTensorMode) -> torch.nn.Module:
    """Build the library's model on fake CPU tensors, without memory; tied parameters stay tied."""
    import torch

    from leansurgeon.checkpoints.blockwise.skeleton import build_on_meta
    from leansurgeon.checkpoints.model import buildable

    model = build_on_meta(*buildable(config, architecture))
    made = {}
    with mode:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        made[id(tensor)] = (
                            torch.nn.Parameter(new, tensor.requires_grad) if table is module._parameters else new
                        )
                    table[name] = made[id(tensor)]
    return model


@contextmanager
def leaving_no_fakes(model: torch.nn.Module) -> Iterator[None]:
    """Silence torch's own log of errors on fake tensors, which we report; and clear the caches of the library's
    functions afterwards: DINOv3 caches the coordinates of its patches, and a real model of the same size would get
    tensors without values.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
        classes = {cls for module in model.modules() for cls in type(module).__mro__}
        homes = [*classes, *{sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}]
        for function in (value for home in homes for value in list(vars(home).values()) if callable(value)):
            cells = getattr(function, "__closure__", None) or ()
            for cached in (function, *(cell.cell_contents for cell in cells if cell != EMPTY)):
                if isinstance(cached, functools._lru_cache_wrapper):
                    cached.cache_clear()


def choose_attention(model: torch.nn.Module, attention: str) -> None:
    """Select fused or eager attention by the library's own means; eager if it has no other (Gemma 2's capped scores).
    Our own models, which only call torch's fused function, are handled by `CudaRules`.
    """
    for module in model.modules():
        if hasattr(module, "fused_attn"):  # timm
            module.fused_attn = attention == "sdpa"
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(attention if getattr(model, "_supports_sdpa", True) else "eager")


def checkpoint_activations(model: torch.nn.Module, family: str, hint: str = "Leave --checkpointing out.") -> None:
    """Enable activation checkpointing. Raises `UsageError` with `hint` if the model's library does not support it."""
    if getattr(model, "supports_gradient_checkpointing", False):
        # transformers has renamed this; the old name warns.
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        getattr(model, new if hasattr(model, new) else old)()
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
    else:
        raise UsageError(f"{family} models cannot checkpoint their activations.", hint)
