"""JSON of others: read as Python reads it, or refused in one sentence with the file's name and the numbers."""

from __future__ import annotations

import json
import os

import pytest

from leansurgeon.errors import UnsupportedModel, UsageError, raised_as
from leansurgeon.reading import files, jsonfile

GOOD = [{"a": [1, 2.5, None, True, "é\n"], "b": {}}, [], "x", 10**31, -0.0, {"model_max_length": 10**30}]


@pytest.mark.parametrize("value", GOOD, ids=repr)
def test_what_is_whole_is_read_as_python_reads_it(value, tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(value))
    assert jsonfile.read(file) == value


BAD = {
    b"": "not valid JSON",
    b"{": "line 1, column 2",
    b"[" * 100_000: "recursion",
    b"9" * 5000: "5000 digits",
    b"\xff\xfe{\x00}\x00": "byte 0",
    b"\xef\xbb\xbf{}": "not valid JSON",
    b'{"a": "\xe9"}': "byte 7",
}


@pytest.mark.parametrize("content", BAD, ids=lambda content: content[:12].decode("latin1"))
def test_what_is_malformed_is_one_sentence_of_the_kind_that_was_asked_for(content, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(UnsupportedModel) as refused, raised_as(UnsupportedModel):
        jsonfile.read(file)
    assert BAD[content] in refused.value.message and str(file) in refused.value.message
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert jsonfile.read_object_if_whole(file) is None


def test_an_object_is_asked_for_and_something_else_is_there(tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(UsageError, match="a list"):
        jsonfile.read_object(tmp_path / "x.json")


def test_what_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "x.json"
    with file.open("wb") as out:
        out.truncate(10**12)  # no block of it is on the disk
    with pytest.raises(UsageError, match=r"1,000,000,000,000.*32,000,000"):
        jsonfile.read(file)


def test_what_is_no_regular_file_is_told_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    said = {
        "pipe": "not a regular file",
        "folder": "a folder",
        "loop": "symbolic links",
        "none": "does not exist",
        "\0": "null byte",
        "x" * 300: "too long",
        "\ud800": "encode",
    }
    for name, words in said.items():
        with pytest.raises(UsageError, match=words):
            files.read_bytes(tmp_path / name, 100)
    with pytest.raises(UsageError, match="not a regular file"):
        files.read_bytes(tmp_path / os.devnull, 100)


@pytest.mark.parametrize("name", ["a.safetensors", "x" * 255, "é"])
def test_names_of_files_beside_this_one(name):
    assert files.is_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\\b", "a\0", "x" * 256, "é" * 128, "\ud800", 5, None])
def test_names_that_lead_elsewhere(name):
    assert not files.is_name(name)
