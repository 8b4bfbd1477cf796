"""SIGKILL at random moments tears nothing: results are whole or absent, trainings go on to the same bits, and the next
command takes away what the dead have left. A few of each in the suite; `pytest -m slow` has more than 150.

Commands run in forked processes, which costs a tenth of a second instead of ten: torch is imported already.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

import leansurgeon.training.loop  # noqa: F401 (once for every forked process)
from leansurgeon.checkpoints import digests, record
from leansurgeon.cli.main import main
from leansurgeon.reading import jsonfile
from tests.support.command_line import leansurgeon as typed

COUNTS = [3, pytest.param(45, marks=pytest.mark.slow)]  # of each of three commands
OF_TRAININGS = [2, pytest.param(30, marks=pytest.mark.slow)]


class Command:
    """A command that is run to its end or killed on the way; `scratch` stands in for the system's temporary folder."""

    def __init__(self, words: str, scratch: Path) -> None:
        self.words, self.scratch, self.seconds = words.split(), scratch, 0.0
        self.draws = random.Random(len(words))
        scratch.mkdir(exist_ok=True)

    def finish(self) -> None:
        """Run it undisturbed."""
        started = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(self._start(), 0)[1]) == 0
        self.seconds = max(self.seconds, time.monotonic() - started)

    def kill(self) -> None:
        """Start it and kill it, with whatever it has started, at a random moment of its life. One that ends before is
        started again.
        """
        ended = True
        while ended:
            child, moment = self._start(), time.monotonic() + self.draws.uniform(0, self.seconds)
            ended = False
            while not ended and time.monotonic() < moment:
                time.sleep(0.002)
                ended = bool(os.waitpid(child, os.WNOHANG)[0])
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _start(self) -> int:
        child = os.fork()
        if child:
            with suppress(OSError):  # it may be quicker itself
                os.setpgid(child, child)
            return child
        code = 70
        try:
            os.setpgid(0, 0)
            silence = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(silence, stream)
            tempfile.tempdir = str(self.scratch)
            sys.argv = ["leansurgeon", *self.words]
            main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            os._exit(code if isinstance(code, int) else 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """`base`, and `wide` with twice its heads."""
    root = tmp_path_factory.mktemp("models")
    for words in ("digits-vit --layers 2 --init fresh -o base", "base --heads 2x -o wide"):
        assert typed("shrink", *words.split(), "--no-proof", cwd=root).returncode == 0
    return root


def weights_of(folder: Path) -> str:
    return digests.digest(folder / "model.safetensors")


def is_whole(folder: Path, weights: set[str]) -> bool:
    """Whether a result of surgery is there; if it is, all of it: one of these `weights`, and every file it lists."""
    if not folder.exists():
        return False
    made = record.read(folder)
    assert {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} == set(made.files)
    assert weights_of(folder) in weights, f"{folder} holds other weights"
    return True


def nothing_left(*folders: Path) -> None:
    for folder in folders:
        assert not [name for name in os.listdir(folder) if name.startswith((".", "leansurgeon-"))]


SURGERY = {
    "shrink": "shrink {models}/base --heads 2x --no-proof -o {out}",
    "shrink over an old one": "shrink {models}/base --heads 2x --no-proof -o {out} --force",
    "undo": "undo {models}/wide -o {out}",
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SURGERY)
def test_a_killed_surgery_leaves_its_result_whole_or_absent(name, count, models, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out"
    command = Command(SURGERY[name].format(models=models, out=out), tmp_path / "tmp")
    command.finish()
    known = {weights_of(out)}
    shutil.rmtree(out)
    replaces = "--force" in command.words
    if replaces:
        shutil.copytree(models / "base", out)
        known.add(weights_of(models / "base"))
    for _ in range(count):
        command.kill()
        there = is_whole(out, known)
        assert there or not replaces  # the old one or the new one, at every moment
        if there and not replaces:
            shutil.rmtree(out)
    command.finish()
    assert is_whole(out, known)
    nothing_left(place, command.scratch)


@pytest.mark.parametrize("count", OF_TRAININGS)
def test_a_killed_training_goes_on_to_the_same_bits(count, models, tmp_path):
    words = "retrain {models}/base --recipe digits-vit --set train.duration=6st --set train.checkpoint.every=2st "
    words += "--set train.eval.every=3st --limit-batches 3 --cpu-processes 1 --resume auto --workspace {runs}"

    def training(name: str) -> Command:
        return Command(words.format(models=models, runs=tmp_path / name), tmp_path / "tmp")

    first = training("first")
    first.finish()
    (run,) = (tmp_path / "first").iterdir()
    expected = {name: weights_of(run / name) for name in ("model", "last")}
    for turn in range(0, count, 3):
        again = training(f"again{turn}")
        again.seconds = first.seconds
        for _ in range(min(count - turn, 3)):
            again.kill()
            for model in (tmp_path / f"again{turn}").glob("*/[ml]*/model.safetensors"):
                assert record.read(model.parent)
            for summary in (tmp_path / f"again{turn}").glob("*/summary.json"):
                assert jsonfile.read_object(summary)["status"] == "done"
        again.finish()
        done = list((tmp_path / f"again{turn}").iterdir())
        nothing_left(*done)
        ended = [found for found in done if (found / "summary.json").exists()]
        assert ended
        for found in ended:
            assert {name: weights_of(found / name) for name in expected} == expected
    nothing_left(first.scratch)
