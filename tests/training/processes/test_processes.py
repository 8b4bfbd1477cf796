"""Two processes give what one gives, and a failed worker is one sentence."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.training import together
from leansurgeon.training.loop import train
from leansurgeon.training.processes import launch
from tests.support.processes.forks import forked
from tests.support.training_standin import Dots, Words, dot_model, recipe, word_model

ROOT = Path(__file__).parents[3]


def _metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_give_the_losses_and_rates_of_one(tmp_path):
    command = ["-m", "tests.support.training_worker", str(tmp_path)]
    done = forked(lambda: sys.exit(not launch.run_workers(2, command)), ROOT)
    assert done.returncode == 0, done.stderr
    one = tmp_path / "one"
    train(recipe(), tmp_path, one, loaded=word_model(), task=Words(), cpu=True, say=lambda text: None)
    single, double = _metrics(one), _metrics(tmp_path / "words")
    assert [row["step"] for row in single] == [row["step"] for row in double]
    for a, b in zip(single, double, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a.get("lr") == b.get("lr")  # to the last bit
        assert a.get("grad_norm") == pytest.approx(b.get("grad_norm"), abs=1e-5)
    summary = json.loads((tmp_path / "words" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["memory"]["bytes"] > 0
    # 13 samples in batches of 4 on 2 processes: each is counted once, and nothing else is.
    dots = tmp_path / "dots-one"
    train(recipe(duration="2st"), tmp_path, dots, loaded=dot_model(), task=Dots(), cpu=True, say=lambda text: None)
    for a, b in zip(_metrics(dots), _metrics(tmp_path / "dots"), strict=True):
        if a["type"] == "eval":
            assert a["samples"] == b["samples"] == 13
            assert a["metric"] == b["metric"] and a["loss"] == pytest.approx(b["loss"], abs=1e-6)


def test_a_failed_worker_is_one_sentence_with_its_exit_code(tmp_path):
    def work():
        os.environ["LEANSURGEON_CACHE"] = str(tmp_path)
        try:
            asked = recipe(batch=15), tmp_path / "model", tmp_path / "run"
            together.train_on(2, *asked, cpu=True, say=lambda text: None)
        except LeanSurgeonError as error:
            print(error.exit_code, error.message)

    done = forked(work, ROOT)
    assert re.search(r"^2 .*\bbatch of 15\b.*\b2 processes\b", done.stdout), (done.stdout, done.stderr)
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr and "elastic" not in done.stderr


def test_more_gpus_than_there_are(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"\b4\b.*\b1\b"):
        launch.check_gpus(4)


def test_a_worker_never_starts_workers(tmp_path, monkeypatch):
    seen = []
    group = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("leansurgeon.training.together.train", lambda *a, **k: seen.append(a) or {})
    monkeypatch.setattr(launch, "run_workers", lambda *a: pytest.fail("nested"))
    together.train_on(4, recipe(), tmp_path, tmp_path / "run")
    assert len(seen) == 1
