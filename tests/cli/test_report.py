"""`leansurgeon report`: streams, exit codes, one JSON document, no torch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.answers import document, typed, works
from tests.support.report.report_fixtures import digits, write


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    place = tmp_path_factory.mktemp("workspace")
    for made in digits():
        write(place / "runs" / "digits-vit" / f"{made['experiment']['arm']}-s{made['seed']}", made)
    (place / "runs" / "broken").mkdir()
    (place / "runs" / "broken" / "summary.json").write_text("{")
    return place


def test_no_argument_reports_the_workspace_and_imports_nothing_heavy(workspace):
    """In a process of its own."""
    code = (
        "import sys; from leansurgeon.cli.main import main\n"
        "try: main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'timm', 'altair', 'jinja2', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, heavy"
    )
    call = [sys.executable, "-c", code, "report"]
    done = subprocess.run(call, cwd=workspace, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "98.4 ± 0.4 %" in done.stdout and re.search(r"\bnot shown\b", done.stdout, re.S)
    assert "broken" in done.stderr and "broken" not in done.stdout


def test_json_is_one_document(workspace):
    found = document("report --workspace runs", cwd=workspace)
    assert found["schema_version"] == 1 and len(found["problems"]) == 1
    (section,) = found["sections"]
    assert [row["name"] for row in section["rows"]] == ["original", "lean", "control"]
    assert [v["verdict"] for v in section["verdicts"]] == ["not shown", "not shown"]
    assert len(section["rows"][0]["paths"]) == 3


def test_named_runs_and_kappa(workspace):
    done = works("report lean-s0 control-s1 --kappa --format csv", cwd=workspace / "runs" / "digits-vit")
    assert len(done.stdout.splitlines()) == 1 + 3 + 3


@pytest.mark.parametrize(
    ("line", "words"),
    [("report", "no workspace"), ("report nowhere", "no folder"), ("report --workspace RUNS --format cvs", "'csv'")],
)
def test_usage_errors_are_one_sentence_and_exit_2(line, words, workspace, tmp_path):
    done = typed(line.replace("RUNS", str(workspace / "runs")), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert re.search(words, done.stderr) and "Traceback" not in done.stderr
