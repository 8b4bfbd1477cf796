"""A surgery.json of a later version: refused by what would build on it, shown with a warning by what only shows."""

from __future__ import annotations

import json

import pytest

import leansurgeon as python
from leansurgeon.errors import LeanSurgeonError
from tests.cli.answers import read, stderr_of, typed
from tests.support.models import strangers

BUILD = {
    "shrink": "shrink MODEL --layers 1 --uncalibrated --no-proof -o OUT",
    "undo": "undo MODEL -o OUT",
    "retrain": "retrain MODEL --data TEXTS -o OUT --set train.duration=2st",
    "a dry run of it": "retrain MODEL --data TEXTS --dry-run",
    "heads": "heads MODEL --data TEXTS --samples 2 --judge-samples 2 --no-curve --prune 50% --no-heal -o OUT",
    "search": "search MODEL --data TEXTS --params 20k --samples 8",
    "judge": "judge MODEL --data TEXTS",
    "force": "shrink SOURCE --layers 1 --uncalibrated --no-proof --force -o MODEL",
}
SHOW = {
    "inspect": "inspect MODEL",
    "report": "report MODEL --html PAGE",
    "diff": "diff MODEL SOURCE",
    "plan": "plan MODEL --layers 1",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    strangers.texts(place / "TEXTS")
    strangers.halved(place / "MODEL", strangers.model(place / "SOURCE", "llama"))
    file = place / "MODEL" / "surgery.json"
    made = read(file) | {"schema_version": 2, "of_later": {"a": [1]}}
    file.write_text(json.dumps(made))
    return place


@pytest.mark.parametrize("command", BUILD)
def test_what_builds_on_it_is_refused(command, place):
    before = {file: file.read_bytes() for file in (place / "MODEL").iterdir()}
    done = typed(BUILD[command], cwd=place)
    said = stderr_of(done)
    assert done.returncode == 3, said
    assert "surgery.json was written by a newer leansurgeon (form 2" in said and "Update leansurgeon" in said
    assert not (place / "OUT").exists() and {f: f.read_bytes() for f in (place / "MODEL").iterdir()} == before


@pytest.mark.parametrize("command", SHOW)
def test_what_only_shows_warns(command, place):
    done = typed(SHOW[command], cwd=place)
    said = stderr_of(done)
    assert done.returncode == 0, said
    assert said.count("written by a newer leansurgeon (form 2") == 1
    assert command == "plan" or "SOURCE" in done.stdout or "MODEL" in done.stdout


def test_so_it_is_in_python(place):
    with pytest.raises(LeanSurgeonError, match="newer leansurgeon"):
        python.shrink(place / "MODEL", layers=1, uncalibrated=True, out=place / "OUT", progress=False)
    heard = []
    assert "MODEL" in str(python.report(place / "MODEL", progress=heard.append))
    assert len(heard) == 1 and "newer leansurgeon" in heard[0]
