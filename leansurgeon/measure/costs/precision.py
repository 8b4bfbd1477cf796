"""Full-precision fp32, and bf16 where the hardware multiplies in it. Imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

NARROW = 256  # narrower products gain nothing from bf16 on a CPU


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
