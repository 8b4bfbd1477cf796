"""What samples of the model's own are worth beside few of the user's."""

from __future__ import annotations

from dataclasses import replace

import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.data.mixed import mix_sources
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.transfer import apply
from tests.support.methods import with_method
from tests.surgery.test_calibrate import error, trained  # noqa: F401 (a fixture)


def test_a_result_of_few_odd_samples_is_good_elsewhere(trained, tmp_path):  # noqa: F811
    """Four rows of one token over and over against the rule that the model was trained on."""
    folder, held = trained("bert")
    odd = [{"input_ids": torch.full((2, 16), 7 + i), "attention_mask": torch.ones(2, 16).long()} for i in range(3)]
    plain = [{k: v for k, v in batch.items() if k != "labels"} for batch in held.fit]
    own = Calibration("own", "own", "own", plain[:12], plain[12:18], plain[18:20])
    yours = Calibration("odd", "odd", "odd", odd[:2], odd[2:], odd[2:])
    steps, wrong = plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True), {}
    for name, data in (("alone", yours), ("mixed", mix_sources([yours, own]))):
        outcome = calibrate(with_method(steps), data)
        (tmp_path / name).mkdir()
        apply(replace(steps, layers=outcome.record.layers), tmp_path / name, outcome.edits)
        wrong[name] = error(tmp_path / name, folder, held)
        outcome.close()
    assert wrong["mixed"] < 0.9 * wrong["alone"]
