"""A sweep over heads as the paper draws it (its figures 3 and 5): metric and kappa against heads, one curve for every
depth and MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from leansurgeon.errors import plural
from leansurgeon.report.rows import Row, Section

LEAST = 3  # numbers of heads that make a curve

Arm = tuple[int, int, Row]  # heads, head_dim


@dataclass(frozen=True)
class Curve:
    """Arms that differ in their heads alone, in the order of these, as (heads, row)."""

    name: str
    arms: tuple[tuple[int, Row], ...]


def sweep(section: Section) -> list[Curve]:
    """The curves of a section, deepest first; none where no depth was tried with `LEAST` numbers of heads.

    Arms that began with trained weights, the original among them, make curves of their own. Controls stay out: they
    follow the size of their arm. So do models whose stages have several numbers of heads, and single runs, which may
    differ in anything.
    """
    if section.kind != "experiment":
        return []
    found: dict[tuple[int, int, bool], list[Arm]] = {}
    for row in section.rows:
        shape = {key: int(value) for key, value in (row.shape or {}).items() if value.isdecimal()}
        if row.role != "control" and {"depth", "heads", "mlp_dim"} <= shape.keys():
            key = (shape["depth"], shape["mlp_dim"], row.began_trained)
            found.setdefault(key, []).append((shape["heads"], shape.get("head_dim", 0), row))
    curves = [(key, same, arms) for key, group in found.items() for same, arms in apart(group) if makes_curve(arms)]
    several = len({mlp for (_, mlp, _), *_ in curves}) > 1
    both = len({trained for (*_, trained), *_ in curves}) > 1
    made = []
    for (depth, mlp, trained), same, arms in sorted(curves, key=lambda curve: (-curve[0][0], *curve[0][1:], curve[1])):
        name = plural(depth, "layer") + (f", MLP {mlp:,}" if several else "")
        name += f", {same[0]} {same[1]:,}" if same else ""
        name += (", cut from trained weights" if trained else ", from scratch") if both else ""
        made.append(Curve(name, tuple(sorted(((heads, row) for heads, _, row in arms), key=lambda arm: arm[0]))))
    return made


def makes_curve(arms: list[Arm]) -> bool:
    return len({heads for heads, *_ in arms}) >= LEAST


def apart(arms: list[Arm]) -> list[tuple[tuple[str, int] | tuple[()], list[Arm]]]:
    """Arms of one depth and MLP as they belong on curves, each with what its arms share and others do not. One curve,
    unless some number of heads was tried with several head_dim: then one for every head_dim, or for every inner width
    (heads times head_dim), whichever puts more arms on curves.
    """
    if len({(heads, dim) for heads, dim, _ in arms}) == len({heads for heads, *_ in arms}):
        return [((), arms)]
    ways = []
    for word, of in (("head_dim", lambda heads, dim: dim), ("inner width", lambda heads, dim: heads * dim)):
        groups: dict[tuple[str, int], list[Arm]] = {}
        for arm in arms:
            groups.setdefault((word, of(*arm[:2])), []).append(arm)
        ways.append(list(groups.items()))
    return max(ways, key=lambda way: sum(len(group) for _, group in way if makes_curve(group)))
