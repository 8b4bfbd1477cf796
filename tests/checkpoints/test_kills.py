"""SIGKILL at random moments tears nothing: results are whole or absent, trainings go on to the same bits, and the next
command takes away what the dead have left. A few of each in the suite; `pytest -m slow` has more than 200.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from leansurgeon.checkpoints import digests, record
from tests.support.command_line import leansurgeon
from tests.support.kills import Kills, many, whole

COUNTS = [3, pytest.param(45, marks=pytest.mark.slow)]  # of each of four commands
OF_TRAININGS = [2, pytest.param(30, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """`base`, and `wide` with twice its heads."""
    root = tmp_path_factory.mktemp("models")
    for words in ("digits-vit --layers 2 --init fresh -o base", "base --heads 2x -o wide"):
        assert leansurgeon("shrink", *words.split(), "--no-proof", cwd=root).returncode == 0
    return root


def weights_of(folder: Path) -> str:
    return digests.digest(folder / "model.safetensors")


def nothing_left(*folders: Path) -> None:
    for folder in folders:
        assert not [name for name in os.listdir(folder) if name.startswith((".", "leansurgeon-"))]


SURGERY = {
    "shrink": "shrink {models}/base --heads 2x -o {out}",
    "shrink over an old one": "shrink {models}/base --heads 2x -o {out} --force",
    "heads": "heads {models}/base --data task:digits --samples 64 --judge-samples 64 --no-curve --prune 25% --no-heal "
    "-o {out}",
    "undo": "undo {models}/wide -o {out}",
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SURGERY)
def test_a_killed_surgery_leaves_its_result_whole_or_absent(name, count, models, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out"
    command = SURGERY[name].format(models=models, out=out).split()
    kills = Kills(command, tmp_path / "tmp", seed=len(name))
    assert kills.to_its_end() == 0
    known = {weights_of(out)}
    shutil.rmtree(out)
    old = models / "wide" if name == "undo" else models / "base"
    if "--force" in command:
        shutil.copytree(old, out)
        known.add(weights_of(old))

    def look() -> None:
        there = whole(out, known)
        if "--force" in command:
            assert there  # the old one or the new one, at every moment
        elif there:
            shutil.rmtree(out)

    many(kills, count, look)
    assert kills.to_its_end() == 0 and whole(out, known)
    nothing_left(place, kills.scratch)
    print(f"{name}: {kills.killed} kills, {kills.ended} ended before, {kills.seconds:.2f} s a run")


@pytest.mark.parametrize("count", OF_TRAININGS)
def test_a_killed_training_goes_on_to_the_same_bits(count, models, tmp_path):
    words = "retrain {models}/base --recipe digits-vit --set train.duration=6st --set train.checkpoint.every=2st "
    words += "--set train.eval.every=3st --limit-batches 3 --cpu-processes 1 --resume auto --workspace {runs}"

    def training(workspace: Path) -> Kills:
        return Kills(words.format(models=models, runs=workspace).split(), tmp_path / "tmp")

    first = training(tmp_path / "first")
    assert first.to_its_end() == 0
    (run,) = (tmp_path / "first").iterdir()
    expected = {name: weights_of(run / name) for name in ("model", "last")}
    left, turns = count, 0
    while left:
        kills = training(tmp_path / f"again{turns}")
        kills.seconds, kills.draws = first.seconds, first.draws
        for _ in range(min(left, 3)):
            kills.kill()
            for found in (tmp_path / f"again{turns}").glob("*"):
                for name in ("model", "last"):
                    if (found / name).exists():
                        assert record.read(found / name) and weights_of(found / name)
                if (found / "summary.json").exists():
                    assert json.loads((found / "summary.json").read_text())["status"] == "done"
        left -= kills.killed
        assert kills.to_its_end() == 0
        runs = list((tmp_path / f"again{turns}").iterdir())
        for found in runs:
            nothing_left(found)
            if (found / "summary.json").exists():
                assert {name: weights_of(found / name) for name in expected} == expected
        turns += 1
    nothing_left(first.scratch)
    print(f"retrain: {count} kills in {turns} trainings, {first.seconds:.2f} s a run")
