"""The output of `leansurgeon heads` in 80 columns: the importance map, ablations and the pruning curve.

All functions read the document of `measure.heads.document` (also from RUN/heads.json) and import no torch.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_left
from typing import TYPE_CHECKING

from leansurgeon.errors import plural
from leansurgeon.report.tables.cut import draw_table
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.measure.heads.document import HeadsDocument
    from leansurgeon.measure.heads.pruning import AblationResult, Point
    from leansurgeon.reading.jsonfile import JsonObject

SHOWN = 6  # heads of an ablation that are listed
PER_LINE = 50  # heads of the map per line
LABELS = {"importance": "least", "reverse": "most"}


def describe(document: HeadsDocument) -> list[str]:
    """Return the whole study as text."""
    samples = document["samples"]
    heads = sum(entry["heads"] for entry in document["attentions"])
    lines = [
        *wrap(f"{document['model']}: {plural(heads, 'head')}. Data: {document['data']['says']}."),
        *wrap(f"Judged by {document['judged_by']}. Importance on {plural(samples['importance'], 'sample')}."),
        "",
        *importance_map(document),
    ]
    if "ablation" in document:
        lines += ["", *ablation(document)]
    if "curve" in document:
        lines += ["", *curve(document)]
    return lines


def name(entry: JsonObject, document: HeadsDocument) -> str:
    """Return the name of a layer: `3`, `2.3` if there are several stages, `cross 3`."""
    stages = {other["stage"] for other in document["attentions"]}
    layer = str(entry["layer"] + 1)
    if entry["kind"] in ("encoder", "decoder", "cross"):
        return f"{entry['kind']} {layer}"
    stage = f"{entry['stage'] + 1}." if len(stages) > 1 else ""
    return f"{stage}{layer}" + (f" {entry['kind'].removeprefix('self ')}nd" if " " in entry["kind"] else "")


def importance_map(document: HeadsDocument) -> list[str]:
    """Return the importance map, one digit per head: the decile of its importance among all heads."""
    entries = document["attentions"]
    flat = sorted(value for entry in entries for value in entry["importance"])
    total = sum(flat) or 1.0
    rows = []
    for entry in entries:
        values = entry["importance"]
        tenths = (10 * bisect_left(flat, value) // len(flat) for value in values)
        digits = "".join(str(min(9, tenth)) for tenth in tenths)
        pieces = textwrap.wrap(digits, PER_LINE)
        best = max(range(len(values)), key=values.__getitem__)
        share = f"{100 * sum(values) / total:.1f} %"
        rows.append([name(entry, document), pieces[0], share, f"{best + 1} ({100 * values[best] / total:.1f} %)"])
        rows += [["", piece, "", ""] for piece in pieces[1:]]
    headers = ["layer", "heads", "importance", "strongest"]
    lines = draw_table(rows, headers, ("left", "left", "right", "right"))
    says = "A digit a head: 9 is the most important tenth of all heads, 0 the least."
    if len(document["kinds"]) > 1:
        shares = (f"{k} {100 * v['share']:.0f} % in {plural(v['heads'], 'head')}" for k, v in document["kinds"].items())
        says += f" By kind of attention: {', '.join(shares)}."
    return [*lines, *wrap(says)]


def ablation(document: HeadsDocument) -> list[str]:
    """Return which single heads matter."""
    tested = document["ablation"]
    heads = [
        (entry, number, off) for entry in document["attentions"] for number, off in enumerate(entry["off"], start=1)
    ]
    heads.sort(key=lambda item: -item[2]["change"])
    ends = heads if len(heads) <= 2 * SHOWN else heads[:SHOWN] + heads[-SHOWN:]
    percent = "accuracy_change" in heads[0][2]

    def row(entry: JsonObject, number: int, off: AblationResult) -> list[str | int]:
        """Return a row for one head: layer, head and its change in scores."""
        loss, p = f"{off['change']:+.4f}", off["p_holm"]
        error = "-" if off["standard_error"] is None else f"{off['standard_error']:.4f}"  # there was only one batch
        chance = "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
        accuracy = [f"{100 * off['accuracy_change']:+.1f}"] if percent else []
        return [name(entry, document), number, loss, error, chance, *accuracy]

    headers = ["layer", "head off", "loss", "error", "p (Holm)"] + (["accuracy"] if percent else [])
    lines = draw_table([row(*each) for each in ends], headers)
    if len(ends) < len(heads):
        lines.insert(2 + SHOWN, f"... {plural(len(heads) - len(ends), 'head')} in between ...")
    n = document["samples"]["ablation"]
    if tested["test"]:
        says = (
            f"One head off, {n:,} held-out samples, loss with all {tested['whole']['loss']:.4f}: of {tested['heads']} "
            f"heads {tested['worse']} raise the loss and {tested['better']} lower it ({tested['test']})."
        )
    else:
        says = (
            f"One head off, {n:,} held-out samples. No test: a distance from oneself is never below 0, so it would "
            "always pass."
        )
    if tested["spearman"] is not None:
        says += f" Rank correlation with importance: {tested['spearman']:.2f}."
    return [*lines, *wrap(says)]


def curve(document: HeadsDocument) -> list[str]:
    """Return the score against the share of heads switched off."""
    curves = document["curve"]
    orders = {LABELS[key]: curves["orders"][key] for key in LABELS if key in curves["orders"]}
    allowed = "a hundredth less of it" if {"accuracy", "scores"} & set(document["whole"]) else "a hundredth more of it"
    allowed = allowed if has_labels(document) else "0.01 of it"
    able = ", ".join(
        f"{LABELS[key]} {100 * curves['prunable'][key]:.0f} %" for key in LABELS if key in curves["orders"]
    )
    rows = [
        [f"{100 * points[0]['fraction']:.0f} %", *(value(point, document) for point in points)]
        for points in zip(*orders.values(), strict=True)
    ]
    return [
        *draw_table(rows, ["off", *orders], ("right",) * (1 + len(orders))),
        *wrap(
            f"{unit(document)} on {document['samples']['curve']:,} held-out samples. least: the least important heads "
            "of the model first, layers may lose all. most: backwards."
        ),
        *wrap(f"Can go for {allowed}: {able}."),
    ]


def has_labels(document: HeadsDocument) -> bool:
    """Return whether labels scored the heads, and not the similarity to the whole model's output."""
    return not document["judged_by"].startswith("1 - cosine")


def unit(document: HeadsDocument) -> str:
    """Return the name of the document's score: accuracy, another score, perplexity, loss or 1 - cosine."""
    if "accuracy" in document["whole"]:
        return "accuracy, %,"
    if scores := document["whole"].get("scores"):
        return next(iter(scores))
    return "perplexity of a token" if document["text"] else "loss" if has_labels(document) else "1 - cosine"


def value(point: Point, document: HeadsDocument) -> str:
    """Return a point's score in that unit."""
    if "accuracy" in point:
        return f"{100 * point['accuracy']:.1f}"
    if scores := point.get("scores"):
        return f"{next(iter(scores.values())):.3f}"
    loss = point["loss"]
    if not document["text"]:
        return f"{loss:.3f}"
    if loss >= 700:
        return f"e^{loss:.0f}"
    figure = math.exp(loss)  # perplexity in at most eight characters
    return f"{figure:.1f}" if figure < 1_000 else f"{figure:,.0f}" if figure < 100_000 else f"{figure:.1e}"
