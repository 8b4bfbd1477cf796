"""The conditioning of one model as a person reads it: raw kappa with its spread and ranks, and beside it what a change
of basis cannot move. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from leansurgeon.errors import plural, short
from leansurgeon.report.evidence.kappa import Bound, Kappa, kappa_of
from leansurgeon.report.humans import NONE
from leansurgeon.report.tables.columns import INVARIANTS, LayerRow, define_layer_columns, pick, show
from leansurgeon.words import WIDTH, wrap

RAW = {"kappa_median": "kappa", "kappa_worst": "worst", "kappa_centred": "centred", "rank": "rank"}
RAW |= {"deficient": "lost", "stable_rank": "stable", "effective_rank": "eff.", "aspect": "h*d/N"}


def describe(document: dict[str, Any]) -> list[str]:
    """The document as a person reads it, in 80 columns."""
    head = (
        f"{short(document['name'], 60)}: {plural(document['samples'], 'sample')}, {plural(document['tokens'], 'token')}"
    )
    return [*wrap(head), "", *tables(document)]


def tables(measured: dict[str, Any]) -> list[str]:
    """Raw and invariant, from a document of this command or from what a run's summary keeps under `kappa`."""
    kappa = kappa_of([measured])
    if kappa is None:
        return []
    said = [line for text in notes(measured, kappa) for line in wrap(text, "  ")]
    blocks = [tabulate_raw(measured, kappa), tabulate_basis(measured, kappa), said]
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def tabulate_raw(measured: dict[str, Any], kappa: Kappa) -> list[str]:
    """One row per layer: kappa of the block over samples, its 95 % interval, the worst, centred, and ranks."""
    heads, rows = cells_of(measured, kappa, RAW)
    heads.insert(2, "95 %")
    for row, layer in zip(rows, measured["layers"], strict=True):
        row.insert(2, show_interval(layer.get("median_interval")))
    return draw_grid(heads, rows, ["stable"] if kappa.deficient else ["lost", "stable"])


def tabulate_basis(measured: dict[str, Any], kappa: Kappa) -> list[str]:
    """One row per layer: what depends on the basis of the heads, then what does not."""
    return draw_grid(*cells_of(measured, kappa, dict.fromkeys(INVARIANTS[2:])))


def cells_of(
    measured: dict[str, Any], kappa: Kappa, heads: Mapping[str, str | None]
) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the columns with these keys, under these heads or their own; the first names the layer: `3`,
    or `cross 3` where a model has several kinds of attention.
    """
    columns = pick(define_layer_columns(), heads)
    kinds = [layer.get("kind", "self") for layer in measured["layers"]]
    rows = []
    for i, (kind, layer) in enumerate(zip(kinds, kappa.layers, strict=True)):
        name = ("" if set(kinds) == {"self"} else f"{kind} ") + str(kinds[: i + 1].count(kind))
        rows.append([name, *(column.cell(LayerRow(None, layer)) for column in columns)])
    return ["layer", *(heads[column.key] or column.title for column in columns)], rows


def notes(document: dict[str, Any], kappa: Kappa) -> list[str]:
    """How the numbers came about, in as few sentences as honesty allows."""
    dtype = "fp32" if kappa.dtype == "float32" else kappa.dtype
    said = [
        f"kappa: input A of the output projection, median over {plural(kappa.samples, 'sample')} with the bootstrap's "
        f"95 % interval, real tokens only, {dtype} forward, fp64 spectrum. centred: without the mean token. "
        "stable, eff.: stable and effective rank.",
        "A, W_q, W_k, W_v and W_o depend on the basis of every head, which changes nothing that the model computes; "
        "A W_o, the Jacobian and, over heads, W_o W_v and W_q' W_k do not.",
    ]
    slope = next((layer["jacobian"] for layer in document["layers"] if layer.get("jacobian")), None)
    if slope:
        exact = "it is exact here" if slope["exact"] else "a lower bound, to be compared at equal probes only"
        said.append(
            f"Jacobian of a block, {slope['probes']} directions of {slope['columns']:,}, "
            f"{plural(slope['samples'], 'sample')}: {exact}."
        )
    if kappa.deficient:
        said.append(
            f"lost: {plural(kappa.deficient, 'block')} without full rank; look for repeated tokens, heads without "
            "effect, or few columns for the tokens."
        )
    if kappa.layers and any(0.8 < (layer.aspect or 0) < 1.25 for layer in kappa.layers):
        said.append("h*d is near the number of tokens, where kappa peaks (Theorem 3.2): fewer heads lower it, too.")
    return said


def show_interval(interval: list[float | None] | None) -> str:
    """An interval as `low-high`, a dash where it was not measured; None is infinity."""
    ends = (
        "inf" if end is None else show(Bound(end)) if end < 9_999.5 else f"{end:.1e}".replace("e+0", "e")
        for end in interval or ()
    )
    return "-".join(ends) or NONE


def draw_grid(heads: list[str], rows: list[list[str]], spare: Sequence[str] = ()) -> list[str]:
    """Right-aligned columns; those that say nothing are left out, and the `spare` ones where it is too wide."""
    kept = [i for i in range(len(heads)) if any(row[i] != NONE for row in rows)]
    for name in (None, *spare):
        kept = [i for i in kept if heads[i] != name]
        lines = [[heads[i] for i in kept], *([row[i] for i in kept] for row in rows)]
        body = tabulate(lines, tablefmt="plain", disable_numparse=True, stralign="right")
        text_lines = [line.rstrip() for line in body.splitlines()]
        if max(map(len, text_lines)) <= WIDTH:
            break
    return text_lines
