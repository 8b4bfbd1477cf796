"""Passes of a calibrated cut: counted as they were foretold, and within their bounds in every family."""

import re

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.report.tables.cut import decided_table
from leansurgeon.surgery import calibrate, context
from leansurgeon.surgery.context import CalibrationContext
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.support.methods import with_method
from tests.surgery.cuts import samples

DEEP = {"gpt2": {"n_layer": 8}, "bert": {"num_hidden_layers": 8}, "vit": {"num_hidden_layers": 6}, "t5": {}, "bart": {}}
SLOW = [("gpt2", {"layers": "6", "mlp_dim": "24"}), *((name, {"layers": "5"}) for name in ("gpt2", "bert"))]
SLOW += [("t5", {"layers": "3"}), ("bart", {"layers": "2"})]


@pytest.fixture
def planned(saved):
    """A plan with data, and the data."""

    def make(family, **wanted):
        source = open_source(str(saved(family, **DEEP[family])[0]))
        return plan(source, RequestedShape(**wanted), calibrated=True), samples(family, guard=8, heldout=1)

    return make


@pytest.fixture
def passes(monkeypatch):
    """Passes behind choice and closed refit, by the bound on them, of every cut."""
    found, compete = [], calibrate.compete

    def noted(here, *rest):
        best = compete(here, *rest)
        found.append((here.passes(), here.most_closed / here.one_pass))
        return best

    monkeypatch.setattr(calibrate, "compete", noted)
    return found


@pytest.mark.parametrize(
    ("family", "wanted"),
    [("vit", {"layers": "5", "mlp_dim": "24"}), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_cuts_stay_within_both_bounds(family, wanted, planned, passes, monkeypatch):
    monkeypatch.setattr(context, "LEAST", 0)
    steps, data = planned(family, **wanted)
    said, spent = [], []
    for choice, whole in ((context.CHOICE, context.ALL), (2.0, 4.5)):
        monkeypatch.setattr(context, "CHOICE", choice)
        monkeypatch.setattr(context, "ALL", whole)
        outcome = calibrate.calibrate(steps, data, said.append)
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
    assert len(told) == 2 and steps.source.name in told[0] and "passes" in told[1]


# -- foretold --------------------------------------------------------------------------------------


def test_the_work_is_what_a_cut_counts(planned, monkeypatch):
    trial = {"fit": 512, "guard": 256}
    monkeypatch.setattr(calibrate, "TRIAL", trial)
    steps, data = planned("gpt2", layers="6")
    outcome = calibrate.calibrate(with_method(steps), data)
    outcome.close()
    found = calibrate.forecast_cost(CalibrationContext(with_method(steps), data)).passes
    assert found == pytest.approx(outcome.record.passes, rel=0.5)


def test_a_limit_of_time_for_healing_is_foretold(planned, monkeypatch):
    """Where a token through a block takes a quarter of an hour, the local fit takes days; an hour of it is foretold."""
    monkeypatch.setattr(calibrate, "time_block", lambda context: 1.0)
    steps, data = planned("gpt2", layers="6")

    def foretell(heal, limit=None):
        return calibrate.forecast_cost(CalibrationContext(with_method(steps, heal, heal_time=limit), data))

    closed, whole = foretell("closed"), foretell("local")
    none, hour = (foretell("local", limit) for limit in (0.0, 3600.0))
    assert whole.seconds - closed.seconds > 3600 and foretell("local", 1e15) == whole
    assert none.passes == pytest.approx(closed.passes) and none.passes < hour.passes < whole.passes
    assert hour.seconds == pytest.approx(none.seconds + 3600)
