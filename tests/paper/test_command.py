"""`leansurgeon paper`: one document, exit codes, and no torch where it is not asked for (`test_imports.py`)."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import leansurgeon


def test_json_is_one_document():
    done = leansurgeon("paper", "--json", "--table", "all")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert [e["key"] for e in document["exhibits"]] == ["1", "2", "3", "4", "5", "fig3", "fig4", "fig5", "fig8", "fig9"]
    vit_l = document["exhibits"][4]["rows"][0]
    assert vit_l["parameters"] == 203_614_184 and vit_l["parameters_as_printed"] == 304_326_632
    assert vit_l["others"] == {"16 layers": 203_556_840}


@pytest.mark.parametrize(("flag", "word", "says"), [("--table", "6", "no '6'"), ("--tabel", "4", "--table")])
def test_usage_errors_are_one_sentence_and_exit_2(flag, word, says):
    done = leansurgeon("paper", flag, word)
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr
