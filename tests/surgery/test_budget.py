"""Passes of a calibrated cut: counted as they were foretold, and within their bounds in every family."""

import re

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.data.pairs import Seq2Seq
from leansurgeon.report.tables.cut import decided_table
from leansurgeon.surgery.budget import ALL, CHOICE
from leansurgeon.surgery.calibrate import calibrate, compete, run_candidates
from leansurgeon.surgery.candidates import Candidate
from leansurgeon.surgery.context import PARTS, CalibrationContext, SampleView
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.support.methods import with_method
from tests.surgery.test_calibrate import image_batches, text_batches
from tests.surgery.test_encoder_decoder import pairs

DEEP = {"gpt2": {"n_layer": 8}, "bert": {"num_hidden_layers": 8}, "vit": {"num_hidden_layers": 6}, "t5": {}, "bart": {}}
CUTS = [
    ("vit", {"layers": "4"}),
    ("bart", {"layers": "2"}),
    ("gpt2", {"layers": "6", "mlp_dim": "24"}),
    pytest.param("gpt2", {"layers": "5"}, marks=pytest.mark.slow),
    pytest.param("bert", {"layers": "5"}, marks=pytest.mark.slow),
    pytest.param("t5", {"layers": "3"}, marks=pytest.mark.slow),
]


def samples(family: str) -> Calibration:
    def batches(count: int, seed: int) -> list:
        if family in ("t5", "bart"):
            return pairs(count, seed)
        return (image_batches if family == "vit" else text_batches)(count, seed, family)

    parts = {name: batches(n, seed) for name, n, seed in (("fit", 24, 2), ("guard", 8, 3), ("heldout", 1, 4))}
    return Calibration("tiny", "tiny", "-", **parts, task=Seq2Seq() if family in ("t5", "bart") else None)


@pytest.fixture
def passes(monkeypatch):
    """Passes behind choice and closed refit, by the bound on them, of every cut."""
    found = []

    def noted(context, *rest):
        best = compete(context, *rest)
        found.append((context.passes(), context.most_closed / context.one_pass))
        return best

    monkeypatch.setattr("leansurgeon.surgery.calibrate.compete", noted)
    return found


@pytest.mark.parametrize(("family", "wanted"), CUTS)
def test_cuts_stay_within_both_bounds(family, wanted, saved, passes, monkeypatch):
    monkeypatch.setattr("leansurgeon.surgery.context.LEAST", 0)
    source, data = open_source(str(saved(family, **DEEP[family])[0])), samples(family)
    steps, said = plan(source, RequestedShape(**wanted), calibrated=True), []
    spent = []
    for choice, whole in ((CHOICE, ALL), (2.0, 4.5)):
        monkeypatch.setattr("leansurgeon.surgery.context.CHOICE", choice)
        monkeypatch.setattr("leansurgeon.surgery.context.ALL", whole)
        outcome = calibrate(steps, data, said.append)
        outcome.close()
        closed, bound = passes.pop()
        on_top = "mlp_dim" in wanted  # layers that are made anew
        assert bound > choice if on_top else bound == pytest.approx(choice)
        assert 1 < closed <= bound + 1e-9 and closed <= outcome.record.passes <= whole
        spent.append(outcome.record.passes)
        assert all(words in decided_table(outcome.record).replace("\n", " ") for words in outcome.record.held_back)
        if left := re.search(r"(\d+) of (\d+) sets and ways", " ".join(outcome.record.held_back)):
            assert int(left[2]) - int(left[1]) == sum(one.data == "all" for one in outcome.record.candidates)
    assert spent[1] < spent[0]
    told = [line for line in said if line.startswith("About")]
    assert len(told) == 2 and source.name in told[0] and "passes" in told[1]


@pytest.mark.parametrize(("family", "kept"), [("gpt2", (0, 1, 2, 5, 6, 7)), ("bert", (0, 3, 4, 5)), ("vit", (0, 1, 4))])
def test_a_candidate_takes_what_was_said(family, kept, saved):
    source, data = open_source(str(saved(family, **DEEP[family])[0])), samples(family)
    steps = plan(source, RequestedShape(layers=str(len(kept))), calibrated=True)
    for way in (Candidate(kept, "as listed"), Candidate(kept, "", attention=True, later=True)):
        if (way.attention or way.later) and source.architecture.norm != "pre":
            continue
        here = CalibrationContext(with_method(steps, keep=kept), data)
        batches = {part: getattr(data, part) for part in PARTS}
        foretold = here.cost(way, batches)
        here = CalibrationContext(with_method(steps, keep=kept), data)
        with here.held:
            compete(here, SampleView.of(data, None), [way], "")
        assert here.work - here.one_pass == pytest.approx(foretold, rel=0.1)


def test_a_pass_of_two_stacks_is_what_their_blocks_see(saved):
    """An encoder and a decoder read texts of different lengths."""
    source, data = open_source(str(saved("t5")[0])), samples("t5")
    here = CalibrationContext(with_method(plan(source, RequestedShape(layers="3"), calibrated=True), "none"), data)
    whole = SampleView.of(data, None)
    run_candidates(here, whole, [], "")
    assert here.work == here.one_pass
    assert here.one_pass != 8 * sum(b["input_ids"].numel() for part in PARTS for b in getattr(data, part))


def test_little_data_costs_no_sets_of_layers(saved):
    source, data = open_source(str(saved("gpt2", **DEEP["gpt2"])[0])), samples("gpt2")
    steps = plan(source, RequestedShape(layers="5"), calibrated=True)
    outcome = calibrate(with_method(steps), data)
    outcome.close()
    assert outcome.record.passes > 3 and not outcome.record.held_back
