"""A training that was interrupted anywhere and resumed ends as one that never was: every loss, weight and average."""

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from leansurgeon.checkpoints.publish.durable import PART, me
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Stopped, UsageError
from leansurgeon.experiment.arms import list_wanted_shapes
from leansurgeon.experiment.jobs import make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import carry_out_job
from leansurgeon.training.loop import train
from leansurgeon.training.processes.agree import ProcessGroup
from leansurgeon.training.recipe.schema import ExperimentRecipe
from leansurgeon.training.runs import checkpoint, resume
from leansurgeon.training.runs import folder as runfolder
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The training that nobody interrupts, on 1 and 2 processes."""
    folders = {count: tmp_path_factory.mktemp(f"whole{count}") for count in (1, 2)}
    for count, folder in folders.items():
        assert cut.processes(count, cut.run, folder) == [0] * count
    return folders


@pytest.fixture(scope="module")
def one_killed(tmp_path_factory):
    """A training that was killed in step 11, with the checkpoints of steps 9 and 6."""
    folder = tmp_path_factory.mktemp("killed")
    assert cut.processes(1, cut.interrupted, folder, "train", 43, cut.KILL, 0, "never", {}) == [-9]
    return folder


@pytest.fixture
def killed(one_killed, tmp_path):
    """A copy of it, to be damaged."""
    shutil.copytree(one_killed / "run", tmp_path / "run")
    return tmp_path / "run"


# where, which time, signal, exit code
CASES = {
    "killed-mid-epoch": ("train", 43, cut.KILL, -9),
    "killed-in-a-save": ("save", 8, cut.KILL, -9),
    "killed-before-any-save": ("train", 5, cut.KILL, -9),
    "sigusr1-in-evaluation": ("eval", 17, cut.USR1, 75),
    "sigterm-before-the-first-step": ("eval", 2, cut.TERM, 75),
    "ctrl-c": ("train", 43, cut.INT, 130),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_goes_on_as_if_nothing_had_been(case, whole, tmp_path):
    where, count, number, code = CASES[case]
    assert cut.processes(1, cut.interrupted, tmp_path, where, count, number, 0, "never", {}) == [code]
    run = tmp_path / "run"
    assert not (run / "summary.json").exists()
    if code > 0:
        said = (tmp_path / "said-0").read_text()
        assert f"--resume {run}" in said and "everything is saved" in said
        # In the middle of an evaluation it does not wait for its end.
        assert checkpoint.read_state(checkpoint.newest(run))["history"]["evaluate"] == (where == "eval")
    left = run / f".recipe.yaml{PART}{replace(me(), start=1).tag}"  # of a process that was killed
    left.write_text("half")
    assert cut.processes(1, cut.run, tmp_path, lambda split: None, "auto") == [0]
    assert not left.exists() and not (run / "checkpoints").exists()
    cut.assert_same(tmp_path, whole[1])


TWICE = {
    "killed-in-a-save": ("save", 8, cut.KILL, 0, -9),
    "sigterm-on-one": ("train", 20, cut.TERM, 1, 75),
    "sigterm-in-evaluation": ("eval", 9, cut.TERM, 1, 75),
}


@pytest.mark.parametrize("case", TWICE)
def test_two_processes_go_on_as_if_nothing_had_been(case, whole, tmp_path):
    where, count, number, rank, code = TWICE[case]
    codes = cut.processes(2, cut.interrupted, tmp_path, where, count, number, rank, "never", {})
    assert codes[rank] == code and codes[1 - rank] != 0
    if code == 75:
        assert codes == [75, 75]  # both agreed, both saved
        history = checkpoint.read_state(checkpoint.newest(tmp_path / "run"))["history"]
        assert 0 < history["done"] < 16
        assert history["evaluate"] or where == "train"  # an evaluation is left in its middle
    assert cut.processes(2, cut.run, tmp_path, lambda split: None, "auto") == [0, 0]
    cut.assert_same(tmp_path, whole[2])


def _interrupt(job) -> None:
    """An experiment's training that gets SIGTERM after its first checkpoint."""
    real = checkpoint.write

    def once(*arguments, **options):
        checkpoint.write = real
        os.kill(os.getpid(), cut.TERM)
        return real(*arguments, **options)

    checkpoint.write = once
    with pytest.raises(Stopped):
        carry_out_job(job)


@pytest.mark.slow
def test_an_experiment_goes_on_with_the_arm_that_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    settings = {"duration": "5st", "batch": 16, "optim": {"lr": 1e-3}, "checkpoint": {"every": "3st"}}
    parts = {"name": "test", "kind": "experiment", "source": "digits-vit", "task": {"name": "digits"}}
    parts |= {"train": settings, "arms": {"original": {}}, "measure": None}
    parsed = ExperimentRecipe.model_validate(parts)
    prepare_data(parsed, lambda text: None)
    wanted = list_wanted_shapes(parsed, open_source("digits-vit"))
    (job,) = make_jobs(parsed, tmp_path, wanted, "original", 1).values()
    assert cut.processes(1, _interrupt, job) == [0]
    assert carry_out_job(job).resumed_after == (3,)


# -- which checkpoint is taken, and for what -------------------------------------------------------

HARM = {
    "cut": (checkpoint.SHARED, lambda data: data[:-1]),
    "flipped": (checkpoint.SHARED, lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]),
    "missing": (checkpoint.SHARED, lambda data: None),
    "no-manifest": (checkpoint.MANIFEST, lambda data: None),
    "odd-files": (
        checkpoint.MANIFEST,
        lambda data: b'{"format": 1, "files": {"state.json": 3, "shared.safetensors": 3}}',
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_torn_checkpoint_is_never_picked(harm, killed):
    newest, older = checkpoint.all_of(killed)
    name, change = HARM[harm]
    damaged = change((newest / name).read_bytes())
    (newest / name).unlink()
    if damaged is not None:
        (newest / name).write_bytes(damaged)
    said = []
    assert checkpoint.newest(killed, said.append) == older
    assert newest.name in said[0]
    with pytest.raises(UsageError, match=r"step-\d+ is not\b.*\bcheckpoint\b"):
        checkpoint.locate_checkpoint(newest)


def test_a_training_goes_on_from_the_checkpoint_before_a_torn_one(killed, whole, tmp_path):
    file = checkpoint.all_of(killed)[0] / checkpoint.SHARED
    file.write_bytes(HARM["flipped"][1](file.read_bytes()))
    cut.run(tmp_path, resume="auto")
    cut.assert_same(tmp_path, whole[1])


def test_everything_is_on_the_disk_before_a_checkpoint_bears_its_name_and_old_ones_go_last(tmp_path, monkeypatch):
    done = []

    def watch(module, name, what, path_of):
        real = getattr(module, name)

        def watched(*arguments, **options):
            done.append((what, os.path.basename(path_of(*arguments))))
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, watched)

    watch(os, "fsync", "sync", lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
    watch(os, "rename", "rename", lambda old, new: new)
    watch(shutil, "rmtree", "remove", lambda path: path)
    tensors = {"x": torch.ones(2)}
    for step in (3, 6):
        done.clear()
        checkpoint.write(tmp_path, step, tensors, tensors, {"history": {}}, ProcessGroup(), keep=1)
    at = done.index(("rename", "step-00000006"))
    synced = [name for what, name in done[:at] if what == "sync"]
    for name in (checkpoint.SHARED, checkpoint.rank_file(0), f".{checkpoint.STATE}.", f".{checkpoint.MANIFEST}."):
        assert any(found.startswith(name) for found in synced), name
    assert synced[-1] == ".step-00000006.tmp"  # the folder, with the names in it
    assert done[at + 1] == ("sync", checkpoint.FOLDER) and ("remove", "step-00000003") in done[at + 2 :]


def go_on(folder, said=None, **options):
    """Resume the training in FOLDER as `options` say."""
    say = [].append if said is None else said.append
    wanted = recipe(**(cut.SETTINGS | options.pop("settings", {})))
    model, task = cut.picture_model(), cut.Pictures()
    return train(wanted, folder, folder / "run", loaded=model, task=task, cpu=True, say=say, **options)


def test_a_changed_recipe_is_refused_and_named(killed, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    changed = {"ema": {"decay": 0.9}}
    with pytest.raises(UsageError, match=r"train\.ema\.decay.*0\.8.*0\.9") as error:
        go_on(tmp_path, resume="auto", settings=changed)
    assert error.value.exit_code == 2 and "--resume-anyway" in error.value.hint
    with pytest.raises(UsageError, match="not empty"):
        go_on(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    summary = go_on(tmp_path, resume=str(killed), resume_anyway=True, settings=changed)
    assert summary.steps == 16 and summary.resumed_after == (9,) and summary.status == "done"
    assert "decay: 0.9" in (killed / "recipe.yaml").read_text()
    with pytest.raises(UsageError, match="is finished"):
        go_on(tmp_path, resume="auto")


def test_other_data_or_another_start_is_refused(tmp_path):
    state = {"recipe": recipe().model_dump(mode="json"), "origin": {"model.safetensors": "abc"}, "entry": "text-1"}
    state["data"] = {"train": 64, "eval": 13}
    with pytest.raises(UsageError, match=r"\b65\b.*\b64\b"):
        resume.check_data(state, Words(train=65))
    other = SimpleNamespace(size=state["data"].get, prepared_as="text-2")  # of the same size
    with pytest.raises(UsageError, match=r"\b1\b.*\b2\b"):
        resume.check_data(state, other)
    resume.check_data(state, other, anyway=True)
    with pytest.raises(UsageError, match=r"model\.safetensors differs"):
        resume.check_same(state, recipe(), {"model.safetensors": "xyz"}, None, anyway=False)
    # Trackers and the rhythm of saving change nothing that is computed.
    resume.check_same(state, recipe(checkpoint={"every": "7st"}), {"model.safetensors": "abc"}, None, anyway=False)
    (tmp_path / "config.json").write_text("{}")
    assert list(resume.origin_of(tmp_path)) == ["config.json"]


def test_a_hint_reads_no_tensors_and_touches_no_running_run(killed, tmp_path, monkeypatch):
    newest, older = checkpoint.all_of(killed)
    same, model = recipe(**cut.SETTINGS), tmp_path / "no-model"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "digest", lambda file: pytest.fail("it reads tensors"))
        assert resume.find_interrupted(tmp_path, same, model) == killed
        assert resume.find_interrupted(tmp_path, recipe(), model) is None
        assert checkpoint.locate_checkpoint(newest, hashes=False) == (killed, newest)
    aside = newest.with_name(f".{newest.name}.old")
    newest.rename(aside)
    lock = runfolder.hold(killed)
    assert resume.find_interrupted(tmp_path, same, model) is None
    assert checkpoint.newest(killed) == older and aside.exists()  # its owner is renaming now
    runfolder.release(lock)
    assert checkpoint.newest(killed) == newest


def test_what_is_no_checkpoint_of_a_run_is_one_sentence(killed, tmp_path):
    newest, older = checkpoint.all_of(killed)
    for place in (tmp_path / "step-copy", newest.parent / "step-copy", tmp_path / newest.name):
        shutil.copytree(newest, place)
        with pytest.raises(UsageError, match=r"\bRUN/checkpoints/step-0*500\b"):
            checkpoint.locate_checkpoint(place)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        resume.point(tmp_path / "file", recipe(), {}, resume="auto")
    with pytest.raises(UsageError, match="only be resumed there"):
        resume.point(tmp_path / "new", recipe(), {}, resume=str(newest))
    said = []
    go_on(tmp_path, said, resume=str(older))
    (line,) = [line for line in said if "will be deleted" in line]
    assert newest.name in line and f"goes on from {older.name}" in line


def test_old_checkpoints_are_pruned_and_a_full_disk_is_said(tmp_path, whole, monkeypatch):
    kept, said, real = [], [], checkpoint.write

    def watched(run_dir, step, *rest, **options):
        path = real(run_dir, step, *rest, **options)
        kept.append(
            [json.loads((folder / checkpoint.MANIFEST).read_text())["step"] for folder in checkpoint.all_of(run_dir)]
        )
        return path

    monkeypatch.setattr(checkpoint, "write", watched)
    cut.run(tmp_path / "a")
    assert kept[0] == [3] and kept[-1] == [15, 12]
    full = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: full)
    go_on(tmp_path / "b", said)
    lines = [line for line in said if line.startswith("No checkpoint at step 3: A checkpoint needs ")]
    assert lines and " MB, and " in lines[0] and "has 1 MB free" in lines[0] and "-o" in lines[0]
    cut.assert_same(tmp_path / "b", whole[1])  # training goes on
