"""Own samples are mixed in until the guard on them is safe: the loop by hand, and what it is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leansurgeon.checkpoints.recorded.decided import Decisions, GuardScore, Healing
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.progress import silent
from leansurgeon.surgery.calibrate import SAFE, CalibrationResult, calibrate_safely
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.resume import ResumeState
from leansurgeon.surgery.transfer import apply
from tests.support.methods import with_method
from tests.surgery.test_calibrate import error, trained  # noqa: F401 (a fixture)


def windows(name: str, rows: int) -> Calibration:
    batches = [{"input_ids": torch.full((1, 8), 3)} for _ in range(rows)]
    return Calibration(name, name, name, batches, batches[:2], batches[:1])


@pytest.mark.parametrize(
    ("scores", "amounts", "is_safe"),
    [([1.04], [0], True), ([2.0, 1.2, 1.05], [0, 4, 16], True), ([9, 8, 7, 6], [0, 4, 16, 32], False)],
)
def test_own_samples_are_added_until_they_are_safe(scores, amounts, is_safe, monkeypatch, tmp_path):
    closed, places = [], []

    def calibrate(steps, data, say, device, state):
        score = 1.0 if not places else scores[len(places) - 1]
        places.append(state.folder.name)
        scored = Healing(False, False, GuardScore(by_source=(0.5, score)))
        outcome = CalibrationResult({}, Decisions(healing=scored, passes=2.0, tokens=100))
        outcome.held.callback(closed.append, score)
        return outcome

    monkeypatch.setattr("leansurgeon.surgery.calibrate.calibrate", calibrate)
    data = replace(windows("yours", 4), beside=windows("own", 32))
    outcome, used = calibrate_safely(None, data, silent, "cpu", ResumeState(tmp_path / "kept", "key"))
    rounds = outcome.record.mixing.rounds
    assert [r.own for r in rounds] == amounts and [r.on_own for r in rounds] == scores
    assert outcome.record.mixing.safe is is_safe
    assert len(used.fit) == 4 + amounts[-1] and closed == [1.0, *scores[:-1]]  # the last one stays
    assert outcome.record.passes == 2.0 * len(places)  # of all cuts
    assert places == ["own", *(f"mix-{n}" for n in amounts)]


def test_a_result_of_few_odd_samples_is_good_elsewhere(trained, tmp_path):  # noqa: F811
    """Four rows of one token over and over against the rule that the model was trained on."""
    folder, held = trained("bert")
    odd = [{"input_ids": torch.full((2, 16), 7 + i), "attention_mask": torch.ones(2, 16).long()} for i in range(3)]
    plain = [{k: v for k, v in batch.items() if k != "labels"} for batch in held.fit]
    own = Calibration("own", "own", "own", plain[:12], plain[12:18], plain[18:20])
    yours = Calibration("odd", "odd", "odd", odd[:2], odd[2:], odd[2:])
    steps, wrong = plan(open_source(str(folder)), RequestedShape(layers="3"), calibrated=True), {}
    for name, beside in (("alone", None), ("mixed", own)):
        outcome, used = calibrate_safely(
            with_method(steps), replace(yours, beside=beside), silent, "cpu", ResumeState()
        )
        (tmp_path / name).mkdir()
        apply(replace(steps, layers=outcome.record.layers), tmp_path / name, outcome.edits)
        wrong[name] = error(tmp_path / name, folder, held)
        outcome.close()
    assert wrong["mixed"] < 0.9 * wrong["alone"]
    mixing = outcome.record.mixing
    assert mixing.rounds[0].own == 0 and mixing.rounds[0].on_own > SAFE * mixing.own_alone
    assert [s.name for s in used.sources] == ["odd", "own"]
