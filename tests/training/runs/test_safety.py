"""What must not happen to a training that goes wrong or is continued: nonsense saved, a wrong model, a traceback."""

import errno
import json
import os

import pytest
import torch
from pydantic import ValidationError

from leansurgeon.errors import Diverged, LeanSurgeonError, Stopped, UsageError
from leansurgeon.training import evaluator, guards
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe.schema import ExperimentRecipe, Train
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from tests.support import training_interrupted as cut
from tests.support.command_line import leansurgeon
from tests.support.training_standin import recipe, run_training, trained

ROLLBACK = {"nan": "rollback", "duration": "16st", "checkpoint": {"every": "3st"}}


@pytest.fixture
def spoil(monkeypatch):
    """Give gradients at the steps that `bad` holds for no finite number, while the loss stays one. At the first coming
    of step `stop`, SIGTERM comes, too.
    """
    real, sent = Trainer._gradients, []

    def install(bad, stop=None):
        def spoilt(self, step, batches, alone):
            if step == stop and not sent:
                sent.append(step)
                os.kill(os.getpid(), cut.TERM)
            sums = real(self, step, batches, alone)
            for parameter in self.parameters if bad(step) else ():
                parameter.grad.fill_(float("nan"))
            return sums

        monkeypatch.setattr(Trainer, "_gradients", spoilt)

    return install


@pytest.mark.parametrize("log_every", [1, 10])
def test_leaving_out_steps_gives_up_however_often_one_looks(spoil, log_every, tmp_path):
    spoil(lambda step: step >= 5)
    with pytest.raises(Diverged, match=r"\bgradient norm\b.*\bnan\b.*\bstep 26\b"):
        run_training(tmp_path, nan="skip", duration="60st", log_every=log_every)


def test_left_out_steps_apart_from_each_other_are_no_reason_to_give_up(spoil, tmp_path):
    spoil(lambda step: step % 2 == 0)
    found = run_training(tmp_path, nan="skip", duration="60st")
    assert len(found.left_out_steps) == 30 > guards.MOST_SKIPPED


def test_spoilt_gradients_are_noticed_without_clipping_before_anything_is_saved(spoil, tmp_path):
    spoil(lambda step: step == 3)
    settings = {"clip_grad": 0.0, "log_every": 5, "duration": "20st", "checkpoint": {"every": "4st"}}
    with pytest.raises(Diverged, match=r"\bgradient norm\b.*\bnan\b.*\bstep 4\b") as error:
        run_training(tmp_path / "stop", **settings)
    assert "--set train.optim.lr=0.0033," in error.value.hint
    assert not checkpoint.all_of(tmp_path / "stop" / "run")
    summary, rows = trained(tmp_path / "back", nan="rollback", **settings)
    assert summary["left_out_steps"] == [4] and summary["status"] == "done"
    norms = [row["grad_norm"] for row in rows if row["type"] == "train"]
    assert norms.count(0) <= 1 and max(norms) > 0  # 0 is the step that was left out


def test_a_step_that_is_left_out_counts_as_little_as_one_that_is_gone_back_behind(spoil, tmp_path):
    """The average would count the weights of a step that was left out twice."""
    spoil(lambda step: step == 4)
    said, left = [], {}
    for nan in ("skip", "rollback"):
        settings = {"nan": nan, "ema": {"decay": 0.8}, "log_every": 4, "checkpoint": {"every": "3st"}}
        summary, rows = trained(tmp_path / nan, say=said.append, **settings)
        left[nan] = summary["final"], cut.weights(tmp_path / nan, "last")
        assert summary["left_out_steps"] == [5]
        assert [row["step"] for row in rows if row["type"] == "train"] == [4, 8]
    (final, skip), (other, back) = left.values()
    assert final == other and all(torch.equal(skip[name], back[name]) for name in skip)
    assert any("skipped" in line for line in said)


def test_a_step_that_half_precision_leaves_out_does_not_move_the_average(spoil, tmp_path):
    """The scaler leaves it out by itself: as `nan: skip` does, to the last bit."""
    spoil(lambda step: step == 5)
    for nan in ("skip", "stop"):
        run_training(tmp_path / nan, nan=nan, precision="fp16", ema={"decay": 0.8})
    skip, stop = (cut.weights(tmp_path / nan, "last") for nan in ("skip", "stop"))
    assert all(torch.equal(skip[key], stop[key]) for key in skip)


def test_steps_that_were_left_out_before_an_interruption_are_counted_on(spoil, tmp_path):
    spoil(lambda step: step in (3, 11), stop=7)
    with pytest.raises(Stopped):
        run_training(tmp_path, nan="skip", duration="16st")
    assert run_training(tmp_path, nan="skip", duration="16st", resume="auto").left_out_steps == (4, 12)


def test_an_interruption_gives_no_new_rollbacks(spoil, tmp_path):
    """Four steps are spoilt and three may be: the two before the interruption count."""
    spoil(lambda step: step in (2, 5, 9, 12), stop=7)
    with pytest.raises(Stopped):
        run_training(tmp_path, **ROLLBACK)
    with pytest.raises(Diverged, match=r"\b13\b.*\b16\b.*\b3\b"):
        run_training(tmp_path, resume="auto", **ROLLBACK)


def test_going_back_without_a_checkpoint_says_so(spoil, tmp_path, monkeypatch):
    spoil(lambda step: step == 3)
    monkeypatch.setattr(checkpoint, "newest", lambda *rest: None)
    with pytest.raises(Diverged, match="no complete checkpoint"):
        run_training(tmp_path, **ROLLBACK)


@pytest.fixture
def judge_as(monkeypatch):
    """Let evaluations give these metrics one after the other, and the last of them ever after; lower is better."""

    def install(*metrics):
        real, left = evaluator.evaluate, list(metrics)

        def evaluate(*arguments, **options):
            return real(*arguments, **options)._replace(metric=left.pop(0) if len(left) > 1 else left[0])

        monkeypatch.setattr(evaluator, "evaluate", evaluate)

    return install


def test_after_a_rollback_the_best_model_is_the_one_that_is_told(spoil, judge_as, tmp_path, monkeypatch):
    """A model better than all that follow is saved at step 12, and the training goes back to step 9."""
    fired = []
    spoil(lambda step: step == 13 and not fired and not fired.append(step))
    judge_as(9.0, 5.0, 1.0, 7.0, 8.0)  # before, at steps 6 and 12, at 12 again, at 18
    weights, export = {}, evaluator.export_model

    def saved(run, name):
        export(run, name)
        weights[run.history.done] = {key: value.clone() for key, value in run.loaded.model.state_dict().items()}

    monkeypatch.setattr(evaluator, "export_model", saved)
    settings = {"duration": "18st", "eval": {"every": "6st", "batch": 13}, "checkpoint": {"every": "9st"}}
    summary = run_training(tmp_path, nan="rollback", **settings)
    assert summary.best.step == 12 and summary.best.metric == 7.0
    kept = cut.weights(tmp_path, "model")
    assert all(torch.equal(kept[key], value) for key, value in weights[12].items())


# -- the disk --------------------------------------------------------------------------------------


def test_a_log_that_was_shortened_is_not_filled_up(tmp_path):
    log = runfolder.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step=1)
    log.write(step=2)
    size = log.bytes
    log.sync()
    os.truncate(log.path, size - 3)
    log.truncate(size)
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [{"step": 1}]
    log.path.unlink()
    log.truncate(size)
    assert log.bytes == 0


def test_folders_that_cannot_be_made_are_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        runfolder.create(tmp_path / ("x" * 300))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_disk_that_runs_full_is_named_whoever_notices_it(number, tmp_path):
    """safetensors raises an error of its own, which only quotes the system's."""

    def fill(folder):
        raise RuntimeError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    with pytest.raises(LeanSurgeonError, match=r"\bdisk is full\b.*\bmodel\b"):
        runfolder.write_folder(tmp_path / "model", fill)
    assert list(tmp_path.iterdir()) == []


# -- what is asked for -----------------------------------------------------------------------------

TRAIN = {"duration": "1st", "batch": 16, "optim": {"lr": 1e-3}}
WHOLE = {"name": "a", "kind": "experiment", "source": "x", "task": {"name": "digits"}, "arms": {"original": {}}}


def test_numbers_and_names_that_nothing_can_be_done_with(tmp_path):
    for changes in ({"seed": 2**63}, {"optim": {"lr": float("inf")}}, {"clip_grad": float("nan")}):
        with pytest.raises(ValidationError):
            Train.model_validate(TRAIN | changes)
    assert run_training(tmp_path, duration="1st", seed=2**63 - 1).seed == 2**63 - 1
    whole = WHOLE | {"train": TRAIN}
    for wrong in ({"name": "../../esc"}, {"name": ".."}, {"seeds": [2**63]}):
        with pytest.raises(ValidationError):
            ExperimentRecipe.model_validate(whole | wrong)
    with pytest.raises(ValidationError, match="folders bear it"):
        type(recipe()).model_validate(recipe().model_dump() | {"name": "a/b"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dry-run --eval-only", "--dry-run and --eval-only exclude"),
        ("--dry-run --resume auto", "--dry-run and --resume auto exclude"),
        ("--eval-only --resume-anyway", "--eval-only and --resume-anyway exclude"),
        ("--resume=", "--resume is empty"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(flags, said, tmp_path):
    done = leansurgeon("retrain", tmp_path, *flags.split())
    assert done.returncode == 2 and said in done.stderr
