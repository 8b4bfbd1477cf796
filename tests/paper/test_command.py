"""`leansurgeon paper` as a process: one document, exit codes, and no torch where it is not asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = "{'torch', 'transformers', 'timm', 'accelerate'}"


def paper(*arguments: str, light: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the command; with `light` it fails if anything heavy was imported on the way."""
    code = (
        "import sys; from leansurgeon.cli.main import main\n"
        "try: main()\n"
        f"finally:\n    heavy = {HEAVY} & set(sys.modules)\n" + ("    assert not heavy, heavy" if light else "")
    )
    return subprocess.run([sys.executable, "-c", code, "paper", *arguments], capture_output=True, text=True, timeout=90)


def test_formula_needs_no_torch():
    done = paper("--count", "formula")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Table 1" in done.stdout and "Table 5" in done.stdout


def test_table_4_by_building_is_the_table_by_formula():
    done = paper("--table", "4", light=False)
    assert done.returncode == 0, done.stderr
    assert "40,112,872" in done.stdout
    assert done.stdout == paper("--table", "4", "--count", "formula").stdout


def test_json_is_one_document():
    done = paper("--json", "--count", "formula", "--table", "all")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and document["count"] == "formula"
    assert [e["key"] for e in document["exhibits"]] == ["1", "2", "3", "4", "5", "fig3", "fig4", "fig5", "fig8", "fig9"]
    vit_l = document["exhibits"][4]["rows"][0]
    assert vit_l["parameters"] == 203_614_184 and vit_l["parameters_as_printed"] == 304_326_632
    assert vit_l["others"] == {"16 layers": 203_556_840}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--table", "6"], "no '6'"),
        (["--count", "forumla"], "did you mean 'formula'"),
    ],
)
def test_usage_errors_are_one_sentence_and_exit_2(arguments, words):
    done = paper(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and "Traceback" not in done.stderr
