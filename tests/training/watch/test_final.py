"""The summary stands before anything is measured; measures are bounded, and the first Ctrl-C ends them."""

import json
import os
import signal
import time

import pytest

from leansurgeon.training import measures
from leansurgeon.training.loop import train
from leansurgeon.training.processes.signals import TimeUp, until
from leansurgeon.training.recipe.schema import Measure
from tests.support.training_standin import Dots, dot_model, recipe


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_summary_stands_before_measures_and_ctrl_c_costs_no_result(interrupted, tmp_path, monkeypatch):
    file, seen, said = tmp_path / "run" / "summary.json", {}, []

    def kappa(run, export, wanted):
        seen.update(json.loads(file.read_text()))
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
            pytest.fail("Ctrl-C was not heard")
        return {"model": {"median": 3.0}}

    monkeypatch.setattr(measures, "_kappa", kappa)
    wanted = recipe().model_copy(update={"measure": Measure()})
    options = {"loaded": dot_model(), "task": Dots(), "cpu": True, "say": said.append}
    found = train(wanted, tmp_path / "no-model", tmp_path / "run", **options).as_dict()
    assert seen["status"] == "done" and seen["final"] == found["final"] and seen["kappa"] is None
    assert found["kappa"] == (None if interrupted else {"model": {"median": 3.0}})
    assert json.loads(file.read_text()) == json.loads(json.dumps(found))
    assert any("kappa" in line and "Ctrl-C" in line for line in said)


def test_a_measure_that_takes_too_long_is_left_out():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    with pytest.raises(TimeUp), until(0.05):
        time.sleep(20)
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
