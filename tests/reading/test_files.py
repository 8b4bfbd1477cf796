"""Small files and folders as they are read: no more memory than a file has, and folders that change meanwhile."""

from __future__ import annotations

import os
import shutil
import tracemalloc

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.reading import files
from leansurgeon.tasks import user_data
from leansurgeon.tasks.images import places
from tests.support.command_line import leansurgeon


def test_a_small_file_takes_no_more_memory_than_it_has_bytes(tmp_path):
    """The whole limit was reserved, which a machine with a memory limit does not have."""
    (tmp_path / "a.json").write_bytes(b"{}" * 1000)
    tracemalloc.start()
    content = files.read_bytes(tmp_path / "a.json", 2**30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert content == b"{}" * 1000 and peak < 2**20


@pytest.mark.parametrize("size", [0, 1, 2**16, 2**16 + 1])
def test_a_file_is_read_whole_up_to_the_limit(tmp_path, size):
    content = (bytes(range(256)) * 257)[:size]
    (tmp_path / "a").write_bytes(content)
    assert files.read_bytes(tmp_path / "a", size) == content
    if size:
        with pytest.raises(UsageError, match=f"{size:,} bytes, more than the {size - 1:,}"):
            files.read_bytes(tmp_path / "a", size - 1)


@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_folder_may_change_while_it_is_walked(tmp_path, monkeypatch, kind):
    """`--data /` walks through folders of processes that end."""
    for folder in ("a", "b", "gone"):
        (tmp_path / folder).mkdir()
        name = f"{folder}.txt" if kind == "text" else f"{folder}.png"
        shutil.copy(__file__, tmp_path / folder / name)
    (tmp_path / "a" / f"nowhere{name[-4:]}").symlink_to("nothing")
    scandir = os.scandir

    def vanish(path="."):
        """List a folder; `gone` is not there any more."""
        if str(path) == str(tmp_path / "gone"):
            shutil.rmtree(path, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanish)
    data = user_data.recognise(str(tmp_path))
    assert data.kind == ("text" if kind == "text" else "classes")
    if kind == "images":
        found = places.find(str(tmp_path), None)
        assert found.file_stamps() == places.find(str(tmp_path), None).file_stamps() and found.key()


@pytest.mark.parametrize("table", ["text,label\n", "text\n\n\n"])
def test_a_table_without_rows_is_one_sentence(saved, tmp_path, table):
    folder, _ = saved("llama")
    (tmp_path / "none.csv").write_text(table)
    data = f"task:causal-lm,data={tmp_path / 'none.csv'},tokenizer=char,seq_len=8"
    done = leansurgeon("shrink", folder, "--layers", 2, "--calibrate", data, "-o", tmp_path / "out")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
