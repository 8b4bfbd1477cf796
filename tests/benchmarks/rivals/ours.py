"""The calibrated cut of this package, on the same tokens as its rivals."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import Source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import carry_out, decide


def ours(source: Source, data: Calibration, layers: int, heal: str, device: str = "cpu") -> tuple[nn.Module, dict]:
    """The result of `shrink --layers N --calibrate DATA --heal closed|local`, and its layers and passes."""
    return shrunk(source, data, RequestedShape(layers=str(layers)), Method(heal=heal), device)


def more_heads(source: Source, data: Calibration, heads: str, more: str) -> nn.Module:
    """The result of `shrink --heads N --head-dim keep --more-heads add|split`: equal shapes, equal functions."""
    return shrunk(source, data, RequestedShape(heads=heads, head_dim="keep"), Method(more=more))[0]


def shrunk(
    source: Source, data: Calibration, wanted: RequestedShape, method: Method, device: str = "cpu"
) -> tuple[nn.Module, dict]:
    """The model, and what is known of its layers and passes."""
    steps = plan(source, wanted, 0, method, calibrated=True)
    with tempfile.TemporaryDirectory() as place:
        decided = decide(steps, data, device=device)
        carry_out(decided, Path(place) / "cut", check=False)
        walked = decided.record.as_dict()
        told = {key: walked[key] for key in ("layers", "passes") if key in walked}
        return load(Path(place) / "cut").model.eval(), told
