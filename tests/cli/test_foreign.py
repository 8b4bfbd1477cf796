"""Every command that opens a model, beside a broken surgery.json; and words of 5,000 columns: one readable sentence."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.answers import typed
from tests.support.models import strangers

RECORDS = {
    "half": "{",
    "a number for the plan": json.dumps({"source": {"name": "x", "kind": "folder"}, "plan": 5}),
    "a number for the name": json.dumps({"source": {"name": 5}}),
}
FEW = "--data TEXTS --samples 2"
COMMANDS = {  # and whether the model is used without the record
    "kappa": (f"kappa MODEL {FEW} --probes 0", True),
    "heads": (f"heads MODEL {FEW} --judge-samples 2 --no-curve", True),
    "retrain": ("retrain MODEL --data TEXTS --dry-run", True),
    "inspect": ("inspect MODEL", False),
    "undo": ("undo MODEL -o OUT", False),
    "judge": ("judge MODEL --data TEXTS", False),
    "report": ("report MODEL", False),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    strangers.texts(place / "TEXTS")
    strangers.halved(place / "MODEL", strangers.model(place / "source", "llama"))
    return place


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_broken_record_is_told_or_passed_over(command, kind, place):
    (place / "MODEL" / "surgery.json").write_text(RECORDS[kind])
    words, goes_on = COMMANDS[command]
    done = typed(words, cwd=place)
    assert done.returncode == 0 if goes_on else done.returncode in (2, 3), done.stderr
    if not goes_on:
        assert "surgery.json" in done.stdout + done.stderr and not (place / "OUT").exists()


LONG = "x" * 5000


@pytest.mark.parametrize(
    "words",
    [
        "kappa MODEL --data LONG",
        "kappa MODEL --data task:LONG",
        "judge MODEL --against source --data LONG",
        "retrain source --recipe LONG",
        "shrink source --layers 2 --uncalibrated -o LONG",
        "shrink source --method LONG",
        "search source --params 1M --data LONG",
        "plan source --layers 2 LONG",
        "plan source --LONG",
        "plan source --batch LONG",
        "recipes LONG",
        "LONG",
    ],
)
def test_a_word_of_5_000_columns_is_cut(words, place):
    done = typed(words.replace("LONG", LONG), cwd=place)
    assert done.returncode == 2 and done.stdout == "" and not (place / "OUT").exists()
    assert len(done.stderr) < 1500 and len(re.findall("x", done.stderr)) < 600, done.stderr


@pytest.mark.parametrize("call", ["inspect ~nosuchuser", "plan ~nosuchuser/x --layers 2"])
def test_a_home_that_is_not_there_is_one_sentence(call):
    done = typed(call)
    assert done.returncode in (2, 3) and "~nosuchuser" in done.stderr and "Traceback" not in done.stderr
