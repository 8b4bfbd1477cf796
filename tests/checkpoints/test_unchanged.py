"""A source that changes while it is read: an error, and no output."""

import json
import os
import shutil
from pathlib import Path

import pytest

from leansurgeon.checkpoints import digests, weights
from leansurgeon.checkpoints.source import open_source
from tests.support.command_line import leansurgeon


def in_place(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.seek(-8, os.SEEK_END)
        handle.write(b"\x00" * 8)


def in_place_and_set_back(file: Path) -> None:
    state = file.stat()
    in_place(file)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def replaced(file: Path) -> None:
    other = shutil.copy(file, file.with_name("other"))
    in_place(Path(other))
    os.replace(other, file)


def shorter(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 64)


def gone(file: Path) -> None:
    file.unlink()


def longer_config(file: Path) -> None:
    with file.with_name("config.json").open("a") as config:
        config.write(" ")


@pytest.fixture
def late(monkeypatch):
    """Do something to the weight file, once, in the middle of the writing."""
    real = weights.copy_range

    def make(act) -> None:
        acts = [act]

        def copy_range(entry, out):
            if acts:
                acts.pop()(entry.file)
            return real(entry, out)

        monkeypatch.setattr(weights, "copy_range", copy_range)

    return make


def test_a_change_is_noticed_and_nothing_is_written(saved, tmp_path, late):
    folder, _ = saved("vit")
    before = {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.json")}
    for act in (in_place, in_place_and_set_back, replaced, shorter, gone, longer_config):
        for name, content in before.items():
            (folder / name).write_bytes(content)
        late(act)
        done = leansurgeon("shrink", folder, "--heads", "8", "--no-proof", "-o", tmp_path / "out")
        assert done.returncode == 1 and "has changed since" in done.stderr, act
        assert ("config.json" if act is longer_config else "model.safetensors") in done.stderr
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_undo_notices_it_too(saved, tmp_path, late):
    folder, _ = saved("vit")
    assert leansurgeon("shrink", folder, "--heads", "8", "--no-proof", "-o", tmp_path / "wide").returncode == 0
    late(in_place_and_set_back)
    done = leansurgeon("undo", tmp_path / "wide", "-o", tmp_path / "out")
    assert done.returncode == 1 and "has changed since" in done.stderr and not (tmp_path / "out").exists()


def test_a_link_to_it_or_another_mode_is_no_change(saved, tmp_path, late):
    """Caches do so all the time; the digest that was begun tells."""
    folder, _ = saved("vit")
    late(lambda file: (os.link(file, file.with_name("link")), file.chmod(0o600)))
    done = leansurgeon("shrink", folder, "--heads", "8", "--no-proof", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "surgery.json").read_text())
    assert record["source"]["sha256"] == {"model.safetensors": digests.digest(folder / "model.safetensors")}


def test_every_file_that_is_read_is_watched(saved):
    folder, _ = saved("vit")
    (folder / "notes.txt").write_text("x")
    assert {file.name for file in open_source(str(folder)).seen} == {"config.json", "model.safetensors"}
