"""An interrupted cut goes on: at whatever step it stopped, the result is that of an uninterrupted one, bit for bit."""

import errno
import json
import re

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.commands.shrink import ShrinkRequest, shrink
from leansurgeon.errors import OutOfMemory
from leansurgeon.surgery import choose_layers, resume
from leansurgeon.surgery import shrink as surgery
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.resume import ResumeState, Step, place_of
from leansurgeon.surgery.shrink import carry_out, decide
from tests.conftest import build
from tests.support.command_line import leansurgeon
from tests.support.models.word_models import WORDS, words
from tests.surgery.cuts import few_samples


class Stop(BaseException):
    """As sudden as a signal."""


def tensors(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def decisions(folder) -> dict:
    """All that was decided, but how long it took."""
    text = re.sub(r'"(seconds|steps_taken_over)": [\d.e-]+', '"": 0', (folder / "surgery.json").read_text())
    return json.loads(text)["decided"]


CUTS = [
    ("gpt2", {"layers": "2"}, Method()),
    ("bert", {"heads": "2x", "head_dim": "split"}, Method(keep="0,1,3", heal="closed")),
]


@pytest.mark.parametrize(("family", "wanted", "method"), CUTS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_cut_that_was_stopped_at_any_step_goes_on(family, wanted, method, saved, tmp_path, monkeypatch):
    steps = plan(open_source(str(saved(family)[0])), RequestedShape(**wanted), 0, method, calibrated=True)
    samples, whole, out = few_samples(family), tmp_path / "whole", tmp_path / "out"
    names: list[str] = []
    put = ResumeState.put

    def counted(self, name, *rest):
        put(self, name, *rest)
        names.append(name)

    def stops(self, name, *rest):
        counted(self, name, *rest)
        raise Stop

    monkeypatch.setattr(ResumeState, "put", counted)
    carry_out(decide(steps, samples, output=whole), whole, check=False)
    assert names[0] == "choice" and len(names) > 2 and not place_of(whole).exists()
    expected = list(names)
    names.clear()
    monkeypatch.setattr(ResumeState, "put", stops)
    for _ in expected:  # every attempt comes one step further
        with pytest.raises(Stop):
            decide(steps, samples, output=out, resume=True)
    assert names == expected
    carry_out(decide(steps, samples, output=out, resume=True), out, check=False)
    assert tensors(out) == tensors(whole) and not place_of(out).exists()
    assert decisions(out) == decisions(whole)


def test_a_cut_on_own_samples_without_room_is_not_made_by_weights(saved, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("leansurgeon.surgery.calibrate.calibrate", full)
    with pytest.raises(OutOfMemory, match="ran out of memory"):
        shrink(ShrinkRequest(source=str(saved("vit")[0]), layers=2, out=tmp_path / "out"), print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "resume"), [("b", True), ("a", False)])
def test_steps_of_another_cut_are_not_taken(key, resume, tmp_path):
    kept = ResumeState(tmp_path / "state", "a")
    kept.put("step", Step({"x": np.arange(3, dtype=np.float32)}, {"number": 0.1}))
    found = ResumeState(tmp_path / "state", "a", resume=True).get("step")
    assert found.record == {"number": 0.1} and found.tensors["x"].tolist() == [0, 1, 2]
    other = ResumeState(tmp_path / "state", key, resume=resume)
    assert other.get("step") is None and not (tmp_path / "state").exists()


def test_a_step_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    named, synced = tmp_path / "state" / "step", []

    def sync(folder):
        synced.append(sorted(file.name for file in folder.iterdir()))
        assert not named.exists()

    monkeypatch.setattr(resume, "sync_tree", sync)
    ResumeState(tmp_path / "state", "a").put("step", Step({"x": np.zeros(2, np.float32)}, {}))
    assert synced == [["0.npy", "record.json"]] and named.is_dir()


FAILURES = {
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "memory": MemoryError(),
    "a defect": ZeroDivisionError("division by zero"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A command for a calibrated cut, but for its output, and what it makes."""
    root = tmp_path_factory.mktemp("finished")
    build("gpt2").save_pretrained(root / "source")
    words(root / "source")
    lines = (f"{WORDS[i % 50]} {WORDS[(3 * i) % 50]} {WORDS[(7 * i) % 50]}" for i in range(400))
    (root / "text.txt").write_text("\n".join(lines))
    call = ("shrink", root / "source", "--layers", "3", "--calibrate", root / "text.txt", "--samples", "8", "-o")
    whole = leansurgeon(*call, root / "whole", "--no-proof")
    assert whole.returncode == 0, whole.stderr
    return call, root / "whole"


@pytest.mark.parametrize(("failure", "where"), [*((one, "apply") for one in FAILURES), ("a full disk", "prove")])
def test_a_cut_that_fails_at_its_end_is_not_made_again(failure, where, finished, tmp_path, monkeypatch):
    """Whatever the exception: what was calibrated is kept, and the rerun walks through no layer."""
    call, whole = finished

    def fail(*_, **__):
        raise FAILURES[failure]

    with monkeypatch.context() as patch:
        patch.setattr(surgery, where, fail)
        try:
            done = leansurgeon(*call, tmp_path / "out")
            assert done.returncode and "--resume" in done.stderr and "Traceback" not in done.stderr, done.stderr
        except ZeroDivisionError:
            assert failure == "a defect"
    assert place_of(tmp_path / "out").is_dir() and not (tmp_path / "out").exists()
    monkeypatch.setattr("leansurgeon.surgery.calibrate.run_candidates", fail)
    monkeypatch.setattr(choose_layers, "measure_layers", fail)
    again = leansurgeon(*call, tmp_path / "out", "--resume", "--no-proof")
    assert again.returncode == 0, again.stderr
    assert not place_of(tmp_path / "out").exists()
    assert tensors(tmp_path / "out") == tensors(whole) and decisions(tmp_path / "out") == decisions(whole)
