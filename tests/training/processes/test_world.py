"""The same optimisation on 1, 2 and 4 processes and in few or many micro batches; and the command with two of them."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.training import evaluator
from leansurgeon.training.runs import checkpoint
from tests import conftest
from tests.support import training_interrupted as cut
from tests.support.patience import working_until
from tests.support.training_standin import StandIn, Words, run_training


class Recorded(Words):
    """Writes down which samples every process saw."""

    def __init__(self, folder) -> None:
        super().__init__()
        self._file = folder / f"seen-{os.environ.get('RANK', '0')}"

    def batch(self, split, indices, *, seed, epoch):
        with self._file.open("a") as file:
            file.write(json.dumps([split, epoch, [int(i) for i in indices]]) + "\n")
        return super().batch(split, indices, seed=seed, epoch=epoch)


def _train_words(folder, settings) -> None:
    folder.mkdir(exist_ok=True)
    run_training(folder, task=Recorded(folder), eval={"every": "4st", "batch": 2}, **settings)


def _train_pictures(folder, settings) -> None:
    torch.manual_seed(0)
    model = StandIn(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)), "pixel_values")
    mixed = {"mixup": 0.4, "cutmix": 1.0, "ema": {"decay": 0.8}, "label_smoothing": 0.1}
    run_training(folder, loaded=model, task=cut.Pictures(), **mixed, **settings)


def compare(one, other) -> None:
    """Two trainings came to the same, whatever they were shared by."""
    rows, others = cut.told(one), cut.told(other)
    assert [row.get("lr") for row in others] == [row.get("lr") for row in rows]  # to the last bit
    for a, b in zip(rows, others, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a.get("grad_norm") == pytest.approx(b.get("grad_norm"), abs=1e-5)
        assert a.get("samples") == b.get("samples")
    ours, theirs = cut.weights(one, "last"), cut.weights(other, "last")
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in ours)


def seen(folder, split) -> list[tuple[int, int]]:
    rows = [json.loads(line) for file in folder.glob("seen-*") for line in file.read_text().splitlines()]
    return sorted((epoch, index) for name, epoch, indices in rows if name == split for index in indices)


@pytest.mark.parametrize("ramp", [None, {"start": 4, "until": 0.5}], ids=["constant", "ramp"])
def test_processes_and_micro_batches_change_nothing_though_token_counts_differ(ramp, tmp_path):
    one, *others = ((1, None), (2, None), (4, 1))
    for count, micro in (one, *others):
        settings = {"micro_batch": micro, "batch_ramp": ramp}
        assert cut.processes(count, _train_words, tmp_path / str(count), settings) == [0] * count
        assert seen(tmp_path / str(count), "train") == seen(tmp_path / "1", "train")
        assert seen(tmp_path / str(count), "eval") == sorted([(0, index) for index in range(13)] * 3)
    for count, _ in others:
        compare(tmp_path / "1", tmp_path / str(count))


def test_mixing_and_averaging_are_the_same_on_one_and_four_processes(tmp_path):
    for count, settings in ((1, {}), (4, {"micro_batch": 2})):
        assert cut.processes(count, _train_pictures, tmp_path / str(count), settings) == [0] * count
    compare(tmp_path / "1", tmp_path / "4")


def _note_statistics(folder) -> None:
    real = evaluator.evaluate

    def evaluate(judged, *rest, **options):
        means = [b.clone() for name, b in judged.named_buffers() if name.endswith("running_mean")]
        torch.save(means, folder / f"means-{os.environ['RANK']}.pt")
        return real(judged, *rest, **options)

    evaluator.evaluate = evaluate
    cut.run(folder, duration="4st", ema=None)


def test_all_processes_evaluate_with_the_same_running_statistics(tmp_path):
    """Each has seen its own half of the samples: apart, they would evaluate two different models."""
    assert cut.processes(2, _note_statistics, tmp_path) == [0, 0]
    one, other = (torch.load(tmp_path / f"means-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert len(one) == 1 and one[0].abs().max() > 0 and torch.equal(one[0], other[0])


class BadOnOne(Words):
    """In step 5 the loss of process 1 is no number, that of process 0 is one."""

    steps = 0

    def score(self, logits, batch, **options):
        score = super().score(logits, batch, **options)
        self.steps += logits.requires_grad
        bad = logits.requires_grad and (self.steps, os.environ["RANK"]) == (5, "1")
        return score._replace(loss_sum=score.loss_sum * float("nan")) if bad else score


def _train_bad(folder, nan) -> None:
    try:
        run_training(folder, task=BadOnOne(), nan=nan)
    except LeanSurgeonError as error:
        os._exit(error.exit_code)


@pytest.mark.parametrize("nan", ["stop", "skip", "rollback"])
def test_a_loss_that_is_no_number_on_one_process_is_met_by_all(nan, tmp_path):
    codes = cut.processes(2, _train_bad, tmp_path, nan)
    if nan == "stop":
        assert codes == [5, 5] and not (tmp_path / "run" / "summary.json").exists()
        return
    assert codes == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["left_out_steps"] == [5] and summary["steps"] == 8
    assert all(torch.isfinite(value).all() for value in cut.weights(tmp_path, "last").values())


@pytest.mark.slow
def test_the_command_stops_at_a_signal_and_goes_on_again(tmp_path):
    """Two worker processes: SIGTERM reaches the launcher alone, and the workers decide."""
    conftest.build("vit").save_pretrained(tmp_path / "start")
    settings = ["train.duration=150st", "train.eval.every=75st", "train.log_every=5", "measure=null"]
    flags = [part for text in settings for part in ("--set", text)]
    command = [sys.executable, "-m", "leansurgeon", "retrain", "start", "-r", "digits-vit", "--cpu-processes", "2"]
    command += ["-o", "run", *flags]
    pipes = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **pipes)
    log = tmp_path / "run" / "metrics.jsonl"
    assert working_until(lambda: log.is_file() and '"train"' in log.read_text(), [first.pid])
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 75, err
    assert out == "" and re.search(r"\bafter step \d+", err, re.S) and "--resume run" in err
    assert "Traceback" not in err and len(checkpoint.all_of(tmp_path / "run")) == 1
    out, err = subprocess.Popen([*command, "--resume", "auto", "--json"], **pipes).communicate(timeout=120)
    summary = json.loads(out)
    assert summary["steps"] == 150 and len(summary["resumed_after"]) == 1 and "resumed after step" in err
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines() if '"train"' in line]
    assert steps == list(range(5, 151, 5))
