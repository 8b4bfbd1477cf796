"""`report --plots` and `--html`: files, streams, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from tests.support.command_line import leansurgeon
from tests.support.report.report_fixtures import summary, write
from tests.support.report.report_workspace import workspace


def test_charts_are_written_as_svg_png_and_pdf(tmp_path):
    root = workspace(tmp_path / "runs")
    for path in (root / "digits-vit").glob("*/summary.json"):  # a name that would be a formula or markup
        made = json.loads(path.read_text())
        if made["experiment"]["arm"] == "control":
            made["experiment"]["arm"] = "a $\\\\frac{ <b>"
            path.write_text(json.dumps(made))
    done = leansurgeon("report", "--workspace", root, "--plots", "charts/new", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {p.name for p in (tmp_path / "charts" / "new").iterdir()}
    kinds = ("parameters", "metric", "loss", "kappa-median", "kappa-centred")
    kinds += ("lean-heads-importance", "lean-heads-pruning")
    assert names == {f"digits-vit-{kind}.{ending}" for kind in kinds for ending in ("svg", "png", "pdf")}
    words = "".join(ElementTree.parse(tmp_path / "charts" / "new" / "digits-vit-parameters.svg").getroot().itertext())
    assert "lean" in words and "a $\\\\frac{ <b>" in words
    assert sorted(done.stderr.split()[1::2]) == sorted(f"charts/new/{name}" for name in names)


def test_a_name_gets_no_file_elsewhere(tmp_path):
    """Sections and rows are named by files, and charts after them."""
    made = summary()
    made["experiment"] |= {"name": "../../evil", "arm": "/nowhere/x"}
    write(tmp_path / "runs" / "a", made)
    done = leansurgeon("report", "--workspace", "runs", "--plots", "charts", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "charts"}
    assert all(name.name.startswith("evil-") for name in (tmp_path / "charts").iterdir())


def test_a_page_needs_no_torch_and_leaves_stdout_as_it_is(tmp_path):
    root = workspace(tmp_path / "runs")
    plain = leansurgeon("report", "--workspace", root, "--json", cwd=tmp_path)
    code = "import sys; sys.modules['torch'] = None\nfrom leansurgeon.cli.main import main; main()"
    command = [sys.executable, "-c", code, "report", "--workspace", root, "--json", "--html", "page.html"]
    paged = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert paged.returncode == 0, paged.stderr
    assert paged.stdout == plain.stdout and json.loads(paged.stdout)["schema_version"] == 1
    assert "page.html" in paged.stderr and (tmp_path / "page.html").read_text().endswith("</html>\n")


def test_places_that_are_none_are_usage_errors(tmp_path):
    write(tmp_path / "runs" / "a", summary(experiment=None))
    (tmp_path / "file").write_text("mine")
    for option, place, words in (
        ("--html", "runs", r"--html runs\b.*\bfolder\b"),
        ("--html", "no/where/page.html", r"\bfolder\b.*\bno/where\b"),
        ("--plots", "file", r"--plots file\b"),
    ):
        done = leansurgeon("report", option, place, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert re.search(words, done.stderr)
    assert (tmp_path / "file").read_text() == "mine"
