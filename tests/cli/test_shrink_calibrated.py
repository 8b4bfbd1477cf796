"""`shrink` on a checkpoint that knows something: sample data from its run's recipe, and the proof."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.cli.answers import document, read, typed, works
from tests.support.models import strangers


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A digits ViT after 4 epochs, as `retrain` leaves it."""
    place = tmp_path_factory.mktemp("trained")
    run = "retrain runs/digits-vit-h4-l6 -o run --set train.duration=4ep --set measure=null"
    for command in ("shrink digits-vit --no-proof", run):
        works(command, cwd=place)
    return place


@pytest.fixture(scope="module")
def cut(trained) -> dict:
    wanted = "--heads 8 --layers 3 --mlp-dim 128 --samples 256"
    done = works(f"shrink run {wanted} --json -o lean", cwd=trained)
    assert re.search(r"\btask digits\b.*\brecipe\b", done.stderr, re.S)
    return json.loads(done.stdout)


def test_the_record_says_what_chose_and_how_the_result_scores(cut, trained):
    compared = cut["proof"]["compared"]
    assert compared["scored"] == 360
    # The prototype keeps all but a few points of the source's accuracy without training.
    assert compared["accuracy"]["result"] > compared["accuracy"]["source"] - 0.15
    record = read(trained / "lean" / "surgery.json")
    assert record["plan"] == cut["plan"] and record["plan"]["calibrated"]
    assert record["decided"]["calibration"]["samples"] == {"fit": 256, "guard": 64, "heldout": 360}
    assert len(record["decided"]["calibration"]["sha256"]) == 64
    drop = next(o for o in record["plan"]["operators"] if o["name"] == "drop-layers")
    scores = [c["judged_by"] for c in drop["settings"]["evidence"]["candidates"]]
    assert len(scores) > 1 and record["decided"]["layers"] == drop["settings"]["kept"]
    card = (trained / "lean" / "README.md").read_text()
    assert record["decided"]["calibration"]["sha256"][:16] in card and "accuracy" in card


def test_a_cut_ends_with_the_table_that_report_shows(tmp_path):
    """Of a model that no run trained: original and cut on the same held-out samples, from the same figures."""
    source, data = strangers.model(tmp_path / "mine", "llama"), strangers.texts(tmp_path / "texts")
    how = f"--layers 2 --calibrate {data} --heal none -o {tmp_path}/lean"
    done = typed(f"shrink {source} {how}")
    table = done.stdout[done.stdout.rindex("\ntexts\n") :].split("\n\n")[1]
    proof = read(tmp_path / "lean" / "surgery.json")["judged"]["texts"]
    for name, key in (("mine", "source"), ("lean", "result")):
        (row,) = (line for line in table.splitlines() if line.startswith(name))
        assert f"{math.exp(proof['loss'][key]):.2f}" in row
    again = typed(f"report {tmp_path}/lean {source}")
    assert table in again.stdout and max(map(len, table.splitlines())) <= 80


def test_without_data_it_says_that_nothing_was_compared(trained):
    done = works("shrink run --layers 3 --uncalibrated -o plain", cwd=trained)
    assert re.search(r"\bNot compared\b", done.stdout, re.S)


def test_an_exact_cut_is_proved_on_the_same_data(trained):
    compared = document("shrink run --heads 2x -o wide", cwd=trained)["proof"]["compared"]
    assert compared["max_difference"] <= 1e-4 * compared["spread"] and compared["data"] == "held-out data"
    assert compared["accuracy"]["source"] == compared["accuracy"]["result"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("run --layers 3 --method angulr", r"'angular'"),
        ("run --keep 0,1,6", r"\b0 to 5\b"),
        ("run --layers 3 --calibrate task:listops", "takes images"),
        ("run --layers 3 --calibrate nowhere", "no file or folder"),
        ("run --layers 3 --uncalibrated --calibrate task:digits", "exclude each other"),
    ],
    ids=lambda v: v.replace("/", "_"),
)
def test_what_cannot_be_is_one_sentence(arguments, says, trained):
    done = typed(f"shrink -o none {arguments}", cwd=trained)
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr
    assert "Traceback" not in done.stderr and not (trained / "none").exists()
