"""Format the conditioning of one model: raw kappa with its spread and ranks, and what is invariant under a change of
basis. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leansurgeon.errors import plural, short
from leansurgeon.report.humans import NONE
from leansurgeon.report.kappa import Bound, kappa_of
from leansurgeon.report.notes import of_kappa
from leansurgeon.report.tables.columns import (
    INVARIANTS,
    Column,
    LayerRow,
    by_key,
    define_layer_columns,
    pick,
    rename,
    show,
    without_gaps,
)
from leansurgeon.report.tables.render import fit
from leansurgeon.words import wrap

RAW = ("layer", "kappa_median", "interval", "kappa_worst", "kappa_centred", "rank", "deficient", "stable_rank")
RAW += ("effective_rank", "aspect")
HEADS = {"kappa_median": "kappa", "kappa_worst": "worst", "kappa_centred": "centred", "stable_rank": "stable"}
HEADS |= {"deficient": "lost", "effective_rank": "eff."}
BASIS_HEADS = {"kappa_output": "A W_o", "kappa_jacobian": "Jacobian"}


def describe(document: dict[str, Any]) -> list[str]:
    """Return the document as lines of 80 columns."""
    head = (
        f"{short(document['name'], 60)}: {plural(document['samples'], 'sample')}, {plural(document['tokens'], 'token')}"
    )
    return [*wrap(head), "", *tables(document)]


def tables(measured: dict[str, Any]) -> list[str]:
    """Return the tables of a `leansurgeon kappa` document or of a run summary's `kappa`, one row per layer.

    They show kappa of the block over samples with its 95 % interval, the worst, centred, and ranks; then what depends
    on the basis of the heads and what does not; and how the numbers were measured, in as few sentences as honesty
    allows.
    """
    kappa = kappa_of([measured])
    if kappa is None:
        return []
    layers = measured["layers"]
    # `3`, or `cross 3` if a model has several kinds of attention
    kinds = [layer.get("kind", "self") for layer in layers]
    named = [("" if set(kinds) == {"self"} else f"{k} ") + str(kinds[:i].count(k)) for i, k in enumerate(kinds, 1)]
    intervals = [layer.get("median_interval") or () for layer in layers]
    rows = [LayerRow(None, *row) for row in zip(kappa.layers, named, intervals, strict=True)]
    columns = define_layer_columns() | by_key(
        [Column("layer", "layer", "name"), Column("interval", "95 %", "interval", show_interval)]
    )
    raw = without_gaps(rename(pick(columns, RAW), HEADS), rows)
    basis = without_gaps(rename(pick(columns, INVARIANTS), BASIS_HEADS), rows)
    spare = ["stable_rank"] if kappa.deficient else ["deficient", "stable_rank"]
    said = [note.says for note in of_kappa([kappa], by_layer=True)]
    said.append("95 %: the bootstrap's interval of the median. stable, eff.: stable and effective rank.")
    if slope := next((layer["jacobian"] for layer in layers if layer.get("jacobian")), None):
        exact = "it is exact here" if slope["exact"] else "a lower bound, to be compared at equal probes only"
        said.append(
            f"Jacobian of a block, {slope['probes']} directions of {slope['columns']:,}, "
            f"{plural(slope['samples'], 'sample')}: {exact}."
        )
    if any(0.8 < (layer.aspect or 0) < 1.25 for layer in kappa.layers):
        said.append("h*d is near the number of tokens, where kappa peaks (Theorem 3.2): fewer heads lower it, too.")
    below = "\n".join(line for text in said for line in wrap(text, "  "))
    return "\n\n".join([fit(rows, raw, spare)[0], fit(rows, basis)[0], below]).split("\n")


def show_interval(interval: Sequence[float | None]) -> str:
    """Return an interval as `low-high`, a dash if it was not measured; None is infinity."""
    ends = (
        "inf" if end is None else show(Bound(end)) if end < 9_999.5 else f"{end:.1e}".replace("e+0", "e")
        for end in interval
    )
    return "-".join(ends) or NONE
