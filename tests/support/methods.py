"""Plans by another method than the one that they were made with."""

from dataclasses import replace

from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import Plan


def with_method(steps: Plan, heal: str = "closed", keep: tuple[int, ...] = (), **changes) -> Plan:
    """The plan, healed in this way; `keep` are the layers that stay."""
    named = ",".join(map(str, keep)) if keep else None
    return replace(steps, method=Method(heal=heal, keep=named, **changes))
