"""`shrink` without data: samples that the model makes itself choose and heal; where it cannot, the weights alone."""

from __future__ import annotations

import numpy as np
import pytest

from leansurgeon.errors import Diverged
from leansurgeon.measure.data import own
from leansurgeon.measure.data.calibration import Parts
from tests.cli.answers import read, stderr_of, typed, works
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

    def run(family, line="", reads=None, **changes):
        if family in FAMILIES:
            build(family, **changes).save_pretrained(tmp_path / family)
        else:
            small_model(family, tmp_path / family, **changes)
        if reads:  # the tokenizer knows the words of this novel
            word_tokenizer(tmp_path / family)
            monkeypatch.setattr(own, "NOVEL", str(reads))
            monkeypatch.setattr("leansurgeon.tasks.text.files.PROSE", str(reads))
        done = works(f"shrink {tmp_path}/{family} -o {tmp_path}/out {line}")
        file = tmp_path / "out" / "surgery.json"
        return done, read(file) if file.exists() else {}

    return run


@pytest.mark.parametrize(("family", "what"), [("gpt2", "texts"), ("vit", "noise")])
def test_a_model_is_calibrated_on_what_it_makes(family, what, shrink):
    done, record = shrink(family, "--layers 3")
    used = record["decided"]["calibration"]
    assert used["name"] == "own" and what in used["says"] and used["samples"]["fit"] == 8
    assert len(record["decided"]["candidates"]) > 1 and record["plan"]["calibrated"]
    assert what in done.stderr and record["proof"]["compared"]["data"] == "held-out data"


@pytest.fixture
def novel(tmp_path):
    rng = np.random.default_rng(0)
    lines = (" ".join(rng.choice(WORDS, rng.integers(12, 31))) for _ in range(400))
    (tmp_path / "novel.txt").write_text("\n".join(lines))
    return tmp_path / "novel.txt"


@pytest.mark.parametrize(("family", "what"), [("t5", "spans hidden in a novel"), ("gpt2", "random tokens")])
def test_where_nothing_is_made_what_comes_along_is_taken(family, what, shrink, novel, monkeypatch):
    monkeypatch.setitem(own.WORK, "cpu", 1.0)  # too long to write in
    done, record = shrink(family, "--layers 3 --heal none", reads="novel" in what and novel)
    used, said = record["decided"]["calibration"], stderr_of(done)
    assert what in used["says"] and what in said and "cannot make samples of its own" in said
    assert record["plan"]["calibrated"] and record["decided"]["decisions"]
    scores = [c for c in record["decided"]["candidates"] if "guard_divergence" in c]
    assert len(scores) == len(record["decided"]["candidates"]) > 0  # predictions judge


def test_a_tower_without_data_is_calibrated_alone(shrink):
    done, record = shrink("clip", "--tower text --layers 1", architectures=["CLIPModel"])
    used = record["decided"]["calibration"]
    assert used["name"] == "own" and "random tokens" in used["says"] and "random tokens" in done.stderr
    assert record["plan"]["calibrated"] and record["decided"]["decisions"]


def test_own_samples_that_are_asked_for_and_cannot_be_made_are_an_error(tmp_path):
    build("t5").save_pretrained(tmp_path / "t5")
    done = typed(f"shrink {tmp_path}/t5 --layers 3 --calibrate own -o {tmp_path}/out")
    assert done.returncode == 2 and "cannot make samples of its own" in stderr_of(done)
    assert not (tmp_path / "out").exists()


def test_a_failed_calibration_on_own_samples_is_no_failed_cut(shrink, monkeypatch):
    def fails(*_, **__):
        raise Diverged("The activations hold NaN.")

    monkeypatch.setattr("leansurgeon.surgery.calibrate.calibrate", fails)
    done, record = shrink("gpt2", "--layers 3")
    assert record["plan"]["layers"] == [0, 1, 3] and "The activations hold NaN." in done.stderr


def test_nothing_is_made_where_nothing_is_open(shrink, monkeypatch):
    monkeypatch.setattr(own, "samples", lambda *_, **__: 1 / 0)
    assert not shrink("gpt2", "--heads 8 --head-dim keep --no-proof")[1]["plan"]["calibrated"]
    listed = shrink("gpt2", "--keep 0,2 --heal none --no-proof --force")[1]
    assert listed["plan"]["layers"] == [0, 2]
    asked = shrink("gpt2", "--layers 3 --uncalibrated --no-proof --force")[1]
    assert asked["plan"]["layers"] == [0, 1, 3] and not asked["plan"]["calibrated"] and not asked["decided"]
    done, _ = shrink("gpt2", "--layers 2 --dry-run --force")
    assert "dry run" in done.stderr.lower()
