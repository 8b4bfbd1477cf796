"""Balance: when another basis for every head can be had, and what it promises (`layer.balance` finds it)."""

from __future__ import annotations

from leansurgeon.checkpoints.recorded.planned import Step
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel
from leansurgeon.surgery.layer import balance, canonical


def operator(source: Source) -> Step:
    """The operator for a source. Raises `UnsupportedModel` where its heads have no bases of their own, or where its
    numbers are too coarse to stay the same function.
    """
    if reason := canonical.supported(source):
        raise UnsupportedModel(f"--balance: {reason}", "Leave --balance out.")
    if "vo" not in source.architecture.bases:
        raise UnsupportedModel(
            f"--balance: values of {source.architecture.name} in another basis were not seen to say the same.",
            "Leave --balance out.",
        )
    coarse = {source.weights.entries[s.name].dtype for s in balance.inside(source.specs)} - {"F32", "F64"}
    if coarse:
        raise UnsupportedModel(
            f"--balance is exact in fp32, and these weights are {', '.join(sorted(coarse))}: rounding them in another "
            "basis would change the function.",
            "Leave --balance out, or save an fp32 copy first.",
        )
    also = ", and of queries and keys" if balance.free_scores(source) else "; queries and keys keep theirs"
    why = "" if balance.free_scores(source) else f" ({balance.why_not_scores(source)})"
    says = f"another basis for values and outputs of every head, as well conditioned as can be{also}{why}"
    return Step("balance", "exact", says, {"scores": balance.free_scores(source)})
