"""YAML of others: bounded in levels, values, digits and time."""

from __future__ import annotations

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.reading import yamlfile

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
BAD = {
    BOMB: "values, more than 20,000",
    "a: &a\n  b: *a": "levels",
    "&a [*a]": "levels",
    "[" * 100_000: "levels",
    "- " * 40 + "1": "levels",
    "9" * 5000: "5,000 digits",
    "a: 0x" + "f" * 100: "102 digits",
    '"\\ud800"': "surrogate",
    "!!timestamp 2001-99-99": "month",
    "!!float abc": "abc",
    "!!int ''": "cannot be read",
    "!!bool xyz": "xyz",
    "!!python/object/apply:os.getcwd []": "python",
    "? [a]\n: b": "key",
    "a: 1\nb: 2\na: 3": "line 3",
    "\0": "#x0000",
    "*x": "'x'",
    "a: " + "b" * 200_001: "200,004",
    "[[],": "line 1",
}


def test_aliases_and_merges_of_ordinary_size_are_read():
    found, lines = yamlfile.parse("a: &a {x: 1, y: 1e-3}\nb: {<<: *a, y: no}\n", "x")
    assert found == {"a": {"x": 1, "y": 0.001}, "b": {"x": 1, "y": "no"}}
    assert lines["b",] == 2


def test_files_of_another_encoding(tmp_path):
    (tmp_path / "x.yaml").write_bytes("name: ä".encode("latin1"))
    with pytest.raises(UsageError, match="byte 6"):
        yamlfile.read(tmp_path / "x.yaml")


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:16])
def test_what_is_malformed_is_one_sentence(text):
    with pytest.raises(UsageError) as refused:
        yamlfile.parse(text, "x.yaml")
    assert BAD[text] in refused.value.message and refused.value.message.startswith("x.yaml")
