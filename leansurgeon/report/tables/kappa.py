"""The conditioning of one model as a person reads it: raw kappa with its spread and ranks, and beside it what a change
of basis cannot move. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from leansurgeon.errors import plural, short
from leansurgeon.measure.kappa.figures import ceiling
from leansurgeon.report.evidence.kappa import MATRICES, PRODUCTS, Bound, Kappa, kappa_of
from leansurgeon.report.humans import NONE, plain
from leansurgeon.report.tables.columns import bound_cell, rank_cell
from leansurgeon.words import WIDTH, wrap

NAMES = {"vo": "W_o W_v", "qk": "W_q' W_k"} | {key: f"W_{key}" for key in MATRICES}


def describe(document: dict[str, Any]) -> list[str]:
    """The document as a person reads it, in 80 columns."""
    head = (
        f"{short(document['name'], 60)}: {plural(document['samples'], 'sample')}, {plural(document['tokens'], 'token')}"
    )
    return [*wrap(head), "", *tables(document)]


def tables(measured: dict[str, Any]) -> list[str]:
    """Raw and invariant, from a document of this command or from what a run's summary keeps under `kappa`."""
    figures = kappa_of([measured])
    if figures is None:
        return []
    kinds = [layer.get("kind", "self") for layer in measured["layers"]]
    intervals = [layer.get("median_interval") for layer in measured["layers"]]
    said = [line for text in notes(measured, figures) for line in wrap(text, "  ")]
    blocks = [raw(figures, kinds, intervals), beside(figures, kinds), said]
    lines: list[str] = []
    for block in blocks:
        lines += ["", *block] if lines and block else block
    return lines


def raw(kappa: Kappa, kinds: Sequence[str], intervals: Sequence[list | None]) -> list[str]:
    """One row per layer: kappa of the block over samples, its 95 % interval, the worst, centred, and ranks."""
    rows = [
        [
            name,
            bound_cell(layer.median),
            ends(interval),
            bound_cell(layer.worst),
            bound_cell(layer.centred),
            rank_cell(layer.rank, layer.k),
            str(layer.deficient),
            plain(layer.stable_rank),
            plain(layer.effective_rank),
            plain(layer.aspect),
        ]
        for layer, name, interval in zip(kappa.layers, names(kinds), intervals, strict=True)
    ]
    spare = ["stable"] if kappa.deficient else ["lost", "stable"]
    return grid(["layer", "kappa", "95 %", "worst", "centred", "rank", "lost", "stable", "eff.", "h*d/N"], rows, spare)


def beside(kappa: Kappa, kinds: Sequence[str]) -> list[str]:
    """One row per layer: what depends on the basis of the heads, then what does not."""
    rows = [
        [
            name,
            bound_cell(layer.median),
            *(bound_cell((layer.weights or {}).get(key)) for key in MATRICES),
            bound_cell(layer.output),
            bound_cell(layer.jacobian),
            *(bound_cell((layer.weights or {}).get(key)) for key in PRODUCTS),
        ]
        for layer, name in zip(kappa.layers, names(kinds), strict=True)
    ]
    heads = ["layer", "A", *(NAMES[key] for key in MATRICES), "A W_o", "Jacobian", *(NAMES[key] for key in PRODUCTS)]
    return grid(heads, rows)


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
    half = ceiling(kappa.dtype) is not None
    if kappa.deficient:
        why = f"in {dtype} they may only seem so" if half else "look for repeated tokens, heads without effect, or few"
        columns = "" if half else " columns for the tokens"
        said.append(f"lost: {plural(kappa.deficient, 'block')} without full rank; {why}{columns}.")
    if half and any(layer.get("capped") for layer in document["layers"]):
        said.append(f"≥: the {dtype} forward caps kappa here; measure with --precision fp32.")
    if kappa.layers and any(0.8 < (layer.aspect or 0) < 1.25 for layer in kappa.layers):
        said.append("h*d is near the number of tokens, where kappa peaks (Theorem 3.2): fewer heads lower it, too.")
    return said


def ends(interval: list | None) -> str:
    """An interval as `low-high`, a dash where it was not measured."""
    if interval is None:
        return NONE
    low, high = (end_cell(end) for end in interval)
    return f"{low}-{high}"


def end_cell(end: float | None) -> str:
    """One end of an interval, written short; None is infinity."""
    return "inf" if end is None else bound_cell(Bound(end)) if end < 9_999.5 else f"{end:.1e}".replace("e+0", "e")


def names(kinds: Sequence[str]) -> list[str]:
    """Attentions as a person calls them: `3`, or `cross 3` where a model has several kinds."""
    called: list[str] = []
    for i, kind in enumerate(kinds):
        number = kinds[: i + 1].count(kind)
        called.append(f"{number}" if set(kinds) == {"self"} else f"{kind} {number}")
    return called


def grid(heads: list[str], rows: list[list[str]], spare: Sequence[str] = ()) -> list[str]:
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
