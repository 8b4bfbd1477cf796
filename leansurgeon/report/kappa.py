"""Kappa of an arm, from the measurements in the summaries of its seeds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from leansurgeon.reading.jsonfile import Json, value_at
from leansurgeon.reading.values import number, objects, text, whole
from leansurgeon.report.humans import Spread, spread

# Condition numbers of weights, by their keys in a summary: those of the matrices themselves depend on the basis of
# every head, those of the products do not.
MATRICES, PRODUCTS = ("q", "k", "v", "o"), ("vo", "qk")


@dataclass(frozen=True)
class Bound:
    """A value or, with `exact` false, a lower bound of it."""

    value: float
    exact: bool = True


@dataclass(frozen=True)
class LayerKappa:
    """Conditioning of one layer, averaged over seeds; `layer` counts from 1, `rank` (of `k`) is the least of a seed.

    `output` (A W_o), `jacobian` and the products among `weights` are invariant under a change of basis.
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
    """Conditioning of a model: means over layers as `measure.kappa` defines them, and the layers. `output` and
    `jacobian` are medians over layers (cross-attention has no Jacobian of one input).
    """

    mean: Bound | None
    median: Bound | None
    worst: Bound | None
    centred: Bound | None
    deficient: int
    samples: int
    dtype: str
    output: Bound | None
    jacobian: Bound | None
    layers: tuple[LayerKappa, ...]

    @property
    def poorest(self) -> LayerKappa | None:
        """The layer with the largest rank deficiency."""
        known = [layer for layer in self.layers if layer.rank is not None]
        return max(known, key=lambda layer: layer.k - layer.rank, default=None)


def kappa_of(measured: list[Any]) -> Kappa | None:
    """Return the kappa of one arm: the mean over its seeds, layer by layer."""
    measured = [k for k in measured if isinstance(value_at(k, "layers"), list) and objects([k.get("model")])]
    if not measured:
        return None

    def figures(parts: list[Any], deficient: int) -> dict[str, Bound | None]:
        """Return the values of the model or of a layer."""
        mean = average(parts, "mean", "median_lower_bound")
        return {
            # The mean excludes deficient samples, each of which is worse than any that it includes.
            "mean": Bound(mean.value, False) if mean and deficient else mean,
            "median": average(parts, "median", "median_lower_bound"),
            "worst": average(parts, "worst", "lower_bound"),
            "centred": average(parts, "centred_median", "centred_lower_bound"),
        }

    def layer(i: int) -> LayerKappa:
        """Return layer `i`'s values, averaged over the runs that have such a layer."""
        parts = [k["layers"][i] if len(k["layers"]) > i else None for k in measured]
        deficient = sum(whole(value_at(part, "deficient")) or 0 for part in parts)
        ranks = [(number(value_at(part, "rank")), number(value_at(part, "k"))) for part in parts]
        rank, k = min((r for r in ranks if None not in r), default=(None, None))
        plain = {
            key: (found := spread(number(value_at(part, key)) for part in parts)) and found.mean
            for key in ("stable_rank", "effective_rank", "aspect")
        }
        jacobian = average(parts, "at_least", "", "jacobian")
        exact = all(value_at(part, "jacobian", "exact") is True for part in parts)
        return LayerKappa(
            layer=i + 1,
            **figures(parts, deficient),
            rank=rank,
            k=k,
            deficient=deficient,
            **plain,
            output=average(parts, "median", "median_lower_bound", "output"),
            jacobian=jacobian and Bound(jacobian.value, exact),
            weights={key: average(parts, "value", "lower_bound", "weights", key) for key in (*MATRICES, *PRODUCTS)},
        )

    layers = tuple(layer(i) for i in range(len(measured[0]["layers"])))
    deficient = sum(layer.deficient for layer in layers)
    return Kappa(
        **figures([k["model"] for k in measured], deficient),
        deficient=deficient,
        samples=whole(measured[0].get("samples")) or 0,
        dtype=text(measured[0].get("forward_dtype")),
        output=middle([layer.output for layer in layers]),
        jacobian=middle([layer.jacobian for layer in layers]),
        layers=layers,
    )


def average(parts: list[Any], value: str, bound: str, *path: str) -> Bound | None:
    """Return the mean over runs of a value at the end of a path; a lower bound if one of them is. None if a run has
    neither a value nor a bound.
    """
    known = [(number(value_at(part, *path, value)), number(value_at(part, *path, bound))) for part in parts]
    values = [lower if exact is None else exact for exact, lower in known]
    if not values or None in values:
        return None
    return Bound(fmean(values), all(exact is not None for exact, _ in known))


def middle(bounds: list[Bound | None]) -> Bound | None:
    """Return the median over the layers that have it; a bound if one of them is."""
    known = [bound for bound in bounds if bound]
    return Bound(median(b.value for b in known), all(b.exact for b in known)) if known else None


def as_dict(kappa: Kappa | LayerKappa | Bound | Spread | Json) -> Json:
    """Return everything as JSON values; bounds become `{"value": null, "lower_bound": x}`."""
    if isinstance(kappa, Bound):
        return {"value": None, "lower_bound": None} | {"value" if kappa.exact else "lower_bound": kappa.value}
    if isinstance(kappa, tuple):
        return [as_dict(layer) for layer in kappa]
    items = kappa if isinstance(kappa, dict) else getattr(kappa, "__dict__", None)
    return kappa if items is None else {key: as_dict(value) for key, value in items.items()}
