"""fp32 with all its digits. Imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def forbid_tf32() -> tuple[str, bool]:
    """fp32 is no longer rounded to TF32's ten bits on NVIDIA's GPUs. Returns what was set before, for `allow`.

    torch forbids it in matrix products and allows it in cuDNN's convolutions, such as the patch embedding of a ViT,
    which `torch.set_float32_matmul_precision` does not touch.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow("highest", False)
    return before


def allow(products: str, convolutions: bool) -> None:
    """torch's precision of matrix products, and whether convolutions may use TF32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch announce other names for these
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def full_fp32() -> Iterator[None]:
    """No TF32 for a while."""
    before = forbid_tf32()
    try:
        yield
    finally:
        allow(*before)
