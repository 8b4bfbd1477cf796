"""Text in another encoding, and tables that name a column twice."""

from __future__ import annotations

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.reading import files, tables


def test_text_in_another_encoding_is_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UsageError, match="not UTF-8 text: byte 3"):
        files.read_text(tmp_path / "a.txt", 10_000)


def test_a_column_that_stands_twice_is_refused_where_it_is_wanted(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text,label,text\none,good,two\n")
    with pytest.raises(UsageError, match="2 columns called 'text'"):
        list(tables.read(file, ["text", "label"]))
    assert [row for _, row in tables.read(file, ["label"])] == [["good"]]
