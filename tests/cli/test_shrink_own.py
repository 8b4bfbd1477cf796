"""`shrink` without data: samples that the model makes itself choose and heal; where it cannot, the weights alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from leansurgeon.cli.main import app
from leansurgeon.errors import Diverged
from leansurgeon.measure.data import own
from leansurgeon.measure.data.parts import Parts
from tests.conftest import build


@pytest.fixture
def shrink(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "WINDOWS", Parts(8, 4, 4))
    monkeypatch.setattr(own, "LINES", Parts(8, 4, 4))

    def run(family, *words, **changes):
        build(family, **changes).save_pretrained(tmp_path / family)
        done = CliRunner().invoke(app, ["shrink", str(tmp_path / family), "-o", str(tmp_path / "out"), *words])
        assert done.exit_code == 0, done.output
        file = tmp_path / "out" / "surgery.json"
        return done, json.loads(file.read_text()) if file.exists() else {}

    return run


@pytest.mark.parametrize(("family", "what"), [("gpt2", "texts"), ("vit", "noise")])
def test_a_model_is_calibrated_on_what_it_makes(family, what, shrink):
    done, record = shrink(family, "--layers", "3")
    used = record["decided"]["calibration"]
    assert used["name"] == "own" and what in used["says"] and used["samples"]["fit"] == 8
    assert len(record["decided"]["candidates"]) > 1 and record["plan"]["calibrated"]
    assert what in done.stderr and record["proof"]["compared"]["data"] == "held-out data"


def test_the_weights_alone_decide_where_asked_or_where_nothing_can_be_made(shrink):
    for words, family in ((("--uncalibrated",), "gpt2"), ((), "t5")):
        done, record = shrink(family, "--layers", "3", "--force", *words)
        kept = [0, 1, 3] if family == "gpt2" else [0, 1, 3, 4, 5, 7]
        assert record["plan"]["layers"] == kept and not record["plan"]["calibrated"] and not record["decided"]
    assert "an encoder and a decoder" in " ".join(done.stderr.split())


def test_a_failed_calibration_on_own_samples_is_no_failed_cut(shrink, monkeypatch):
    from leansurgeon.surgery.walk import calibrated

    def fails(*_, **__):
        raise Diverged("The activations hold NaN.")

    monkeypatch.setattr(calibrated, "calibrate", fails)
    done, record = shrink("gpt2", "--layers", "3")
    assert record["plan"]["layers"] == [0, 1, 3] and "The activations hold NaN." in done.stderr


def test_nothing_is_made_where_nothing_is_open(shrink, monkeypatch):
    monkeypatch.setattr(own, "samples", lambda *_, **__: 1 / 0)
    assert not shrink("gpt2", "--heads", "8", "--head-dim", "keep")[1]["plan"]["calibrated"]
    listed = shrink("gpt2", "--keep", "0,2", "--heal", "none", "--force")[1]
    assert np.array_equal(listed["plan"]["layers"], [0, 2])
    done, _ = shrink("gpt2", "--layers", "2", "--dry-run", "--force")
    assert "dry run" in done.stderr.lower()
