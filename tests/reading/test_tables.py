"""Tables as programs write them, each read as pandas or the standard library reads it."""

from __future__ import annotations

import csv
import json

import pyarrow
import pytest
from pyarrow import parquet

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.reading import archives, files, tables, tensorfile
from leansurgeon.tasks.text import files as text_files
from leansurgeon.tasks.text import vocab

ROWS = [["so, so", "0"], ['he said "good"', "1"], ["a | b; c", "0"], ["two\u2028lines", "1"]]


def read(path) -> list[list]:
    assert tables.columns(path) == ("text", "label")
    return [row for _, row in tables.read(path, ["text", "label"])]


@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "b.tsv"])
@pytest.mark.parametrize("mark", [",", ";", "|", "\t"])
def test_what_a_writer_of_quotation_marks_has_written(tmp_path, name, mark):
    if name.endswith("tsv") != (mark == "\t"):
        return
    rows = [*ROWS, ["three\nlines\tand a tab", "1"], ['"', "0"]]
    with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=mark).writerows([["text", "label"], *rows])
    assert read(tmp_path / name) == rows


@pytest.mark.parametrize("rows", [
    ROWS,
    [['"I liked it', "1"], ["so so", "0"], ['the end"', "1"]],
    [['"quoted whole"', "1"], ["so so", "0"]],
    [['a "" b', "1"], ['"c', "0"]],
])  # fmt: skip
def test_bare_quotation_marks_between_tabs(tmp_path, rows):
    lines = ["\t".join(row) + "\n" for row in [["text", "label"], *rows]]
    (tmp_path / "a.tsv").write_text("".join(lines), encoding="utf-8")
    assert read(tmp_path / "a.tsv") == rows


def test_marks_that_only_double_are_those_of_pandas(tmp_path):
    (tmp_path / "a.tsv").write_text('text\tlabel\n"he said ""good"""\t1\nso so\t0\n')
    assert read(tmp_path / "a.tsv") == [['he said "good"', "1"], ["so so", "0"]]


@pytest.mark.parametrize("form", ["list", "indented", "data", "lines"])
def test_json_of_every_form(tmp_path, form):
    rows = [{"text": text, "label": label} for text, label in ROWS]
    whole = {"data": rows} if form == "data" else rows
    text = json.dumps(whole, ensure_ascii=False, indent=None if form == "list" else 1)
    if form == "lines":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "a.JSON").write_text(text, encoding="utf-8")
    assert read(tmp_path / "a.JSON") == ROWS


def test_keys_that_rows_lack_are_empty_and_no_row_may_lack_all(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "label": 1}\n')
    assert read(tmp_path / "a.jsonl") == [["a", None], ["b", 1]]
    with pytest.raises(UsageError, match=r"no column 'lable'"):
        list(tables.read(tmp_path / "a.jsonl", ["text", "lable"]))


def test_a_parquet_file_with_gaps_and_names_of_classes(tmp_path):
    table = pyarrow.table({"text": ["a", None], "label": [1, None]})
    said = {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(said)}), tmp_path / "a.PARQUET")
    assert read(tmp_path / "a.PARQUET") == [["a", 1], [None, None]]
    assert tables.class_names(tmp_path / "a.PARQUET", "label") == ["no", "yes"]
    assert tables.class_names(tmp_path / "a.PARQUET", "text") is None


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 9\n"


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl", "a.json"])
def test_a_git_lfs_pointer_is_called_one(tmp_path, name):
    """What a clone without git-lfs leaves in the place of every large file."""
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UsageError, match=rf"{name} is a Git LFS pointer") as refused:
        list(tables.read(tmp_path / name, ["text"]))
    assert refused.value.hint == f"Fetch it: git -C {tmp_path} lfs pull"


def test_every_reader_of_files_calls_a_git_lfs_pointer_one(tmp_path):
    for name in ("model.safetensors", "tokenizer.json", "a.tar", "a.png", "a.txt"):
        (tmp_path / name).write_text(POINTER)
    readers = {
        "model.safetensors": tensorfile.read_header,
        "tokenizer.json": lambda path: vocab.key_of("model", None, path.parent),
        "a.tar": lambda path: list(archives.places(path)),
        "a.png": lambda path: files.read_bytes(path, 1000),
        "a.txt": text_files.read,
    }
    for name, reader in readers.items():
        with pytest.raises(LeanSurgeonError, match=rf"{name} is a Git LFS pointer"):
            reader(tmp_path / name)
