"""`leansurgeon report` as a process: streams, exit codes, one JSON document, no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.report.report_fixtures import digits, write


def report(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command and fails if anything heavy was imported on the way."""
    code = (
        "import sys; from leansurgeon.cli.main import main\n"
        "try: main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'timm', 'altair', 'jinja2', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, heavy"
    )
    command = [sys.executable, "-c", code, "report", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def workspace(tmp_path: Path) -> Path:
    for made in digits():
        write(tmp_path / "runs" / "digits-vit" / f"{made['experiment']['arm']}-s{made['seed']}", made)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "summary.json").write_text("{")
    return tmp_path


def test_no_argument_reports_the_workspace(tmp_path: Path) -> None:
    done = report(cwd=workspace(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "98.4 ± 0.4 %" in done.stdout and re.search(r"\bnot shown\b", done.stdout, re.S)
    assert "broken" in done.stderr and "broken" not in done.stdout


def test_json_is_one_document(tmp_path: Path) -> None:
    done = report("--json", "--workspace", workspace(tmp_path) / "runs", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    (section,) = document["sections"]
    assert [row["name"] for row in section["rows"]] == ["original", "lean", "control"]
    assert [v["verdict"] for v in section["verdicts"]] == ["not shown", "not shown"]
    assert len(document["problems"]) == 1
    assert len(section["rows"][0]["paths"]) == 3


def test_named_runs_and_kappa(tmp_path: Path) -> None:
    root = workspace(tmp_path) / "runs" / "digits-vit"
    done = report(root / "lean-s0", root / "control-s1", "--kappa", "--format", "csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + 3 + 3


def test_usage_errors_are_one_sentence_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ([], "no workspace"),
        (["nowhere"], "no folder"),
        (["--workspace", str(workspace(tmp_path) / "runs"), "--format", "cvs"], r"'csv'"),
    ):
        done = report(*arguments, cwd=tmp_path / "empty")
        assert (done.returncode, done.stdout) == (2, ""), done
        assert re.search(words, done.stderr) and "Traceback" not in done.stderr
