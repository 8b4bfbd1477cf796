"""`report --plots` and `--html` as a process: files, streams, exit codes; matplotlib only where it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support.report_fixtures import summary, write
from tests.support.report_workspace import workspace

CODE = "import sys; {before}\nfrom leansurgeon.cli.main import main; main()"


def report(*arguments: object, cwd: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE.format(before=before), "report", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_charts_are_written_as_png_and_svg(tmp_path):
    pytest.importorskip("matplotlib")
    root = workspace(tmp_path / "runs")
    for path in (root / "digits-vit").glob("*/summary.json"):  # a name that would be a broken formula
        made = json.loads(path.read_text())
        if made["experiment"]["arm"] == "control":
            made["experiment"]["arm"] = "a $\\\\frac{ <b>"
            path.write_text(json.dumps(made))
    done = report("--workspace", root, "--plots", "charts/new", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = sorted(p.name for p in (tmp_path / "charts" / "new").iterdir())
    assert names == [f"digits-vit-{c}.{k}" for c in ("curves", "kappa", "parameters") for k in ("png", "svg")]
    for name in names:
        file = tmp_path / "charts" / "new" / name
        if name.endswith("png"):
            assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        else:
            words = "".join(ElementTree.parse(file).getroot().itertext())
            assert "lean" in words and "a $\\\\frac{ <b>" in words and "mathdefault" not in words


def test_kappa_points_are_where_the_summaries_have_them(tmp_path):
    matplotlib = pytest.importorskip("matplotlib.figure")
    from leansurgeon.report import plots
    from leansurgeon.report.collect import collect
    from leansurgeon.report.rows import sections

    found = collect([workspace(tmp_path)])
    (section,) = sections(found.entries)
    figure = matplotlib.Figure()
    assert plots.kappa(figure, section, {})
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].get_lines()}
    assert lines["lean"] == [(1, 17), (2, 44), (3, 95)]
    figure = matplotlib.Figure()
    assert plots.parameters(figure, section, {})
    (bars,) = [c for c in figure.axes[0].containers if c.get_label() == "lean"]
    assert bars.lines[0].get_data()[0][0] == 152394
    assert bars.lines[0].get_data()[1][0] == pytest.approx((0.9806 + 0.9833 + 0.9889) / 3)


def test_without_matplotlib_one_sentence_and_exit_2(tmp_path):
    root = workspace(tmp_path / "runs")
    done = report("--workspace", root, "--plots", "charts", cwd=tmp_path, before="sys.modules['matplotlib'] = None")
    assert (done.returncode, done.stdout) == (2, "")
    assert "matplotlib, which is not installed" in done.stderr and "leansurgeon[plots]" in done.stderr
    assert not (tmp_path / "charts").exists()


def test_a_page_needs_no_matplotlib_and_leaves_stdout_as_it_is(tmp_path):
    root = workspace(tmp_path / "runs")
    before = "sys.modules['matplotlib'] = sys.modules['torch'] = None"
    plain = report("--workspace", root, "--json", cwd=tmp_path)
    paged = report("--workspace", root, "--json", "--html", "page.html", cwd=tmp_path, before=before)
    assert paged.returncode == 0, paged.stderr
    assert paged.stdout == plain.stdout and json.loads(paged.stdout)["schema_version"] == 1
    assert "page.html" in paged.stderr and (tmp_path / "page.html").read_text().endswith("</html>\n")


def test_places_that_are_none_are_usage_errors(tmp_path):
    write(tmp_path / "runs" / "a", summary(experiment=None))
    (tmp_path / "file").write_text("mine")
    for arguments, words in (
        (["--html", "runs"], "that is a folder"),
        (["--html", "no/where/page.html"], "there is no folder"),
        (["--plots", "file"], "cannot be made"),
    ):
        done = report(*arguments, cwd=tmp_path, before="sys.modules['matplotlib'] = None")  # the place comes first
        assert (done.returncode, done.stdout) == (2, ""), done
        assert words in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "mine"
