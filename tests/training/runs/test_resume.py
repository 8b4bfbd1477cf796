"""A training that was interrupted anywhere and resumed ends as one that never was: every loss, weight and average."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch

from leansurgeon.checkpoints.publish.durable import PART, me
from leansurgeon.errors import UsageError
from leansurgeon.training.loop import train
from leansurgeon.training.processes.agree import ProcessGroup
from leansurgeon.training.runs import checkpoint, resume
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, recipe


@pytest.fixture(autouse=True)
def one_thread():
    """Runs within the test process sum in the same order as those in processes of their own."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The training that nobody interrupts, on 1 and 2 processes."""
    folders = {}
    for count in (1, 2):
        folders[count] = tmp_path_factory.mktemp(f"whole{count}")
        assert cut.processes(count, cut.run, folders[count]) == [0] * count
    return folders


def same(one, other) -> None:
    assert cut.told(one) == cut.told(other)
    assert cut.numbers(one) == cut.numbers(other)
    for name in ("model", "last"):
        a, b = cut.weights(one, name), cut.weights(other, name)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name


# where, which time, signal, rank that gets it, exit code
CASES = {
    "killed-mid-epoch": ("train", 43, cut.KILL, 0, -9),
    "killed-in-evaluation": ("eval", 17, cut.KILL, 0, -9),
    "killed-in-a-save": ("save", 8, cut.KILL, 0, -9),
    "killed-before-any-save": ("train", 5, cut.KILL, 0, -9),
    "sigterm-mid-epoch": ("train", 43, cut.TERM, 0, 75),
    "sigusr1-in-evaluation": ("eval", 17, cut.USR1, 0, 75),
    "sigterm-before-the-first-step": ("eval", 2, cut.TERM, 0, 75),
    "ctrl-c": ("train", 43, cut.INT, 0, 130),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_goes_on_as_if_nothing_had_been(case, whole, tmp_path):
    where, count, number, rank, code = CASES[case]
    assert cut.processes(1, cut.interrupted, tmp_path, where, count, number, rank, "never", {}) == [code]
    assert not (tmp_path / "run" / "summary.json").exists()
    if code > 0:
        said = (tmp_path / "said-0").read_text()
        assert f"--resume {tmp_path / 'run'}" in said and "everything is saved" in said
        # In the middle of an evaluation it does not wait for its end.
        history = checkpoint.read_state(checkpoint.newest(tmp_path / "run"))["history"]
        assert history["evaluate"] == (where == "eval")
    left = tmp_path / "run" / f".recipe.yaml{PART}{replace(me(), start=1).tag}"  # of a process that was killed
    left.write_text("half")
    assert cut.processes(1, cut.run, tmp_path, lambda split: None, "auto") == [0]
    assert not left.exists()
    same(tmp_path, whole[1])
    assert not (tmp_path / "run" / "checkpoints").exists()


TWICE = {
    "killed-mid-epoch": ("train", 23, cut.KILL, 1, -9),
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
    same(tmp_path, whole[2])


def test_the_state_that_is_tested_matters(whole, tmp_path):
    """Each part of a checkpoint is needed: without the moments, the average or the counters the end is another one."""
    cut.processes(1, cut.interrupted, tmp_path, "train", 43, cut.TERM, 0, "never", {})
    for part in ("optimizer.", "average.", "model."):
        folder = tmp_path / part
        shutil.copytree(tmp_path / "run", folder / "run")
        found = checkpoint.newest(folder / "run")
        shared, _ = checkpoint.read_tensors(found, 0)
        changed = {n: torch.zeros_like(t) if n.startswith(part) and "step" not in n else t for n, t in shared.items()}
        checkpoint._save(changed, found / checkpoint.SHARED)
        manifest = json.loads((found / "MANIFEST.json").read_text())
        manifest["files"][checkpoint.SHARED]["sha256"] = checkpoint.digest(found / checkpoint.SHARED)
        (found / "MANIFEST.json").write_text(json.dumps(manifest))
        cut.run(folder, resume="auto")
        assert cut.numbers(folder) != cut.numbers(whole[1]), part


@pytest.mark.parametrize("harm", ["cut", "flipped", "missing", "no-manifest"])
def test_a_torn_checkpoint_is_never_picked(harm, whole, tmp_path):
    cut.processes(1, cut.interrupted, tmp_path, "train", 43, cut.KILL, 0, "never", {})
    newest, older = checkpoint.all_of(tmp_path / "run")  # keep_last is 2
    file = newest / checkpoint.SHARED
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "flipped":
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    elif harm == "missing":
        file.unlink()
    else:
        (newest / "MANIFEST.json").unlink()
    said = []
    assert checkpoint.newest(tmp_path / "run", said.append) == older
    assert newest.name in said[0]
    with pytest.raises(UsageError, match=r"step-\d+ is not\b.*\bcheckpoint\b"):
        checkpoint.locate_checkpoint(newest)
    if harm == "flipped":  # who asks only which run is meant reads no tensors
        assert checkpoint.locate_checkpoint(newest, hashes=False) == (tmp_path / "run", newest)
    cut.run(tmp_path, resume="auto")
    same(tmp_path, whole[1])


def test_everything_is_on_the_disk_before_a_checkpoint_bears_its_name_and_old_ones_go_last(tmp_path, monkeypatch):
    real = {name: getattr(os, name) for name in ("fsync", "rename")} | {"rmtree": shutil.rmtree}
    done = []

    def fsync(handle):
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        real["fsync"](handle)

    def rename(old, new):
        done.append(("rename", os.path.basename(new)))
        real["rename"](old, new)

    def rmtree(path, **options):
        done.append(("remove", os.path.basename(path)))
        real["rmtree"](path, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
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


def test_a_changed_recipe_is_refused_and_named(tmp_path):
    cut.processes(1, cut.interrupted, tmp_path, "train", 43, cut.TERM, 0, "never", {})
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"train\.ema\.decay.*0\.8.*0\.9") as error:
        cut.run(tmp_path, resume="auto", ema={"decay": 0.9})
    assert error.value.exit_code == 2 and "--resume-anyway" in error.value.hint
    with pytest.raises(UsageError, match="not empty"):
        cut.run(tmp_path)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    changed = recipe(**(cut.SETTINGS | {"ema": {"decay": 0.9}}))
    folder = tmp_path / "run"
    task, model = cut.Pictures(), cut.picture_model()
    options = {"cpu": True, "say": lambda text: None, "resume": str(folder), "resume_anyway": True}
    summary = train(changed, tmp_path, folder, loaded=model, task=task, **options).as_dict()
    assert summary["steps"] == 16 and summary["resumed_after"] == [11] and summary["status"] == "done"
    assert "decay: 0.9" in (folder / "recipe.yaml").read_text()
    with pytest.raises(UsageError, match="is finished"):
        cut.run(tmp_path, resume="auto")


def test_other_data_or_another_start_is_refused():
    state = {"recipe": {}, "origin": {"model.safetensors": "abc"}, "data": {"train": 64, "eval": 13}}
    with pytest.raises(UsageError, match=r"\b65\b.*\b64\b"):
        resume.check_data(state, Words(train=65))
    state["recipe"] = recipe().model_dump(mode="json")
    with pytest.raises(UsageError, match=r"model\.safetensors differs"):
        resume.check_same(state, recipe(), {"model.safetensors": "xyz"}, None, anyway=False)
    # Trackers and the rhythm of saving change nothing that is computed.
    resume.check_same(state, recipe(checkpoint={"every": "7st"}), {"model.safetensors": "abc"}, None, anyway=False)


def test_old_checkpoints_are_pruned_and_a_full_disk_is_said(tmp_path, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    kept, said = [], []
    real = checkpoint.write

    def watched(run_dir, step, *rest, **options):
        path = real(run_dir, step, *rest, **options)
        kept.append([folder.name for folder in checkpoint.all_of(run_dir)])
        return path

    monkeypatch.setattr(checkpoint, "write", watched)
    cut.run(tmp_path / "a")
    assert kept[0] == ["step-00000003"] and kept[-1] == ["step-00000015", "step-00000012"]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    whole = recipe(**cut.SETTINGS)
    task, model = cut.Pictures(), cut.picture_model()
    train(whole, tmp_path, tmp_path / "b" / "run", loaded=model, task=task, cpu=True, say=said.append)
    lines = [line for line in said if line.startswith("No checkpoint at step 3: A checkpoint needs ")]
    assert lines and " MB, and " in lines[0] and "has 1 MB free" in lines[0] and "-o" in lines[0]
    assert cut.told(tmp_path / "a") == cut.told(tmp_path / "b")  # training goes on


def _first_part(job) -> None:
    """An experiment's training that gets SIGTERM after its first checkpoint."""
    from leansurgeon.errors import Stopped
    from leansurgeon.experiment.side_by_side import carry_out_job

    real = checkpoint.write

    def once(*arguments, **options):
        checkpoint.write = real
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    checkpoint.write = once
    with pytest.raises(Stopped):
        carry_out_job(job)


@pytest.mark.slow
def test_an_experiment_goes_on_with_the_arm_that_was_interrupted(tmp_path, monkeypatch):
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.experiment.arms import list_wanted_shapes
    from leansurgeon.experiment.jobs import make_jobs, prepare_data
    from leansurgeon.experiment.side_by_side import carry_out_job
    from leansurgeon.training.recipe.schema import ExperimentRecipe

    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    settings = {"duration": "8st", "batch": 16, "optim": {"lr": 1e-3}, "checkpoint": {"every": "3st"}, "log_every": 1}
    whole = {"name": "test", "kind": "experiment", "source": "digits-vit", "task": {"name": "digits"}}
    whole |= {"train": settings | {"eval": {"batch": 360}}, "arms": {"original": {}}, "measure": None}
    parsed = ExperimentRecipe.model_validate(whole)
    wanted = list_wanted_shapes(parsed, open_source("digits-vit"))
    summaries = []
    for name in ("cut", "whole"):
        (job,) = make_jobs(parsed, tmp_path / name, wanted, "original", 1).values()
        prepare_data(parsed, lambda text: None)
        if name == "cut":
            assert cut.processes(1, _first_part, job) == [0]
        summaries.append(carry_out_job(job).as_dict())
    first, second = summaries
    assert first["resumed_after"] == [3] and second["resumed_after"] == []
    assert first["final"] == second["final"] and first["best"] == second["best"]


def _scaled(folder, resume, kill_at) -> None:
    """fp16 with a scale that has to come down at the start and rises every second step: no two steps share it."""
    from leansurgeon.training import distributed
    from leansurgeon.training.optimizer import Trainer

    distributed.make_scaler = lambda precision, device: torch.amp.GradScaler(
        "cpu", init_scale=2.0**20, growth_interval=2
    )
    real = Trainer.step

    def step(self, at, batches):
        if at == kill_at:
            os.kill(os.getpid(), cut.KILL)
        return real(self, at, batches)

    Trainer.step = step
    cut.run(folder, resume=resume, precision="fp16", eval={"every": "16st", "batch": 13})


def test_the_scale_of_half_precision_goes_on_where_it_was(tmp_path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert cut.processes(1, _scaled, tmp_path / "whole", "never", None) == [0]
    assert cut.processes(1, _scaled, tmp_path / "parts", "never", 8) == [-9]
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "parts" / "run"))
    assert state["scaler"]["scale"] != 2.0**20
    assert cut.processes(1, _scaled, tmp_path / "parts", "auto", None) == [0]
    assert cut.told(tmp_path / "parts") == cut.told(tmp_path / "whole")
    a, b = cut.weights(tmp_path / "whole", "last"), cut.weights(tmp_path / "parts", "last")
    assert all(torch.equal(a[key], b[key]) for key in a)
