"""What a cut foretells of itself: its work is what a real cut counts, a limit of time is kept."""

from __future__ import annotations

import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery import forecast
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.context import CalibrationContext
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.support.methods import with_method
from tests.surgery.test_device import data


@pytest.mark.parametrize("heal", ["closed", "local"])
def test_the_work_is_what_a_cut_counts(heal, saved, monkeypatch):
    depth, tokens = 8, 16
    source = open_source(str(saved("gpt2", n_layer=depth)[0]))
    draws = torch.Generator().manual_seed(0)

    def batches(count):
        ids = (torch.randint(61, (4, tokens), generator=draws) for _ in range(count))
        return [{"input_ids": x, "labels": x} for x in ids]

    noise = Calibration("noise", "noise", "-", batches(8), batches(4), batches(1))
    trial = {"fit": 4 * 64, "guard": 2 * 64}
    monkeypatch.setattr("leansurgeon.surgery.calibrate.TRIAL", trial)
    monkeypatch.setattr("leansurgeon.surgery.forecast.TRIAL", trial)
    monkeypatch.setattr("leansurgeon.surgery.forecast.STEP_TOKENS", 64)  # a batch is a step
    steps = plan(source, RequestedShape(layers="6"), calibrated=True)
    outcome = calibrate(with_method(steps, heal), noise)
    outcome.close()
    found = {
        heal: forecast.forecast_cost(CalibrationContext(with_method(steps, heal), noise)).passes
        for heal in ("closed", "local")
    }
    took = outcome.record.passes
    if heal == "closed":
        assert found["closed"] == pytest.approx(took, rel=0.5)
    else:  # a span that gains nothing grows no further
        assert found["closed"] < took < found["local"]


def test_a_limit_of_time_for_healing_is_foretold(saved, monkeypatch):
    """Where a token through a block takes a quarter of an hour, the local fit takes days; an hour of it is foretold."""
    monkeypatch.setattr("leansurgeon.surgery.forecast.time_block", lambda context: 1e-3)
    steps = plan(open_source(str(saved("gpt2")[0])), RequestedShape(layers="3"), calibrated=True)
    limits = {"closed": None, "none": 0.0, "hour": 3600.0, "whole": None, "enough": 1e15}
    foretold = {
        name: forecast.forecast_cost(
            CalibrationContext(
                with_method(steps, "closed" if name == "closed" else "local", heal_time=limit), data("gpt2")
            )
        )
        for name, limit in limits.items()
    }
    closed, none, hour, whole, enough = foretold.values()
    assert whole.seconds - closed.seconds > 3600 and enough == whole
    assert none.passes == pytest.approx(closed.passes) and none.passes < hour.passes < whole.passes
    assert hour.seconds == pytest.approx(none.seconds + 3600)
