"""Where the cache is, and where it goes when a home cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leansurgeon.progress import size_text
from leansurgeon.reading import cache_folder as room
from tests.support.models import strangers


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home in which no folder can be made, for root too."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").write_text("")
    (tmp_path / "tmp").mkdir()
    for name in ("LEANSURGEON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(room.tempfile, "tempdir", str(tmp_path / "tmp"))
    room.usable.cache_clear()
    yield tmp_path
    room.usable.cache_clear()


def test_a_home_that_cannot_be_written_is_said_once_and_work_goes_on(home):
    source, data = strangers.model(home / "source", "llama"), strangers.texts(home / "data")
    done = strangers.healed(source, data, home / "run")
    assert done.returncode == 0, done.stderr
    said, other = " ".join(done.stderr.split()), home / "tmp" / f"leansurgeon-cache-{os.getuid()}"
    assert said.count("cannot be written") == 1 and str(other) in said
    assert other.stat().st_mode & 0o777 == 0o700 and any(other.iterdir())


def test_a_folder_of_somebody_else_is_not_taken(home, monkeypatch):
    (home / "tmp" / f"leansurgeon-cache-{os.getuid()}").symlink_to(home / "home")
    found = room.cache_folder()
    assert found.is_dir() and not found.is_symlink() and found.parent == home / "tmp"
    monkeypatch.setenv("LEANSURGEON_CACHE", "/nowhere/at/all")
    assert room.cache_folder() == Path("/nowhere/at/all")  # what is asked for is refused by whoever writes there


@pytest.mark.parametrize(("size", "said"), [(0, "0 bytes"), (999, "999 bytes"), (48e3, "48 kB"), (3.25e9, "3.25 GB")])
def test_sizes_are_in_the_unit_that_shows_them(size, said):
    assert size_text(size) == said
