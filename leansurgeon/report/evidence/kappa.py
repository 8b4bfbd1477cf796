"""Kappa of an arm, from what measuring left in the summaries of its seeds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from leansurgeon.measure.kappa.figures import ceiling
from leansurgeon.reading.jsonfile import Json, JsonObject, value_at
from leansurgeon.reading.values import number, objects, text, whole
from leansurgeon.report.humans import spread

# Condition numbers of weights, by their keys in a summary: those of the matrices as they stand depend on the basis of
# every head, those of the products do not.
MATRICES, PRODUCTS = ("q", "k", "v", "o"), ("vo", "qk")


@dataclass(frozen=True)
class Bound:
    """A figure, or (with `exact` false) a number that the true figure reaches or exceeds."""

    value: float
    exact: bool = True


@dataclass(frozen=True)
class LayerKappa:
    """Conditioning of one layer, averaged over seeds; `layer` counts from 1, `rank` (of `k`) is the least of a seed.

    `output` (A W_o), `jacobian` and the products among `weights` are what a change of basis cannot move.
    """

    layer: int
    mean: Bound | None
    median: Bound | None
    worst: Bound | None
    centred: Bound | None
    rank: float | None
    k: float | None
    deficient: int
    stable_rank: float | None
    effective_rank: float | None
    aspect: float | None
    output: Bound | None = None
    jacobian: Bound | None = None
    weights: dict[str, Bound | None] | None = None


@dataclass(frozen=True)
class Kappa:
    """Conditioning of a model: means over layers as `measure.kappa` defines them, and the layers themselves."""

    mean: Bound | None
    median: Bound | None
    worst: Bound | None
    centred: Bound | None
    deficient: int
    samples: int
    dtype: str
    layers: tuple[LayerKappa, ...]

    @property
    def poorest(self) -> LayerKappa | None:
        """The layer whose rank lacks most."""
        known = [layer for layer in self.layers if layer.rank is not None and layer.k is not None]
        return max(known, key=lambda layer: layer.k - layer.rank, default=None)

    @property
    def output(self) -> Bound | None:
        """Median over layers of the kappa of A W_o."""
        return _median_bound([layer.output for layer in self.layers])

    @property
    def jacobian(self) -> Bound | None:
        """Median over layers of the bound on the kappa of the block's Jacobian."""
        return _median_bound([layer.jacobian for layer in self.layers])


def kappa_of(measured: list[Any]) -> Kappa | None:
    """Kappa of one arm: the mean over its seeds, layer by layer."""
    measured = [k for k in measured if isinstance(value_at(k, "layers"), list) and objects([k.get("model")])]
    if not measured:
        return None
    dtype = text(measured[0].get("forward_dtype"))
    limit = ceiling(dtype)

    def over(parts: list[Any], key: str, bound: str) -> Bound | None:
        """The mean over runs of a figure; a lower bound only, where it exceeds what the dtype can tell."""
        merged = _mean_bound([(number(value_at(part, key)), number(value_at(part, bound))) for part in parts])
        return Bound(merged.value, False) if merged and limit and merged.value > limit else merged

    def figures(parts: list[Any], deficient: int) -> dict[str, Bound | None]:
        """What is said of the whole model and of every layer."""
        return {
            "mean": _at_least(over(parts, "mean", "median_lower_bound"), deficient),
            "median": over(parts, "median", "median_lower_bound"),
            "worst": over(parts, "worst", "lower_bound"),
            "centred": over(parts, "centred_median", "centred_lower_bound"),
        }

    def layer(i: int) -> LayerKappa:
        """Layer `i`'s figures, averaged over the runs that have such a layer."""
        parts = [k["layers"][i] if len(k["layers"]) > i else None for k in measured]
        deficient = sum(whole(value_at(part, "deficient")) or 0 for part in parts)
        ranks = [(number(value_at(part, "rank")), number(value_at(part, "k"))) for part in parts]
        poorest = min((r for r in ranks if None not in r), default=(None, None))
        plain = ("stable_rank", "effective_rank", "aspect")
        known = {key: spread(number(value_at(part, key)) for part in parts) for key in plain}
        return LayerKappa(
            layer=i + 1,
            **figures(parts, deficient),
            rank=poorest[0],
            k=poorest[1],
            deficient=deficient,
            **{key: value and value.mean for key, value in known.items()},
            output=over([value_at(part, "output") for part in parts], "median", "median_lower_bound"),
            jacobian=_jacobian([value_at(part, "jacobian") for part in parts]),
            weights={w: _figure([value_at(part, "weights", w) for part in parts]) for w in (*MATRICES, *PRODUCTS)},
        )

    layers = tuple(layer(i) for i in range(len(measured[0]["layers"])))
    deficient = sum(layer.deficient for layer in layers)
    return Kappa(
        **figures([k["model"] for k in measured], deficient),
        deficient=deficient,
        samples=whole(measured[0].get("samples")) or 0,
        dtype=dtype,
        layers=layers,
    )


def _at_least(mean: Bound | None, deficient: int) -> Bound | None:
    """A mean that leaves `deficient` samples out, each of which is worse than any that it counts."""
    return Bound(mean.value, False) if mean and deficient else mean


def _mean_bound(values: list[tuple[float | None, float | None]]) -> Bound | None:
    """Mean of figures of which some may only be known to be at least a bound; None when a seed has neither."""
    known = [bound if value is None else value for value, bound in values]
    if not known or any(v is None for v in known):
        return None
    return Bound(fmean(known), all(value is not None for value, _ in values))


def _figure(measured: list[Any]) -> Bound | None:
    """A figure of the weights, which no forward pass has anything to do with."""
    return _mean_bound([(number(value_at(f, "value")), number(value_at(f, "lower_bound"))) for f in measured])


def _jacobian(measured: list[Any]) -> Bound | None:
    merged = _mean_bound([(number(value_at(f, "at_least")), None) for f in measured])
    return Bound(merged.value, all(value_at(f, "exact") is True for f in measured)) if merged else None


def _median_bound(bounds: list[Bound | None]) -> Bound | None:
    """Median over layers that have it (cross-attention has no Jacobian of one input); a bound where one of them is."""
    known = [bound for bound in bounds if bound]
    return Bound(median(b.value for b in known), all(b.exact for b in known)) if known else None


def as_dict(kappa: Kappa | None) -> JsonObject | None:
    """Everything for a program; bounds become `{"value": null, "lower_bound": x}`."""
    if kappa is None:
        return None

    def plain(value: Bound | Json) -> Any:
        """Dicts and values as JSON takes them: an exact bound fills `value`, another one `lower_bound`."""
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if not isinstance(value, Bound):
            return value
        return (
            {"value": value.value, "lower_bound": None} if value.exact else {"value": None, "lower_bound": value.value}
        )

    out = {key: plain(value) for key, value in kappa.__dict__.items() if key != "layers"}
    out |= {"output": plain(kappa.output), "jacobian": plain(kappa.jacobian)}
    return out | {"layers": [{key: plain(value) for key, value in layer.__dict__.items()} for layer in kappa.layers]}
