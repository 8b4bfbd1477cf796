"""Reads a Vega-Lite specification as its renderer would: which marks are drawn where, and in which colour.

Nothing of ours: a channel's value is that of the field it names, a colour that of its scale. So a chart that draws
another column, mixes up colours or leaves out its error bars shows it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

POSITIONS = ("x", "x2", "y", "y2")


@dataclass(frozen=True)
class Mark:
    """One mark: its channels as values of the data, or (where a scale has a range) as what the scale makes of them."""

    kind: str
    at: dict[str, Any]
    titles: dict[str, str | None]
    look: dict[str, Any]

    @property
    def xy(self) -> tuple[float, float]:
        return self.at["x"], self.at["y"]


def marks(spec: dict[str, Any], kind: str) -> list[Mark]:
    """All marks of a kind ("point", "line", "rule", "bar", "rect", "text", "area"), in the order of the data."""
    found = []
    for layer in spec["layer"]:
        look = layer["mark"] if isinstance(layer["mark"], dict) else {"type": layer["mark"]}
        if look["type"] != kind:
            continue
        encoding = layer["encoding"]
        titles = {channel: found.get("title") for channel, found in encoding.items()}
        for row in values(spec, layer):
            found.append(Mark(kind, {c: value(said, row) for c, said in encoding.items()}, titles, look))
    return found


def values(spec: dict[str, Any], layer: dict[str, Any]) -> list[dict[str, Any]]:
    data = layer.get("data") or spec["data"]
    return spec["datasets"][data["name"]] if "name" in data else data["values"]


def value(channel: dict[str, Any], row: dict[str, Any]) -> Any:
    if "value" in channel:
        return channel["value"]
    found = row[channel["field"]]
    scale = channel.get("scale") or {}
    if "range" in scale and channel["type"] == "nominal":
        return scale["range"][scale["domain"].index(found)]
    return found


def lines(spec: dict[str, Any]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Every line with its colour and its points."""
    found: dict[Any, tuple[str, list[tuple[float, float]]]] = {}
    for mark in marks(spec, "line"):
        found.setdefault(mark.at["detail"], (mark.at["color"], []))[1].append(mark.xy)
    return list(found.values())


def legend(spec: dict[str, Any]) -> dict[str, str]:
    """Names with the colours that stand beside them."""
    for layer in spec["layer"]:
        colour = layer["encoding"].get("color", {})
        if "scale" in colour:
            return dict(zip(colour["scale"]["domain"], colour["scale"]["range"], strict=True))
    return {}


def axis(spec: dict[str, Any], channel: str) -> dict[str, Any]:
    """The first layer's channel that has an axis."""
    return next(
        layer["encoding"][channel]
        for layer in spec["layer"]
        if layer["encoding"].get(channel, {}).get("axis") and "field" in layer["encoding"][channel]
    )
