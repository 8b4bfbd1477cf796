"""The calibrated cut of this package, on the same tokens as its rivals."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import Source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import carry_out, decide


def ours(source: Source, data: Calibration, layers: int, heal: str) -> tuple[nn.Module, dict]:
    """The result of `shrink --layers N --calibrate DATA --heal closed|local`, and its layers and passes."""
    steps = plan(source, Wanted(layers=str(layers)), 0, Method(heal=heal), calibrated=True)
    with tempfile.TemporaryDirectory() as place:
        decided = decide(steps, data)
        carry_out(decided, Path(place) / "cut", check=False)
        told = {key: decided.record[key] for key in ("layers", "passes")}
        return load(Path(place) / "cut").model.eval(), told
