"""A cut in plain words, before its numbers: what changed, what that costs on samples that had no part in it, and what
it saves; and the words that stand in its tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from leansurgeon.checkpoints.proof import report_numbers
from leansurgeon.checkpoints.proof.report_numbers import perplexity
from leansurgeon.checkpoints.record import Comparison
from leansurgeon.errors import plural
from leansurgeon.shape import Shape

ROUNDING = 1e-4  # relative error of outputs that differ by rounding only
SEEN = 0.005  # share of a perplexity below which no cost is spoken of
EXACTNESS = {
    "exact": "the same outputs",
    "near": "nearly the same outputs, and what is lost is measured",
    "fresh": "new weights, which have learned nothing",
}
CRITERIA = {
    "angular": "the neighbours that turn hidden states least go, in one block or in two",
    "influence": "the layers that change their input least go",
    "block": "these neighbours go",
    "even": "what stays is evenly spaced",
    "first-of-each": "of each group of neighbours the first stays",
    "last-of-each": "of each group of neighbours the last stays",
    "pattern": "what stays has layers of another kind where formats such as GGUF expect them",
    "greedy": "the layer that is missed least goes, one after another",
    "leave-one-out": "the layers that are missed least, each by itself, go",
}


def verdict(before: Shape, after: Shape, compared: Comparison | None, language: bool, saved: float) -> str | None:
    """One sentence; None where nothing was changed or compared. `saved` is the share of the parameters that went."""
    changes = changed(before, after)
    if not changes or compared is None or not compared.done:
        return None
    one = changes == ["1 layer fewer"]
    what = " and ".join(changes)
    weights = f"{100 * abs(saved):.1f} % of the parameters" if abs(saved) >= 5e-4 else ""
    told = f"{what} {cost(compared, language, one)}"
    if not weights:
        return f"{told}."
    return f"{told}{',' if ',' in told else ''} and {('save' if saved > 0 else 'add') + 's' * one} {weights}."


def changed(before: Shape, after: Shape) -> list[str]:
    """What is different, as subjects of a sentence."""
    differences = []
    if gone := before.depth - after.depth:
        differences.append(f"{plural(gone, 'layer')} fewer")
    for key, name in (("heads", "heads"), ("head_dim", "numbers a head"), ("mlp_dim", "MLP units")):
        new, old = after.column(key), before.column(key)
        if new != old and not (key == "head_dim" and any("heads" in one for one in differences)):
            differences.append(f"{new} {name} instead of {old}")
    return differences


def cost(compared: Comparison, language: bool, one: bool = False) -> str:
    """What it costs, as the rest of that sentence; `one`: in the singular."""
    costs, change, keep = (word + "s" * one for word in ("cost", "change", "keep"))
    others = {"noise": "with noise as input", report_numbers.SEEN: f"on {report_numbers.SEEN}"}
    on = others.get(compared.data, "on held-out samples")
    if compared.relative_error is not None and compared.relative_error < ROUNDING:
        return f"{change} nothing: the outputs are the same but for rounding"
    if compared.loss and language:
        old, new = compared.loss.source, compared.loss.result
        more = math.expm1(min(new - old, 50.0))
        figures = f"({perplexity(new)} {on}, the source {perplexity(old)})"
        if more < SEEN:
            return f"{costs} no perplexity {figures}"
        if more >= 10:
            return f"{'multiplies' if one else 'multiply'} perplexity by {more + 1:,.0f} {figures}"
        return f"{'raises' if one else 'raise'} perplexity by {100 * more:.0f} % {figures}"
    if compared.accuracy:
        old, new = (100 * share for share in (compared.accuracy.source, compared.accuracy.result))
        figures = f"({new:.1f} % {on}, the source {old:.1f} %)"
        lost = f"{old - new:.1f} points of accuracy" if old - new >= 0.05 else "no accuracy"
        return f"{costs} {lost} {figures}"
    if compared.embeddings:
        kept = compared.embeddings.nearest_kept
        near = f", {100 * kept:.0f} % of the nearest neighbours" if kept is not None else ""
        return f"{keep} a cosine of {compared.embeddings.cosine:.3f} to the source's embeddings{near} {on}"
    if compared.relative_error is not None:
        return f"{change} the outputs by {100 * compared.relative_error:.0f} % of their size {on}"
    return f"{change} outputs that could not be measured"


def exactness(words: Iterable[str]) -> str:
    """What the words behind operators promise, those that occur."""
    there = set(words)
    return "; ".join(f"{word}: {says}" for word, says in EXACTNESS.items() if word in there)


def criteria(names: Iterable[str]) -> str:
    """What chooses layers, for the names that occur: `angular, second`, `block 3-8`."""
    there = [name.split()[0].rstrip(",") if name else "" for name in names]
    return "; ".join(f"{word}: {says}" for word, says in CRITERIA.items() if word in there)
