"""`shrink` without data: samples that the model makes itself choose and heal; where it cannot, the weights alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from leansurgeon.cli.main import app
from leansurgeon.errors import Diverged, UsageError
from leansurgeon.measure.data import own
from leansurgeon.measure.data.calibration import Parts
from leansurgeon.surgery.local_fit import TimeLimit
from tests.conftest import FAMILIES, build
from tests.support.models.undeclared import small_model
from tests.support.models.word_models import WORDS
from tests.support.models.word_models import words as word_tokenizer


@pytest.fixture
def shrink(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "WINDOWS", Parts(8, 4, 4))
    monkeypatch.setattr(own, "LINES", Parts(8, 4, 4))
    monkeypatch.setattr(own, "PROSE_LINES", Parts(8, 4, 4))
    monkeypatch.setattr(own, "PAIRS", Parts(8, 4, 4))

    def run(family, *words, reads=None, **changes):
        if family in FAMILIES:
            build(family, **changes).save_pretrained(tmp_path / family)
        else:
            small_model(family, tmp_path / family, **changes)
        if reads:  # the tokenizer knows the words of this novel
            word_tokenizer(tmp_path / family)
            monkeypatch.setattr(own, "NOVEL", str(reads))
            monkeypatch.setattr("leansurgeon.tasks.text.files.PROSE", str(reads))
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


def test_the_weights_alone_decide_where_asked(shrink):
    _, record = shrink("gpt2", "--layers", "3", "--uncalibrated")
    assert record["plan"]["layers"] == [0, 1, 3] and not record["plan"]["calibrated"] and not record["decided"]


@pytest.fixture
def novel(tmp_path):
    rng = np.random.default_rng(0)
    lines = (" ".join(rng.choice(WORDS, rng.integers(12, 31))) for _ in range(400))
    (tmp_path / "novel.txt").write_text("\n".join(lines))
    return tmp_path / "novel.txt"


@pytest.mark.parametrize(
    ("family", "what"),
    [("t5", "random tokens"), ("t5", "spans hidden in a novel"), ("gpt2", "random tokens"), ("gpt2", "a novel")],
)
def test_where_nothing_is_made_what_comes_along_is_taken(family, what, shrink, novel, monkeypatch):
    monkeypatch.setitem(own.WORK, "cpu", 1.0)  # too long to write in
    done, record = shrink(family, "--layers", "3", reads="novel" in what and novel)
    used, said = record["decided"]["calibration"], " ".join(done.stderr.split())
    assert what in used["says"] and what in said and "cannot make samples of its own" in said
    assert record["plan"]["calibrated"] and record["decided"]["decisions"]
    scores = [c for c in record["decided"]["candidates"] if "guard_divergence" in c]
    assert len(scores) == len(record["decided"]["candidates"]) > 0  # predictions judge


@pytest.mark.parametrize(("tower", "what"), [("vision", "noise"), ("text", "random tokens")])
def test_a_tower_without_data_is_calibrated_alone(tower, what, shrink):
    done, record = shrink("clip", "--tower", tower, "--layers", "1", architectures=["CLIPModel"])
    used = record["decided"]["calibration"]
    assert used["name"] == "own" and what in used["says"] and what in done.stderr
    assert record["plan"]["calibrated"] and record["decided"]["decisions"]


def test_own_samples_that_are_asked_for_and_cannot_be_made_are_an_error(tmp_path):
    build("t5").save_pretrained(tmp_path / "t5")
    call = ["shrink", str(tmp_path / "t5"), "--layers", "3", "--calibrate", "own", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, call)
    assert isinstance(done.exception, UsageError) or done.exit_code == 2, done.output
    assert not (tmp_path / "out").exists()


def test_own_samples_are_made_on_the_device(shrink, monkeypatch):
    places, texts = [], own.texts

    def noted(source, seed, device, say):
        places.append(device)
        return texts(source, seed, "cpu", say)

    monkeypatch.setattr(own, "texts", noted)
    monkeypatch.setattr("leansurgeon.measure.device.choose_device", lambda asked: "cpu:0")
    shrink("gpt2", "--layers", "3", "--calibrate", "own")
    assert places == ["cpu:0"]


def test_the_local_fit_has_the_time_that_is_asked_for(shrink, monkeypatch):
    asked = []

    def over(seconds):
        asked.append(seconds)
        return TimeLimit(0.0)  # gone at once

    monkeypatch.setattr("leansurgeon.surgery.spans.TimeLimit", over)
    _, record = shrink("gpt2", "--keep", "0,1,3", "--calibrate", "own", "--heal-time", "1.5m")
    (cut,) = record["decided"]["healing"]["local"]["cuts"]
    assert asked == [90.0] and [(span["steps"], span["kept"]) for span in cut["spans"]] == [(0, False)]


def test_a_failed_calibration_on_own_samples_is_no_failed_cut(shrink, monkeypatch):

    def fails(*_, **__):
        raise Diverged("The activations hold NaN.")

    monkeypatch.setattr("leansurgeon.surgery.calibrate.calibrate", fails)
    done, record = shrink("gpt2", "--layers", "3")
    assert record["plan"]["layers"] == [0, 1, 3] and "The activations hold NaN." in done.stderr


def test_nothing_is_made_where_nothing_is_open(shrink, monkeypatch):
    monkeypatch.setattr(own, "samples", lambda *_, **__: 1 / 0)
    assert not shrink("gpt2", "--heads", "8", "--head-dim", "keep")[1]["plan"]["calibrated"]
    listed = shrink("gpt2", "--keep", "0,2", "--heal", "none", "--force")[1]
    assert np.array_equal(listed["plan"]["layers"], [0, 2])
    done, _ = shrink("gpt2", "--layers", "2", "--dry-run", "--force")
    assert "dry run" in done.stderr.lower()
