"""Text in another encoding, and tables that name a column twice."""

from __future__ import annotations

import subprocess

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.reading import files, tables

TEXT = "text,label\nM\u00fcnchen is near,good\nfar away,bad\n"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", ["reviews of 2025.csv", "a.txt"])
def test_the_line_that_is_advised_makes_it_readable(encoding, name, tmp_path):
    mark = "" if encoding == "utf-16" else "\ufeff"
    (tmp_path / name).write_bytes((mark + TEXT).encode(encoding))
    with pytest.raises(UsageError, match="UTF-8") as caught:
        if name.endswith(".csv"):
            tables.columns(tmp_path / name)
        else:
            files.read_text(tmp_path / name, 10_000)
    subprocess.run(caught.value.hint[caught.value.hint.index("iconv") :], shell=True, check=True)
    (made,) = set(tmp_path.iterdir()) - {tmp_path / name}
    assert files.read_text(made, 10_000).lstrip("\ufeff") == TEXT
    if name.endswith(".csv"):
        assert [row for _, row in tables.read(made, ["text"])] == [["M\u00fcnchen is near"], ["far away"]]


def test_what_nobody_can_tell_gets_no_advice(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UsageError) as caught:
        files.read_text(tmp_path / "a.txt", 10_000)
    assert caught.value.hint is None


def test_a_column_that_stands_twice_is_refused_where_it_is_wanted(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text,label,text\none,good,two\n")
    with pytest.raises(UsageError, match="2 columns called 'text'"):
        list(tables.read(file, ["text", "label"]))
    assert [row for _, row in tables.read(file, ["label"])] == [["good"]]
