"""What a next step cannot divide or hold, in sentences; nothing where all goes well."""

from __future__ import annotations

from collections.abc import Sequence

from leansurgeon.report.humans import listed
from leansurgeon.shape import Shape
from leansurgeon.surgery.plan.next_steps import CannotHold, Indivisible, indivisible
from leansurgeon.words import wrap


def next_steps(before: Shape, after: Shape, refused: CannotHold | None = None) -> list[str]:
    """Lines of 80 columns: first what is new with the surgery, then what was so before; and formats that cannot hold
    the result, with the choice that they could.
    """
    old, now = indivisible(before), indivisible(after)
    new, same = [n for n in now if n not in old], [n for n in now if n in old]
    lines = []
    if new:
        lines += wrap(f"What a next step cannot divide, new with this surgery: {spelled(new)}.")
    if same:
        lines += wrap(
            f"What a next step cannot divide{', as before' if new else ', as in the source'}: {spelled(same)}."
        )
    if refused:
        lines += wrap(f"{listed(refused.formats)} cannot hold it: {refused.why}. What fits: {refused.instead}.")
    return lines


def spelled(numbers: Sequence[Indivisible]) -> str:
    """`MLP 344 by quantiser groups of 32, 64, 128 and 256; 9 heads by 2, 4 and 8 GPUs`."""
    return "; ".join(f"{named(n)} by {listed(steps(n))}" for n in numbers)


def named(number: Indivisible) -> str:
    """`width 576`, `9 heads`."""
    size = f"{number.size:,}"
    return f"{size} {number.name}" if number.name.endswith("heads") else f"{number.name} {size}"


def steps(number: Indivisible) -> list[str]:
    """What does not divide it, in words."""
    what = []
    if number.groups:
        what.append(f"quantiser groups of {'/'.join(map(str, number.groups))}")
    if number.gpus:
        what.append(f"{'/'.join(map(str, number.gpus))} GPUs")
    if number.kernels:
        what.append(f"kernels of {'/'.join(map(str, number.kernels))}")
    return what
