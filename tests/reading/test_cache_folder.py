"""Where the cache is, and what is said of one that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from leansurgeon.progress import size_text
from leansurgeon.reading.cache_folder import cache_folder
from tests.support.models import strangers


def test_where_the_cache_is(monkeypatch):
    for name in ("LEANSURGEON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, expected in (
        ("HOME", "/home/me", "/home/me/.cache/leansurgeon"),
        ("XDG_CACHE_HOME", "/scratch", "/scratch/leansurgeon"),
        ("LEANSURGEON_CACHE", "/nowhere/at/all", "/nowhere/at/all"),
    ):
        monkeypatch.setenv(name, value)
        assert cache_folder() == Path(expected)


def test_a_home_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").write_text("")
    for name in ("LEANSURGEON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    source, data = strangers.model(tmp_path / "source", "llama"), strangers.texts(tmp_path / "data")
    done = strangers.healed(source, data, tmp_path / "run")
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and "cannot be written" in said and "LEANSURGEON_CACHE" in said, done.stderr


@pytest.mark.parametrize(("size", "said"), [(0, "0 bytes"), (999, "999 bytes"), (48e3, "48 kB"), (3.25e9, "3.25 GB")])
def test_sizes_are_in_the_unit_that_shows_them(size, said):
    assert size_text(size) == said
