"""The same optimisation on 1, 2 and 4 processes and in 1 or 4 micro batches, and the command line around all this."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.training import data_loader
from leansurgeon.training.loop import train
from leansurgeon.training.runs import checkpoint
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, recipe, word_model

PICTURES = {"mixup": 0.4, "cutmix": 1.0, "ema": {"decay": 0.8}, "label_smoothing": 0.1, "log_every": 1}


class _Recorded(Words):
    """Writes down which samples every process saw."""

    def __init__(self, folder) -> None:
        super().__init__()
        self._file = folder / f"seen-{os.environ.get('RANK', '0')}"

    def batch(self, split, indices, *, seed, epoch):
        with self._file.open("a") as file:
            file.write(json.dumps([split, epoch, [int(i) for i in indices]]) + "\n")
        return super().batch(split, indices, seed=seed, epoch=epoch)


def _words(folder, micro, ramp) -> None:
    folder.mkdir(exist_ok=True)
    settings = recipe(micro_batch=micro, batch_ramp=ramp, eval={"every": "4st", "batch": 2})
    options = {"loaded": word_model(), "task": _Recorded(folder), "cpu": True, "say": lambda text: None}
    train(settings, folder, folder / "run", **options)


def _seen(folder, split) -> list[tuple[int, int]]:
    rows = [json.loads(line) for file in folder.glob("seen-*") for line in file.read_text().splitlines()]
    return sorted((epoch, index) for name, epoch, indices in rows if name == split for index in indices)


@pytest.mark.parametrize("ramp", [None, {"start": 4, "until": 0.5}], ids=["constant", "ramp"])
def test_processes_and_micro_batches_change_nothing_though_token_counts_differ(ramp, tmp_path):
    ways = {"one": (1, None), "parts": (1, 1 if ramp else 4), "two": (2, None), "four": (4, 1)}
    for name, (count, micro) in ways.items():
        folder = tmp_path / name
        assert cut.processes(count, _words, folder, micro, ramp) == [0] * count
    rows = cut.told(tmp_path / "one")
    assert len([row for row in rows if row["type"] == "eval"]) == 3
    for name in ways:
        others = cut.told(tmp_path / name)
        assert [row.get("lr") for row in others] == [row.get("lr") for row in rows]  # to the last bit
        for a, b in zip(rows, others, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
            assert a.get("grad_norm") == pytest.approx(b.get("grad_norm"), abs=1e-5)
            assert a.get("samples") == b.get("samples")
        assert _seen(tmp_path / name, "train") == _seen(tmp_path / "one", "train")
        assert _seen(tmp_path / name, "eval") == sorted([(0, index) for index in range(13)] * 3)


def _pictures(folder, micro) -> None:
    torch.manual_seed(0)
    model = cut.StandIn(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)), "pixel_values")
    settings = recipe(micro_batch=micro, **PICTURES)
    train(settings, folder, folder / "run", loaded=model, task=cut.Pictures(), cpu=True, say=lambda text: None)


def test_mixing_and_averaging_are_the_same_on_one_and_four_processes(tmp_path):
    for name, count, micro in (("one", 1, None), ("four", 4, 2)):
        assert cut.processes(count, _pictures, tmp_path / name, micro) == [0] * count
    for a, b in zip(cut.told(tmp_path / "one"), cut.told(tmp_path / "four"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a.get("lr") == b.get("lr")
    one, four = (cut.weights(tmp_path / name, "last") for name in ("one", "four"))
    assert all(torch.allclose(one[key], four[key], atol=1e-5) for key in one)


class _BadOnOne(Words):
    """In step 5 the loss of process 1 is no number, that of process 0 is one."""

    def batch(self, split, indices, *, seed, epoch):
        batch = super().batch(split, indices, seed=seed, epoch=epoch)
        mine = data_loader.split_micro_batches(data_loader.epoch_order(0, 1, 64)[:16], 2, 1, 8)[0]
        bad = split == "train" and epoch == 1 and np.array_equal(indices, mine)
        return batch | {"_factor": torch.tensor(float("nan") if bad else 1.0)}

    def score(self, logits, batch, **options):
        score = super().score(logits, batch, **options)
        return score._replace(loss_sum=score.loss_sum * batch["_factor"])


def _bad_on_one(folder, nan) -> None:
    options = {"loaded": word_model(), "task": _BadOnOne(), "cpu": True, "say": lambda text: None}
    try:
        train(recipe(nan=nan), folder, folder / "run", **options)
    except LeanSurgeonError as error:
        os._exit(error.exit_code)


@pytest.mark.parametrize("nan", ["stop", "skip", "rollback"])
def test_a_loss_that_is_no_number_on_one_process_is_met_by_all(nan, tmp_path):
    codes = cut.processes(2, _bad_on_one, tmp_path, nan)
    if nan == "stop":
        assert codes == [5, 5] and not (tmp_path / "run" / "summary.json").exists()
        return
    assert codes == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["left_out_steps"] == [5] and summary["steps"] == 8
    assert all(torch.isfinite(value).all() for value in cut.weights(tmp_path, "last").values())


def _command(*arguments, cwd, **options):
    run = [sys.executable, "-m", "leansurgeon", *map(str, arguments)]
    return subprocess.Popen(run, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_the_command_stops_at_a_signal_and_goes_on_again(tmp_path):
    """Two worker processes: SIGTERM reaches the launcher alone, and the workers decide."""
    from typer.testing import CliRunner

    from leansurgeon.cli.main import app

    start = tmp_path / "start"
    made = CliRunner().invoke(app, ["shrink", "digits-vit", "--layers", "1", "-o", str(start)])
    assert made.exit_code == 0, made.output
    sets = [f"train.{text}" for text in ("duration=150st", "eval.every=75st", "log_every=5", "optim.lr=1e-3")]
    flags = [part for text in [*sets, "measure=null"] for part in ("--set", text)]
    command = ["retrain", start, "-r", "digits-vit", "--cpu-processes", 2, "-o", tmp_path / "run", *flags]
    first = _command(*command, cwd=tmp_path)
    log = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (log.is_file() and '"train"' in log.read_text()):
        assert time.monotonic() < end and first.poll() is None, first.communicate()
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 75, err
    assert out == "" and re.search(r"\bafter step \d+", err, re.S) and f"--resume {tmp_path / 'run'}" in err
    assert "Traceback" not in err and len(checkpoint.all_of(tmp_path / "run")) == 1
    second = _command(*command, "--resume", "auto", "--json", cwd=tmp_path)
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    summary = json.loads(out)
    assert summary["steps"] == 150 and len(summary["resumed_after"]) == 1 and "resumed after step" in err
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines() if '"train"' in line]
    assert steps == list(range(5, 151, 5))


def test_a_look_before_a_long_training(tmp_path, monkeypatch):
    """--eval-only gives what the run calls `before`; --limit-batches cuts epochs and evaluations; neither dry run nor
    evaluation leaves a file.
    """
    from typer.testing import CliRunner

    from leansurgeon.cli.main import app

    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    run, start = CliRunner().invoke, tmp_path / "start"
    assert run(app, ["shrink", "digits-vit", "--layers", "1", "-o", str(start)]).exit_code == 0
    model = ["retrain", str(start), "-r", "digits-vit", "--json", "--set", "train.eval.batch=100"]
    evaluated = json.loads(run(app, [*model, "--eval-only"]).stdout)
    dry = json.loads(run(app, [*model, "--dry-run"]).stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "start"]
    # Forward and backward of 17 tokens: 2 FLOPs a weight and token, three times; attention more, the embeddings less.
    assert dry["plan"]["flops"] == dry["plan"]["flops_per_step"] * dry["plan"]["steps"]
    assert 0.9 < dry["plan"]["flops_per_step"] / (6 * 17 * 64 * dry["plan"]["parameters"]) < 1.1
    flags = [
        "--limit-batches",
        "2",
        "--set",
        "train.duration=2ep",
        "--set",
        "measure=null",
        "-o",
        str(tmp_path / "run"),
    ]
    limited = run(app, [*model, *flags])
    assert limited.exit_code == 0, limited.output
    summary = json.loads(limited.stdout)
    assert summary["steps"] == 4 and summary["task"]["eval_samples"] == 200
    whole = run(app, [*model, "--set", "train.duration=1st", "--set", "measure=null", "-o", str(tmp_path / "whole")])
    assert json.loads(whole.stdout)["before"]["loss"] == pytest.approx(evaluated["loss"], rel=1e-6)
    assert evaluated["samples"] == 360 and set(evaluated["metrics"]) == {"accuracy"}
