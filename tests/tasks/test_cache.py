"""Prepared data is whole or absent; chance depends on seed, epoch and index only."""

from __future__ import annotations

import errno
import os
import re
import time

import numpy as np
import pytest

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.tasks import chance, disk_cache


def numbers(folder):
    np.save(folder / "numbers.npy", np.arange(10))
    return {"sizes": {"train": 10}}


def test_an_entry_is_built_once_and_found_again(tmp_path):
    first = disk_cache.entry(tmp_path, "set", {"a": 1, "b": 2}, numbers)
    again = disk_cache.entry(tmp_path, "set", {"b": 2, "a": 1}, lambda folder: pytest.fail("built twice"))
    assert again == first and disk_cache.read_info(first)["sizes"] == {"train": 10}
    assert disk_cache.entry(tmp_path, "set", {"a": 1, "b": 3}, numbers) != first
    assert sorted(tmp_path.iterdir()) == sorted({first, disk_cache.entry(tmp_path, "set", {"a": 1, "b": 3}, numbers)})


def test_a_failed_build_leaves_nothing(tmp_path):
    def fails(folder):
        numbers(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        disk_cache.entry(tmp_path, "set", {}, fails)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "file gone", "no info", "info cut"])
def test_a_damaged_entry_is_built_anew(tmp_path, damage):
    folder = disk_cache.entry(tmp_path, "set", {}, numbers)
    data, info = folder / "numbers.npy", folder / disk_cache.INFO
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "file gone":
        data.unlink()
    elif damage == "no info":
        info.unlink()
    else:
        info.write_text(info.read_text()[:20])
    assert disk_cache.entry(tmp_path, "set", {}, numbers) == folder
    assert np.array_equal(np.load(data), np.arange(10))


def test_whoever_comes_second_takes_what_the_first_has_put_there(tmp_path):
    def slow(folder):
        disk_cache.entry(tmp_path, "set", {}, numbers)  # another process is faster
        np.save(folder / "other.npy", np.zeros(3))
        return {}

    folder = disk_cache.entry(tmp_path, "set", {}, slow)
    assert sorted(path.name for path in folder.iterdir()) == [disk_cache.INFO, "numbers.npy"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_full_disk_is_one_sentence(tmp_path):
    def fills(folder):
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"0")

    with pytest.raises(LeanSurgeonError, match=r"\bspace\b.*\bdisk\b.*\bcache\b") as caught:
        disk_cache.entry(tmp_path, "set", {}, fills)
    assert caught.value.__cause__.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_a_cache_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper", tmp_path / ("x" * 300)):
        with pytest.raises(LeanSurgeonError, match=rf"{re.escape(str(place)[:40])}.*cannot be written"):
            disk_cache.entry(place, "set", {}, numbers)

    def lacks(folder):
        raise FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "data.txt"))

    with pytest.raises(FileNotFoundError):  # of the data, which is another sentence
        disk_cache.entry(tmp_path, "set", {}, lacks)


def test_leftovers_of_killed_programs_are_removed_after_a_day(tmp_path):
    old, fresh = tmp_path / ".partial-old", tmp_path / ".partial-fresh"
    for folder in (old, fresh):
        folder.mkdir()
        (folder / "data").write_text("half")
    os.utime(old, (time.time() - 90_000,) * 2)
    disk_cache.entry(tmp_path, "set", {}, numbers)
    assert not old.exists() and fresh.exists()


def test_draws_belong_to_the_sample_and_not_to_the_batch():
    whole = chance.uniform(3, 1, np.arange(50), 9)
    order = np.random.default_rng(0).permutation(50)
    assert np.array_equal(chance.uniform(3, 1, order, 9), whole[order])
    assert np.array_equal(chance.uniform(3, 1, order[:4], 5), whole[order[:4], :5])
    others = [chance.uniform(*key, np.arange(50), 9) for key in ((4, 1), (3, 2), (1, 3))]
    others.append(chance.uniform(3, 1, np.arange(50), 9, stream=1))
    assert all(not np.isclose(other, whole).any() for other in others)
