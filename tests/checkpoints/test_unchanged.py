"""A source that changes while it is read: an error, and no output."""

from __future__ import annotations

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


@pytest.fixture
def late(monkeypatch):
    """Run something in the middle of the writing."""

    def make(act, name: str = "model.safetensors") -> None:
        real = weights.copy_range
        done = []

        def copy_range(entry, out):
            if not done:
                done.append(act(entry.file.with_name(name)))
            return real(entry, out)

        monkeypatch.setattr(weights, "copy_range", copy_range)

    return make


@pytest.mark.parametrize("act", [in_place, in_place_and_set_back, replaced, shorter, gone])
@pytest.mark.parametrize("command", ["shrink", "undo"])
def test_a_change_is_noticed_and_nothing_is_written(command, act, saved, tmp_path, late):
    folder, _ = saved("vit")
    words = ["shrink", folder, "--heads", "8", "-o", tmp_path / "out"]
    if command == "undo":
        assert leansurgeon("shrink", folder, "--heads", "8", "-o", tmp_path / "wide").returncode == 0
        words = ["undo", tmp_path / "wide", "-o", tmp_path / "out"]
    late(act)
    done = leansurgeon(*words)
    assert done.returncode == 1 and "model.safetensors" in done.stderr and "has changed since" in done.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_so_is_a_change_of_the_config(saved, tmp_path, late):
    folder, _ = saved("vit")
    late(lambda file: file.write_text(file.read_text() + " "), "config.json")
    done = leansurgeon("shrink", folder, "--heads", "8", "-o", tmp_path / "out")
    assert done.returncode == 1 and "config.json" in done.stderr and not (tmp_path / "out").exists()


def test_a_link_to_it_or_another_mode_is_no_change(saved, tmp_path, late):
    """Caches do so all the time; the digest that was begun tells."""
    folder, _ = saved("vit")
    late(lambda file: (os.link(file, file.with_name("link")), file.chmod(0o600)))
    done = leansurgeon("shrink", folder, "--heads", "8", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "surgery.json").read_text())
    assert record["source"]["sha256"] == {"model.safetensors": digests.digest(folder / "model.safetensors")}


def test_every_file_that_is_read_is_watched(saved):
    folder, _ = saved("vit")
    (folder / "notes.txt").write_text("x")
    assert {file.name for file in open_source(str(folder)).seen} == {"config.json", "model.safetensors"}
