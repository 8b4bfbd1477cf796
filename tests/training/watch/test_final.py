"""The summary stands before anything is measured; measures are bounded, and the first Ctrl-C ends them."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from leansurgeon.training.loop import train
from leansurgeon.training.processes.signals import TimeUp, until
from tests.support.training_standin import Dots, dot_model, recipe


def run(folder, monkeypatch, kappa, **settings):
    from leansurgeon.training import measures

    monkeypatch.setattr(measures, "_kappa", kappa)
    said = []
    wanted = recipe(**settings).model_copy(update={"measure": measure()})
    found = train(
        wanted, folder / "no-model", folder / "run", loaded=dot_model(), task=Dots(), cpu=True, say=said.append
    )
    return found.as_dict(), said


def measure():
    from leansurgeon.training.recipe.schema import Measure

    return Measure()


def test_the_summary_stands_before_measures_and_ctrl_c_costs_no_result(tmp_path, monkeypatch):
    seen = {}

    def kappa(run, export, wanted):
        seen.update(json.loads((run.folder / "summary.json").read_text()))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    start = time.monotonic()
    found, said = run(tmp_path, monkeypatch, kappa)
    assert time.monotonic() - start < 15
    assert seen["status"] == "done" and seen["final"] == found["final"] and found["kappa"] is None
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == json.loads(json.dumps(found))
    assert any("kappa" in line and "Ctrl-C" in line for line in said)


def test_what_was_measured_is_in_the_summary(tmp_path, monkeypatch):
    found, _ = run(tmp_path, monkeypatch, lambda run, export, wanted: {"model": {"median": 3.0}})
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["kappa"] == kept["kappa"] == {"model": {"median": 3.0}}


def test_a_measure_that_takes_too_long_is_left_out():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    with pytest.raises(TimeUp), until(0.05):
        time.sleep(20)
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
