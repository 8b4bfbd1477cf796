"""What must not happen to a training that goes wrong or is continued: nonsense saved, a wrong model, a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from leansurgeon.errors import Diverged, LeanSurgeonError, Stopped, UsageError
from leansurgeon.training import evaluator, guards
from leansurgeon.training import loop as loop
from leansurgeon.training.loop import train
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe.schema import ExperimentRecipe, Train
from leansurgeon.training.runs import checkpoint, resume
from leansurgeon.training.runs import folder as runfolder
from tests.support import training_interrupted as cut
from tests.support.training_standin import StandIn, Words, recipe, word_model


def _run(folder, *, task=None, say=lambda text: None, resume="never", **settings):
    options = {"loaded": word_model(), "task": task or Words(), "cpu": True, "say": say, "resume": resume}
    summary = train(recipe(**settings), folder, folder / "run", **options).as_dict()
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return summary, rows


@pytest.fixture
def spoil(monkeypatch):
    """Give gradients at the steps that `bad` holds for no finite number, while the loss stays one."""
    real = Trainer._gradients

    def install(bad):
        def spoilt(self, step, batches, alone):
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
        _run(tmp_path, nan="skip", duration="60st", log_every=log_every)


def test_left_out_steps_apart_from_each_other_are_no_reason_to_give_up(spoil, tmp_path):
    spoil(lambda step: step % 2 == 0)
    assert len(_run(tmp_path, nan="skip", duration="60st")[0]["left_out_steps"]) == 30 > guards.MOST_SKIPPED


def test_spoilt_gradients_are_noticed_without_clipping_before_anything_is_saved(spoil, tmp_path):
    spoil(lambda step: step == 3)
    settings = {"clip_grad": 0.0, "log_every": 5, "duration": "20st", "checkpoint": {"every": "4st"}}
    with pytest.raises(Diverged, match=r"\bgradient norm\b.*\bnan\b.*\bstep 4\b"):
        _run(tmp_path / "stop", **settings)
    assert not checkpoint.all_of(tmp_path / "stop" / "run")
    summary, rows = _run(tmp_path / "back", nan="rollback", **settings)
    assert summary["left_out_steps"] == [4] and summary["status"] == "done"
    norms = [row["grad_norm"] for row in rows if row["type"] == "train"]
    assert norms.count(0) <= 1 and max(norms) > 0  # 0 is the step that was left out


def test_a_step_that_half_precision_leaves_out_does_not_move_the_average(spoil, tmp_path):
    """The scaler leaves it out by itself: as `nan: skip` does, to the last bit."""
    spoil(lambda step: step == 5)
    for nan in ("skip", "stop"):
        _run(tmp_path / nan, nan=nan, precision="fp16", ema={"decay": 0.8})
    skip, stop = (cut.weights(tmp_path / nan, "last") for nan in ("skip", "stop"))
    assert all(torch.equal(skip[key], stop[key]) for key in skip)


def _stopping(bad, at: int = 7):
    """`bad` for `spoil`; at the first coming of step `at`, SIGTERM comes too."""
    sent = []

    def told(step: int) -> bool:
        if step == at and not sent:
            sent.append(step)
            os.kill(os.getpid(), cut.TERM)
        return bad(step)

    return told


def test_steps_that_were_left_out_before_an_interruption_are_counted_on(spoil, tmp_path):
    spoil(_stopping(lambda step: step in (3, 11)))
    with pytest.raises(Stopped):
        _run(tmp_path, nan="skip", duration="16st")
    assert _run(tmp_path, nan="skip", duration="16st", resume="auto")[0]["left_out_steps"] == [4, 12]


def test_an_interruption_gives_no_new_rollbacks(spoil, tmp_path):
    """Four steps are spoilt and three may be: the two before the interruption count."""
    spoil(_stopping(lambda step: step in (2, 5, 9, 12)))
    settings = {"nan": "rollback", "duration": "16st", "checkpoint": {"every": "3st"}}
    with pytest.raises(Stopped):
        _run(tmp_path, **settings)
    with pytest.raises(Diverged, match=r"\b13\b.*\b16\b.*\b3\b"):
        _run(tmp_path, resume="auto", **settings)


def _falling(metrics, monkeypatch):
    """Evaluations that give these metrics one after the other, and the last of them ever after."""
    real, left = evaluator.evaluate, list(metrics)

    def evaluate(*arguments, **options):
        return real(*arguments, **options)._replace(metric=left.pop(0) if len(left) > 1 else left[0])

    monkeypatch.setattr(evaluator, "evaluate", evaluate)


def test_after_a_rollback_the_best_model_is_the_one_that_is_told(spoil, tmp_path, monkeypatch):
    """A model better than all that follow is saved at step 12, and the training goes back to step 9."""
    fired = []
    spoil(lambda step: step == 13 and not fired and not fired.append(step))
    _falling([9.0, 5.0, 1.0, 7.0, 8.0], monkeypatch)  # lower is better: before, steps 6, 12, then 12 again, 18
    settings = {"duration": "18st", "eval": {"every": "6st", "batch": 13}, "checkpoint": {"every": "9st"}}
    weights = {}
    real = evaluator.export_model

    def saved(run, name):
        real(run, name)
        weights[run.history.done] = {key: value.clone() for key, value in run.loaded.model.state_dict().items()}

    monkeypatch.setattr(evaluator, "export_model", saved)
    summary, _ = _run(tmp_path, nan="rollback", **settings)
    assert summary["best"]["step"] == 12 and summary["best"]["metric"] == 7.0
    kept = torch.load(tmp_path / "run" / "model" / "weights.pt", weights_only=True)
    assert all(torch.equal(kept[key], value) for key, value in weights[12].items())


def test_speed_after_going_on_counts_new_steps_alone(tmp_path):
    cut.processes(1, cut.interrupted, tmp_path, "train", 39, cut.TERM, 0, "never", {"log_every": 8, "nan": "stop"})
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "run"))
    pending, done = len(state["history"]["pending"]), state["history"]["done"]
    assert pending
    windows, real = [], loop.finish
    try:
        loop.finish = lambda run, *rest: (windows.extend(run.history.windows), real(run, *rest))[1]
        cut.run(tmp_path, resume="auto", log_every=8)
    finally:
        loop.finish = real
    assert sum(steps for steps, _ in windows) == 16 - pending and done > pending


def test_a_save_between_two_looks_loses_no_time(tmp_path, monkeypatch):
    windows, real = [], loop.finish
    monkeypatch.setattr(loop, "finish", lambda run, *r: (windows.extend(run.history.windows), real(run, *r))[1])

    class Slow(Words):
        def batch(self, split, indices, **rest):
            time.sleep(0.02 if split == "train" else 0)
            return super().batch(split, indices, **rest)

    _run(tmp_path, task=Slow(), log_every=8, checkpoint={"every": "7st"}, eval={"every": "8st", "batch": 13})
    assert windows[0][0] == 8 and windows[0][1] > 8 * 0.02


def test_a_log_that_was_shortened_is_not_filled_up(tmp_path):
    log = runfolder.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step=1)
    log.write(step=2)
    size = log.bytes
    log.sync()
    with log.path.open("r+b") as file:
        file.truncate(size - 3)
    log.truncate(size)
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [{"step": 1}]
    log.path.unlink()
    log.truncate(size)
    assert log.bytes == 0


def _stopped(folder):
    cut.processes(1, cut.interrupted, folder, "train", 43, cut.KILL, 0, "never", {})
    return checkpoint.all_of(folder / "run")


def test_a_hint_reads_no_tensors_and_touches_no_running_run(tmp_path, monkeypatch):
    newest, older = _stopped(tmp_path)
    hashed = []
    monkeypatch.setattr(checkpoint, "digest", lambda file: hashed.append(file) or "x")
    same, model = recipe(**cut.SETTINGS), tmp_path / "no-model"
    assert resume.find_interrupted(tmp_path, same, model) == tmp_path / "run"
    assert resume.find_interrupted(tmp_path, recipe(), model) is None and not hashed
    monkeypatch.undo()
    aside = newest.with_name(f".{newest.name}.old")
    newest.rename(aside)
    lock = runfolder.hold(tmp_path / "run")
    assert resume.find_interrupted(tmp_path, same, model) is None
    assert checkpoint.newest(tmp_path / "run") == older and aside.exists()  # its owner is renaming now
    runfolder.release(lock)
    assert checkpoint.newest(tmp_path / "run") == newest


@pytest.mark.parametrize("text", ["[]", '{"format": 1}', '{"format": 1, "files": {"state.json": 3}}', '"x"'])
def test_a_damaged_manifest_is_a_torn_checkpoint(text, tmp_path):
    for step in (3, 6):
        folder = tmp_path / checkpoint.FOLDER / checkpoint.name_of(step)
        folder.mkdir(parents=True)
        files = {}
        for name in (checkpoint.STATE, checkpoint.SHARED):
            (folder / name).write_text("{}")
            files[name] = {"bytes": 2, "sha256": checkpoint.digest(folder / name)}
        (folder / checkpoint.MANIFEST).write_text(json.dumps({"format": 1, "files": files}))
    (folder / checkpoint.MANIFEST).write_text(text)
    assert checkpoint.newest(tmp_path).name == "step-00000003"


def test_what_is_no_checkpoint_of_a_run_is_one_sentence(tmp_path):
    newest, older = _stopped(tmp_path)
    copy, inside = tmp_path / "step-copy", newest.parent / "step-copy"
    for place in (copy, inside, tmp_path / newest.name):
        shutil.copytree(newest, place)
        with pytest.raises(UsageError, match=r"\bRUN/checkpoints/step-0*500\b"):
            checkpoint.locate_checkpoint(place)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        resume.point(tmp_path / "file", recipe(), {}, resume="auto")
    with pytest.raises(UsageError, match="goes on there"):
        resume.point(tmp_path / "new", recipe(), {}, resume=str(newest))
    said = []
    options = {"loaded": cut.picture_model(), "task": cut.Pictures(), "cpu": True, "say": said.append}
    train(recipe(**cut.SETTINGS), tmp_path, tmp_path / "run", resume=str(older), **options)
    (line,) = [line for line in said if "will be deleted" in line]
    assert newest.name in line and f"goes on from {older.name}" in line


def test_going_back_without_a_checkpoint_says_so(spoil, tmp_path, monkeypatch):
    spoil(lambda step: step == 3)
    monkeypatch.setattr(checkpoint, "newest", lambda *rest: None)
    with pytest.raises(Diverged, match="no complete checkpoint"):
        _run(tmp_path, nan="rollback")


def test_other_data_of_the_same_size_and_another_config_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert list(resume.origin_of(tmp_path)) == ["config.json"]
    data = {"train": 64, "eval": 13}
    state, task = {"data": data, "entry": "text-1"}, SimpleNamespace(size=data.get, prepared_as="text-2")
    with pytest.raises(UsageError, match=r"\b1\b.*\b2\b"):
        resume.check_data(state, task)
    resume.check_data(state, task, anyway=True)
    resume.check_data({"data": data}, task)


def test_folders_that_cannot_be_made_are_one_sentence(tmp_path):
    for place in (tmp_path / ("x" * 300), *(["/proc/x"] if shutil.os.path.isdir("/proc/self") else [])):
        with pytest.raises(UsageError, match="cannot be written"):
            runfolder.create(loop.Path(place))


def _train(**changes):
    return Train.model_validate({"duration": "3ep", "batch": 16, "optim": {"lr": 1e-3}} | changes)


def test_numbers_and_names_that_nothing_can_be_done_with(tmp_path):
    for changes in ({"seed": 2**63}, {"optim": {"lr": float("inf")}}, {"clip_grad": float("nan")}):
        with pytest.raises(ValidationError):
            _train(**changes)
    assert _run(tmp_path, duration="1st", seed=2**63 - 1)[0]["seed"] == 2**63 - 1
    whole = {"name": "a", "kind": "experiment", "source": "x", "task": {"name": "digits"}, "arms": {"original": {}}}
    whole["train"] = {"duration": "3ep", "batch": 16, "optim": {"lr": 1e-3}}
    assert ExperimentRecipe.model_validate(whole).name == "a"
    for wrong in ({"name": "../../esc"}, {"name": ".."}, {"name": ""}, {"seeds": [2**63]}):
        with pytest.raises(ValidationError):
            ExperimentRecipe.model_validate(whole | wrong)
    with pytest.raises(ValidationError, match="folders bear it"):
        type(recipe()).model_validate(recipe().model_dump() | {"name": "a/b"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dry-run", "--eval-only"], "--dry-run and --eval-only exclude"),
        (["--dry-run", "--resume", "auto"], "--dry-run and --resume auto exclude"),
        (["--eval-only", "--resume-anyway"], "--eval-only and --resume-anyway exclude"),
        (["--resume", ""], "--resume is empty"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(flags, said, tmp_path):
    from leansurgeon.cli.main import app

    found = CliRunner().invoke(app, ["retrain", str(tmp_path), *flags])
    assert isinstance(found.exception, (UsageError, SystemExit)) and said in f"{found.exception}{found.output}"


def test_a_disk_that_cannot_hold_the_models_is_said_before_the_first_step(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=4 * 1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LeanSurgeonError, match=r"needs .* kB, .* has 4 kB free"):
        cut.run(tmp_path / "not" / "there")
    assert not (tmp_path / "not").exists()


ROOM = {
    "by-the-clock": {"nan": "stop"},
    "last-alone": {"checkpoint": {"keep_best": False}},
    "two-checkpoints": {"checkpoint": {"every": "2st"}},
    "one-of-sgd": {"checkpoint": {"every": "3st", "keep_last": 1}, "optim": {"name": "sgd", "lr": 1e-2}},
    "without-momentum": {"checkpoint": {"every": "3st"}, "optim": {"name": "sgd", "lr": 1e-2, "momentum": 0}},
    "moved-momentum": {
        "checkpoint": {"every": "3st"},
        "optim": {"name": "sgd", "lr": 1e-2, "momentum": 0},
        "schedule": {"name": "one-cycle"},
    },
    "averaged": {"checkpoint": {"every": "1st", "keep_last": 3, "keep_best": False}, "ema": {"decay": 0.5}},
    "fewer-than-kept": {"checkpoint": {"every": "4st", "keep_last": 5}, "optim": {"name": "lamb", "lr": 1e-3}},
    "rolled-back": {"checkpoint": {"every": "5st"}, "nan": "rollback"},
}


@pytest.mark.parametrize("case", ROOM)
def test_the_room_that_is_asked_for_is_what_the_run_takes_at_its_fullest(case, tmp_path, monkeypatch):
    asked, seen, place, look = [], [], runfolder.move_in_place, checkpoint.check_room

    def watched(aside, path):
        files = (file for file in (tmp_path / "run").rglob("*") if file.suffix in (".pt", ".safetensors"))
        seen.append(sum(file.stat().st_size for file in files))
        place(aside, path)

    def room(folder, needed, **rest):
        asked.append(needed)
        look(folder, needed, **rest)

    monkeypatch.setattr(runfolder, "move_in_place", watched)
    monkeypatch.setattr(checkpoint, "check_room", room)
    _falling([9.0, *range(8, 0, -1)], monkeypatch)  # every evaluation brings a better model
    wide = StandIn(torch.nn.Sequential(torch.nn.Embedding(11, 20_000), torch.nn.Linear(20_000, 11)))
    options = {"loaded": wide, "task": Words(), "cpu": True, "say": lambda text: None}
    train(recipe(**{"eval": {"every": "2st", "batch": 13}} | ROOM[case]), tmp_path, tmp_path / "run", **options)
    no_moments_yet = 2 * 4 * 22 * 20_000 if case == "rolled-back" else 0  # in its checkpoint before the first step
    assert asked[0] - no_moments_yet == pytest.approx(max(seen), rel=0.01)  # generators and names take a little, too


def test_a_run_that_is_given_up_makes_room_for_the_next(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    options = {"loaded": word_model(), "task": Words(), "cpu": True, "say": lambda text: None, "replace": True}
    old = tmp_path / "run"
    (old / "last").mkdir(parents=True)
    (old / "recipe.yaml").write_text("")
    (old / "last" / "weights.pt").write_bytes(bytes(100))
    with pytest.raises(LeanSurgeonError, match=r"\bmodels\b.*\d [kMGT]?B\b"):
        train(recipe(), tmp_path, old, **options)
    assert (old / "last" / "weights.pt").stat().st_size == 100  # it is given up when the next one begins
    (old / "last" / "weights.pt").write_bytes(bytes(100_000))
    assert train(recipe(), tmp_path, old, **options).steps == 8


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_disk_that_runs_full_is_named_whoever_notices_it(number, tmp_path):
    """safetensors raises an error of its own, which only quotes the system's."""

    def fill(folder):
        raise RuntimeError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    with pytest.raises(LeanSurgeonError, match=r"\bdisk is full\b.*\bmodel\b"):
        runfolder.write_folder(tmp_path / "model", fill)
    assert list(tmp_path.iterdir()) == []
