"""Full-precision fp32, and bf16 where the hardware multiplies in it. Imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NARROW = 256  # narrower products gain nothing from bf16 on a CPU
SHORT = 4_096  # tokens x head_dim up to which attention that learns is faster in fp32 on a CPU


def forbid_tf32() -> tuple[str, bool]:
    """Forbid rounding fp32 to TF32's ten bits on NVIDIA GPUs. Returns the previous settings, for `allow`.

    torch forbids TF32 in matrix products by default, but allows it in cuDNN's convolutions, such as the patch embedding
    of a ViT, which `torch.set_float32_matmul_precision` does not affect.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow("highest", False)
    return before


def allow(products: str, convolutions: bool) -> None:
    """Set torch's precision of matrix products, and whether convolutions may use TF32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch announce new names for these
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def full_fp32() -> Iterator[None]:
    """Forbid TF32 within the context."""
    before = forbid_tf32()
    try:
        yield
    finally:
        allow(*before)


@contextmanager
def at_rest(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Set eval mode, without TF32 or autocast; every module's mode is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with full_fp32(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for module, training in modes:
            module.training = training


def has_bf16(device: str) -> bool:
    """Return whether the hardware itself multiplies matrices in bf16."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device == "cpu" and any(getattr(torch.cpu, name, bool)() for name in known)


@contextmanager
def autocast(precision: str, device: str, *, recomputes: bool = False) -> Iterator[None]:
    """Round the inputs of products to "bf16" or "fp16", as `torch.autocast` does; "fp32" changes nothing. On a CPU,
    attention that learns stays in fp32 where sequences are short, unless the backward pass recomputes it: torch does so
    under its own autocast.
    """
    if precision == "fp32":
        yield
        return
    learns = device == "cpu" and torch.is_grad_enabled() and not (recomputes or torch.compiler.is_compiling())
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    with torch.autocast(device, dtype), _AttentionInFp32() if learns else nullcontext():
        yield


class _AttentionInFp32(TorchFunctionMode):
    """Computes fused attention over short sequences in fp32 where gradients are needed.

    torch's backward pass of it in bf16 is slow on a CPU: 83 ms for 64 x 12 heads of 24 tokens x 32, where fp32 takes
    13 ms (one core with AMX, torch 2.15). With many tokens bf16 is faster.
    """

    def __torch_function__(self, called: Any, types: Any, given: tuple = (), named: dict | None = None) -> Any:
        named = named or {}
        if called is not F.scaled_dot_product_attention:
            return called(*given, **named)
        query = given[0] if given else named["query"]
        if not query.requires_grad or query.shape[-2] * query.shape[-1] > SHORT:
            return called(*given, **named)
        with torch.autocast("cpu", enabled=False):
            return called(*map(_as_fp32, given), **{key: _as_fp32(value) for key, value in named.items()})


def _as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
