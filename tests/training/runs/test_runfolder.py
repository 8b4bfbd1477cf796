"""Run folders, progress and memory: nothing half-written is taken for whole, and people see the right line."""

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from leansurgeon.checkpoints.recorded.part import DamagedRecord
from leansurgeon.errors import LeanSurgeonError, RunFolderReplaced, UnsupportedModel, UsageError
from leansurgeon.training.observe import PeakMemory, Progress
from leansurgeon.training.runs import folder as runfolder
from tests.support.processes.forks import forked
from tests.support.training_standin import Words, run_training


def test_a_folder_that_could_not_be_written_leaves_the_old_one(tmp_path):
    target = tmp_path / "model"
    runfolder.write_folder(target, lambda folder: (folder / "a").write_text("old"))

    def half(folder):
        (folder / "a").write_text("new")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(LeanSurgeonError, match="disk is full") as error:
        runfolder.write_folder(target, half)
    assert error.value.exit_code == 1
    assert (target / "a").read_text() == "old" and os.listdir(tmp_path) == ["model"]
    runfolder.write_folder(target, lambda folder: (folder / "b").write_text("new"))
    assert os.listdir(target) == ["b"] and os.listdir(tmp_path) == ["model"]


def test_a_file_is_replaced_at_once(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    runfolder.write_json(path, {"x": 1})
    with pytest.raises(ValueError):
        runfolder.write_json(path, {"x": float("nan")})

    def no_room(handle):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(LeanSurgeonError, match="disk is full"):
        runfolder.write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 1} and os.listdir(tmp_path) == ["summary.json"]


def test_a_log_is_no_link(tmp_path):
    """In somebody else's run it may lead to a file that would be cut, or grow."""
    (tmp_path / "mine").write_text("thesis\n")
    (tmp_path / "metrics.jsonl").symlink_to("mine")
    log = runfolder.MetricsLog(tmp_path / "metrics.jsonl")
    for change in (lambda: log.write(step=1), lambda: log.truncate(0)):
        with pytest.raises(UsageError, match=r"metrics\.jsonl"):
            change()
    assert (tmp_path / "mine").read_text() == "thesis\n"


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_training_whose_folder_goes_ends_in_an_error_and_writes_nothing_there(split, replaced, tmp_path):
    folder = tmp_path / "run"

    class Deleting(Words):
        seen = 0

        def batch(self, of, indices, **rest):
            self.seen += of == split and folder.exists()
            if self.seen == 6:
                self.seen += 1
                shutil.rmtree(folder)
                if replaced:
                    folder.mkdir()
            return super().batch(of, indices, **rest)

    with pytest.raises(RunFolderReplaced) as error:
        run_training(tmp_path, task=Deleting(), log_every=100, checkpoint={"every": "2st"})
    assert str(folder) in error.value.message and error.value.exit_code == 1
    assert (list(folder.iterdir()) == []) if replaced else not folder.exists()


def test_newest_shrunk_model(tmp_path):
    def shrunk(name, age):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "surgery.json").write_text("{}")
        os.utime(folder / "surgery.json", (1000 - age, 1000 - age))

    with pytest.raises(UsageError, match="no shrunk model"):
        runfolder.newest_shrunk(tmp_path)
    shrunk("old", 50)
    shrunk("group/new", 20)
    shrunk("run/model", 5)  # a trained copy, younger than all
    (tmp_path / "run" / "recipe.yaml").write_text("")
    shrunk(".new.tmp", 1)  # somebody is still writing it
    shrunk("digits-vit/starts/lean-s0", 2)  # what an arm of an experiment starts from
    assert runfolder.newest_shrunk(tmp_path) == tmp_path / "group" / "new"


def test_a_run_and_its_model_are_known_from_within(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        runfolder.model_of(model)
    (model / "config.json").write_text("{}")
    assert runfolder.find_run(model) is None
    (tmp_path / "recipe.yaml").write_text("")
    assert runfolder.model_of(tmp_path) == runfolder.model_of(model) == model
    assert runfolder.find_run(model) == runfolder.find_run(tmp_path) == tmp_path
    monkeypatch.chdir(model)
    assert runfolder.find_run(".") == tmp_path and runfolder.is_trained(Path("."))
    assert (runfolder.find_run("..") / "recipe.yaml").is_file()
    with pytest.raises(UsageError, match="no model folder"):
        runfolder.model_of(tmp_path / "nowhere")


def test_names_of_runs_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.setattr(runfolder.time, "strftime", lambda form: "20260131-142501")
    first = runfolder.new_run(tmp_path, "digits-vit", 2)
    first.mkdir()
    assert first.name == "digits-vit-s2-20260131-142501"
    assert runfolder.new_run(tmp_path, "digits-vit", 2).name == first.name + "-2"


class Terminal(io.StringIO):
    def isatty(self):
        return True


SHOWN = dict(loss=1.25, lr=1e-3, rate=45_200, unit="tokens/s", eta=187, waiting=0.021, memory=17_300_000_000)
LINE = "  loss 1.2500  lr 1.00e-03  45.2k tokens/s  data 2 %  17.30 GB  eta 3m07s"


def test_progress_rewrites_its_line_on_a_terminal_only():
    terminal, file, untimed = Terminal(), io.StringIO(), io.StringIO()
    for stream in (terminal, file):
        now = iter(range(100))
        progress = Progress(stream=stream, clock=lambda now=now: next(now))
        progress.steps = 20
        for step in range(1, 6):
            progress.step(step, **SHOWN, fraction=step / 20)
        progress.say("evaluated")
        progress.step(20, **SHOWN, fraction=1.0)
    drawn = terminal.getvalue()
    assert drawn.count("\r") >= 5 and drawn.index("step 5/20") < drawn.index("evaluated\n")
    assert file.getvalue().splitlines() == ["step 1/20" + LINE, "evaluated", "step 20/20" + LINE]
    progress = Progress(stream=untimed)
    progress.steps = None  # a training that ends by the clock
    progress.step(7, **SHOWN, fraction=0.3333)
    assert untimed.getvalue() == f"step 7 (33.3 %){LINE}\n"


def test_peak_memory_sees_what_was_held_and_freed(tmp_path):
    """In a process of its own: what other tests have left in this one comes and goes meanwhile."""

    def watched() -> None:
        peak = PeakMemory(torch.device("cpu"))
        torch.ones(2**24)  # 64 MiB before a training count as long as they are held
        peak.resume()
        before = peak.read()
        peak.resume()
        torch.ones(2**25)
        print(peak.read() - before)

    done = forked(watched, tmp_path)
    assert 100 * 2**20 < int(done.stdout) < 160 * 2**20, done


def test_what_was_measured_is_said_where_it_cannot_be_kept(tmp_path):
    (tmp_path / "taken").mkdir()
    said: list[str] = []
    for name, number in (("kept.json", 1), ("taken", 1), ("none.json", float("nan"))):
        runfolder.keep_beside(tmp_path / name, {"a": number}, said.append)
    assert json.loads((tmp_path / "kept.json").read_text()) == {"a": 1}
    assert len(said) == 3 and {path.name for path in tmp_path.iterdir()} == {"kept.json", "taken"}


def test_a_damaged_record_is_no_sign_that_something_was_learned(tmp_path):
    """Who builds on a model is told, wherever it is asked whether its weights know anything."""
    (tmp_path / "surgery.json").write_text("{")
    with pytest.raises(DamagedRecord):
        runfolder.has_learned(tmp_path)
    (tmp_path / "surgery.json").unlink()
    assert runfolder.has_learned(tmp_path)
