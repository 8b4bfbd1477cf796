"""Importance of heads as a map, and the score as heads go, of what `leansurgeon heads` has found."""

from __future__ import annotations

from leansurgeon.report.charts.forms import Chart, Point, Series, cells, lines
from leansurgeon.report.charts.scales import PERCENT, PLAIN, Axis
from leansurgeon.report.evidence.studies import AttentionHeads, HeadStudy

KINDS = {"self": "self-attention", "encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
ORDERS = {
    "importance": "least important first",
    "reverse": "most important first",
}


def head_charts(study: HeadStudy, name: str = "", key: str = "") -> list[Chart]:
    """A map for every kind of attention, and the pruning curve; `name` begins the titles and `key` the file names."""
    said = f"{name}: " if name else ""
    return [*maps(study, said, key), *off_curve(study, said, key)]


def maps(study: HeadStudy, name: str, key: str) -> list[Chart]:
    """A map for every kind of attention of a model (encoder, decoder, cross), its layers from top to bottom."""
    kinds: dict[str, list[AttentionHeads]] = {}
    for attention in study.attentions:
        if attention.importance:
            kinds.setdefault(attention.kind, []).append(attention)
    stages = len({a.stage for a in study.attentions})
    says = "Mean slope of the loss by each head's gate, absolute per sample (Michel et al. 2019); fuller is larger."
    says += f" {study.samples['importance']:,} samples." if "importance" in study.samples else ""
    charts = []
    for kind, layers in kinds.items():
        rows = [(layer_name(a, stages), a.importance) for a in layers]
        drawing = cells(rows, "head", "layer")
        own = f"heads-{kind}" if len(kinds) > 1 else "heads-importance"
        charts.append(Chart(f"{key}{own}", f"{name}{KINDS.get(kind, kind)}", says, drawing))
    return charts


def layer_name(attention: AttentionHeads, stages: int) -> str:
    """A layer's number counted from 1, with its stage's before a dot where the model has several stages."""
    layer = str(attention.layer + 1)
    return f"{attention.stage + 1}.{layer}" if stages > 1 and attention.kind == "self" else layer


def off_curve(study: HeadStudy, name: str, key: str) -> list[Chart]:
    """The score as more and more heads are switched off, one line for every order."""
    series = []
    for i, (order, said) in enumerate(ORDERS.items()):
        points = [(point.fraction, getattr(point, study.score)) for point in study.curve.orders.get(order, ())]
        series.append(Series(said, tuple(Point(*at) for at in points if None not in at), i))
    labels = PERCENT if study.score == "accuracy" else PLAIN
    drawing = lines(series, Axis("share of heads off", PERCENT), Axis(study.score, labels))
    if drawing is None:
        return []
    says = "On held-out samples, without retraining."
    return [Chart(f"{key}heads-pruning", f"{name}heads switched off", says, drawing)]
