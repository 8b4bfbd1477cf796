"""Resolve the device that the user names. Imports torch."""

from __future__ import annotations

import re

import torch

from leansurgeon.errors import UsageError


def choose_device(asked: str) -> str:
    """Resolve `auto` to the first GPU if there is one, else the CPU; `cpu`, `cuda` and `cuda:1` mean themselves.

    Raises `UsageError` for other words and for a GPU that does not exist.
    """
    known = re.fullmatch(r"auto|cpu|cuda(?::([0-9]+))?", asked)
    if known is None:
        raise UsageError(f"--device {asked}: give auto, cpu, cuda or a GPU by its number, such as cuda:1.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return "cuda:0" if count else "cpu"
    if asked == "cpu":
        return asked
    place = int(known[1] or 0)
    if place >= count:
        there = "no GPU" if not count else "one GPU, cuda:0" if count == 1 else f"the GPUs cuda:0 to cuda:{count - 1}"
        raise UsageError(f"--device {asked}: torch finds {there} here.")
    return f"cuda:{place}"
