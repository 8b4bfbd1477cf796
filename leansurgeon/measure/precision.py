"""fp32 with all its digits. Imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_tf32(products: str = "highest", convolutions: bool = False) -> tuple[str, bool]:
    """Whether fp32 may be rounded to TF32's ten bits on NVIDIA's GPUs: not, by default. Returns what was set before.

    torch forbids it in matrix products and allows it in cuDNN's convolutions, such as the patch embedding of a ViT,
    which `torch.set_float32_matmul_precision` does not touch.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch announce other names for these
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
    return before


@contextmanager
def full_fp32() -> Iterator[None]:
    """No TF32 for a while."""
    before = set_tf32()
    try:
        yield
    finally:
        set_tf32(*before)
