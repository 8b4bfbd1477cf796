"""A sweep over heads as the paper draws it (its figures 3 and 5): metric and kappa against heads, one curve for every
depth, MLP, head_dim (or inner width) and beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

from leansurgeon.errors import plural
from leansurgeon.report.rows.rows import Row, Section

LEAST = 3  # numbers of heads that make a curve


@dataclass(frozen=True)
class Curve:
    """Arms that differ in their heads alone, in the order of these, as (heads, row)."""

    name: str
    arms: tuple[tuple[int, Row], ...]


def sweep(section: Section) -> list[Curve]:
    """The curves of a section, deepest first; none where no depth was tried with `LEAST` numbers of heads.

    Along a curve head_dim stays, or the inner width (heads times head_dim) does; an arm may stand on one of each. Arms
    that began with trained weights, the original among them, make curves of their own. Controls stay out: they follow
    the size of their arm. So do models whose stages have several numbers of heads, and single runs, which may differ
    in anything.
    """
    if section.kind != "experiment":
        return []
    curves: dict[tuple[int, int, bool, tuple[str, int]], list[tuple[int, Row]]] = {}
    for row in section.rows:
        shape = {key: int(value) for key, value in (row.shape or {}).items() if value.isdecimal()}
        if row.role != "control" and {"depth", "heads", "head_dim", "mlp_dim"} <= shape.keys():
            for same in (("head_dim", shape["head_dim"]), ("inner width", shape["heads"] * shape["head_dim"])):
                key = (shape["depth"], shape["mlp_dim"], row.began_trained, same)
                curves.setdefault(key, []).append((shape["heads"], row))
    curves = {key: arms for key, arms in curves.items() if len({heads for heads, _ in arms}) >= LEAST}
    several, both, apart = (len({key[i] for key in curves}) > 1 for i in (1, 2, 3))
    made = []
    for (depth, mlp, trained, same), arms in sorted(curves.items(), key=lambda item: (-item[0][0], *item[0][1:])):
        name = plural(depth, "layer") + (f", MLP {mlp:,}" if several else "")
        name += f", {same[0]} {same[1]:,}" if apart else ""
        name += (", cut from trained weights" if trained else ", from scratch") if both else ""
        made.append(Curve(name, tuple(sorted(arms, key=lambda arm: arm[0]))))
    return made
