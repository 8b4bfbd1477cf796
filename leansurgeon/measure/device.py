"""The device that the user means. Imports torch."""

from __future__ import annotations

import torch

from leansurgeon.errors import UsageError


def chosen(asked: str) -> str:
    """`auto` is the first GPU where there is one, else the CPU; `cpu`, `cuda` and `cuda:1` are themselves.

    Raises `UsageError` for other words and for a GPU that is not there.
    """
    number = asked.removeprefix("cuda:")
    known = asked in ("auto", "cpu", "cuda") or (asked != number and number.isascii() and number.isdecimal())
    if not known:
        raise UsageError(f"--device {asked}: give auto, cpu, cuda or a GPU by its number, such as cuda:1.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return "cuda:0" if count else "cpu"
    if asked == "cpu":
        return asked
    place = 0 if asked == "cuda" else int(number)
    if place >= count:
        there = "no GPU" if not count else "one GPU, cuda:0" if count == 1 else f"the GPUs cuda:0 to cuda:{count - 1}"
        raise UsageError(f"--device {asked}: torch finds {there} here.")
    return f"cuda:{place}"
