"""The page: well formed, closed in itself, its numbers those of `report --json`, and harmless whatever names hold."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest

import leansurgeon
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.errors import UsageError
from leansurgeon.report.charts.forms import COLOURS, SERIES
from leansurgeon.report.charts.render import svg
from leansurgeon.report.charts.sections import OF_SECTION, every, of_section
from leansurgeon.report.collect import collect
from leansurgeon.report.page import page as html_page
from leansurgeon.report.page.parts import LAYERS_CAPTION, show_bench
from leansurgeon.report.runs import bench_of
from leansurgeon.report.sections import sections
from leansurgeon.report.tables.cut import list_candidates
from leansurgeon.report.tables.render import make_document
from leansurgeon.training.runs.summary import Summary
from tests.support.models.word_models import sentence_encoder
from tests.support.report.html_reading import Cell, Page
from tests.support.report.report_fixtures import digits, kappa, perplexities, summary, write
from tests.support.report.report_workspace import BENCH, surgery, workspace

SCALES = {"%": 0.01, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "M": 1e6, "k": 1e3}
EVIL = "<script>alert(1)</script>\"'&\x00\x1b[31m"


def page_of(*folders: Path) -> tuple[Page, dict]:
    found = collect(folders)
    made = sections(found.runs)
    text = html_page.page(made, found)
    text.encode("utf-8")  # a lone surrogate would not
    return Page(text), make_document(made, found.problems)


@pytest.fixture(scope="module")
def digits_page(tmp_path_factory):
    return page_of(workspace(tmp_path_factory.mktemp("runs")))


def test_every_element_is_closed_and_nothing_is_loaded(digits_page):
    page, _ = digits_page
    assert not page.open and not page.wrong
    assert not page.names() & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use"}
    for name, given in page.elements:
        for key, value in given.items():
            assert not key.startswith("on"), f"{name} {key}"
            if key in ("href", "src", "style", "xlink:href", "action"):
                assert key == "href" and value.startswith("#")
            assert "://" not in (value or "") or (key, value) == ("xmlns", "http://www.w3.org/2000/svg")
    policy = next(a["content"] for n, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_style_loads_nothing(tmp_path):
    found = collect([workspace(tmp_path)])
    style = re.search(r"<style>(.*?)</style>", html_page.page(sections(found.runs), found), re.S)[1]
    assert "url(" not in style and "@import" not in style and "@font-face" not in style
    assert "prefers-color-scheme:dark" in style and "@media print" in style


def test_numbers_are_those_of_the_json(digits_page):
    page, found = digits_page
    (section,) = found["sections"]
    results, cost = page.table("Results"), page.table("Memory")
    for row in section["rows"]:
        shown, spent = (table.row(row["name"]) for table in (results, cost))
        assert shown["top-1 accuracy"].value == row["metric"]["mean"]
        assert shown["before training"].value == row["before"]["mean"]
        sd = float(re.search(r"± ([\d.]+)", shown["top-1 accuracy"].text)[1])
        assert sd == pytest.approx(100 * row["metric"]["sd"], abs=0.05)
        assert shown["params"].value == row["parameters"]
        assert shown["seeds"].value == 3
        assert shown["kappa median"].value == row["kappa"]["median"]["value"]
        assert shown["kappa worst"].value == row["kappa"]["worst"]["value"]
        assert spent["peak RSS (CPU)"].value == row["memory"]["mean"]
        assert spent["ms/step"].value == row["step_ms"]["mean"]
        parts = page.table("Shape").row(row["name"])
        assert parts["attention params"].value == row["parts"]["attention"]
    layers = [(row["name"], layer) for row in section["rows"] for layer in row["kappa"]["layers"]]
    table = page.table("Kappa of what enters")
    median = table.heads.index("kappa median")
    assert [(r[0].text, r[1].value, r[median].value) for r in table.rows] == [
        (name, layer["layer"], layer["median"]["value"]) for name, layer in layers
    ]
    for verdict in section["verdicts"]:
        assert verdict["sentence"] in page.text


def shown_number(cell: Cell) -> tuple[float, float]:
    """The number that a cell shows, and half a unit of its last digit."""
    number, decimals, power, unit = re.match(
        r"[≥]?(-?\+?[\d,]+(?:\.(\d+))?)(?:e([+-]?\d+))?\s*(?:± [\d.,]+ )?(%|[KMG]iB|M\b)?", cell.text
    ).groups()
    scale = SCALES.get(unit, 1.0) * 10 ** int(power or 0)
    return float(number.replace(",", "")) * scale, 0.5001 * scale * 10 ** -len(decimals or "")


def test_every_figure_rounds_to_the_number_behind_it(digits_page):
    page, _ = digits_page
    assert len(page.data) > 150
    for cell in page.data:
        shown, half = shown_number(cell)
        assert abs(shown - cell.value) <= half + 1e-3 * abs(cell.value) * ("e" in cell.text), cell


def test_what_was_cut_and_why(digits_page):
    page, _ = digits_page
    text = page.text
    assert re.search(r"drop-layers \(near\): .*\b3 of 6\b[^:]*: 0, 1, 2\b", text, re.S)
    assert re.search(r"\bdepth -149,952\b.*\bheads \+49,728\b.*\bmlp -49,536\b", text, re.S)
    assert "accuracy 95.8 % (source 96.9 %) of 360" in text
    table = page.table("Sets of layers")
    chosen, judged = table.heads.index("chosen by"), len(table.heads) - 1
    assert [row[chosen].text for row in table.rows] == ["even", "angular"]
    assert [row[judged].text for row in table.rows] == ["0.1281", "0.0012"]
    assert "again on all of it" in table.caption
    assert "/home/somebody" not in text and "…/digits-vit/original-s0/last" in text
    assert "leansurgeon run digits-vit --seeds 0,1,2" in text and re.search(r"\b1,437\b.*\b360\b", text, re.S)


def test_every_chart_stands_under_its_heading(digits_page, tmp_path):
    found = collect([workspace(tmp_path)])
    (section,) = sections(found.runs)
    text = html_page.page([section], found)
    headings = [(m.start(), m[1]) for m in re.finditer(r"<h3>(.*?)</h3>", text)]
    titles = [(m.start(), m[1]) for m in re.finditer(r"<figcaption><b>(.*?)</b>", text)]
    placed: dict[str, list[str]] = {}
    for at, title in titles:
        placed.setdefault([name for start, name in headings if start < at][-1], []).append(title)
    assert placed == {
        part: [chart.title for chart in charts] for part in OF_SECTION if (charts := of_section(section, part))
    }
    assert [svg(chart) in text for chart in every(section)] == [True] * len(titles)


def test_the_page_opens_with_name_date_size_quality_speed_and_the_verdict(digits_page):
    page, found = digits_page
    (section,) = found["sections"]
    original, lean, _ = section["rows"]
    words = page.text
    opening = words[: words.index("Results")]
    assert next(text for text in page.texts[1:] if text.strip() and "leansurgeon" not in text) == "digits-vit"
    assert "31 January 2026" in opening and "3 layers of 8 heads" in opening
    shown = {cell.value for cell in page.data[:3]}
    assert shown == {lean["parameters"], lean["metric"]["mean"], lean["step_ms"]["mean"]}
    assert f"{original['parameters']:,}" in opening
    for verdict in section["verdicts"]:
        assert verdict["sentence"] in words[: words.index(" against parameters")]


def test_caveats_stand_beside_the_figure_that_they_concern(tmp_path):
    """A missing seed decides on quality, trainings side by side on speed; tile and part of each say so."""
    runs = [run for run in digits() if (run["experiment"]["arm"], run["seed"]) != ("lean", 2)]
    for run in runs:
        run["started"] = "2026-01-31T14:00:00+00:00"  # all at once
        write(tmp_path / f"{run['experiment']['arm']}-{run['seed']}", run)
    found = collect([tmp_path])
    text = html_page.page(sections(found.runs), found)
    tiles = dict(re.findall(r'<dl class="tile">\s*<dt>(.*?)</dt>(.*?)</dl>', text, re.S))
    parts = dict(re.findall(r"<h3>(.*?)</h3>(.*?)(?=<h3>|</section>)", text, re.S))
    for says, tile, part in (
        ("lean has only 2 of 3 seeds", "Quality", "Results"),
        ("ran side by side", "Speed", "Memory and speed"),
    ):
        assert [name for name, content in tiles.items() if says in content] == [tile]
        assert [name for name, content in parts.items() if says in content] == [part]
        assert parts[part].index(says) < parts[part].index("<figure" if "<figure" in parts[part] else "<table")


def test_recipes_and_tables_of_layers_fold(digits_page, tmp_path):
    found = collect([workspace(tmp_path)])
    text = html_page.page(sections(found.runs), found)
    folded = "".join(re.findall(r"<details>(.*?)</details>", text, re.S))
    assert "name: digits-vit" in folded and LAYERS_CAPTION in folded
    outside = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    assert "duration: 30ep" not in outside and LAYERS_CAPTION not in outside
    assert "<details open" not in text


def test_bench_stands_beside_the_training(digits_page):
    page, _ = digits_page
    lean = page.table("lean: batch 64, fp32").row("lean")
    assert lean["step, ms"].value == pytest.approx(30.0) and lean["forward of one sample, ms"].text == "–"
    assert lean["peak"].value == int(0.03 * 2**30) and lean["step against the first"].text == "0.75 (faster)"
    assert "head_dim 16 is below 64" in page.text and re.search(r"\bflash\b.*\bCPU\b", page.text, re.S)
    first = page.table("lean: batch 64, fp32").row("original")["step against the first"]
    assert first.text == "1.00" and "7 interleaved rounds" in page.text  # of itself nothing is to be told
    # Rounds that do not agree show no difference, which is not to say that there is none.
    same = bench_of(BENCH | {"rows": [*BENCH["rows"], dict(BENCH["rows"][0])]})
    assert show_bench("lean", same)[0].rows[-1][-1].beside == "(not told apart)"
    text = bench_of(BENCH | {"load": BENCH["load"] | {"tokens": 128}, "unit": "tokens"})
    assert re.search(r"^lean: batch 64\b.*\b128 tokens\b.*\bfp32\b", show_bench("lean", text)[0].caption)


def test_images_and_tables_speak_to_those_who_do_not_see_them(digits_page):
    page, _ = digits_page
    drawings = [given for name, given in page.elements if name == "svg" and given.get("role") == "img"]
    assert len(drawings) >= 6 and all(len(given["aria-label"]) > 20 for given in drawings)
    others = [given for name, given in page.elements if name == "svg" and given.get("role") != "img"]
    assert all(given.get("aria-hidden") == "true" for given in others)
    assert all(table.caption for table in page.tables)
    scopes = [given.get("scope") for name, given in page.elements if name == "th"]
    assert set(scopes) == {"row", "col"}
    headings = [int(name[1]) for name, _ in page.elements if re.fullmatch(r"h\d", name)]
    assert headings[0] == 1 and all(b <= a + 1 for a, b in pairwise(headings))


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("index", [0, 1], ids=["light", "dark"])
def test_contrast(index):
    def ratio(a: str, b: str) -> float:
        light, dark = sorted((luminance(COLOURS[a][index]), luminance(COLOURS[b][index])), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    assert ratio("text", "ground") > 12
    for name in ("text", "quiet", "link", "warn", *(f"c{i}" for i in range(SERIES))):
        for ground in ("ground", "raised"):
            assert ratio(name, ground) >= 4.5, (name, ground)


def test_names_with_markup_are_harmless(tmp_path):
    run = summary(seed=0, name=EVIL)
    run["experiment"] |= {"name": EVIL, "arm": EVIL, "own_task": EVIL}
    run["task"] |= {"name": EVIL, "metric_label": EVIL, "data": {"source": EVIL, "licence": EVIL}}
    run["device"] = run["precision"] = run["throughput_unit"] = EVIL
    run["versions"] = {EVIL: EVIL}
    record = surgery("lean", language=EVIL)
    record["source"] = {"name": EVIL, "preset": EVIL, "sha256": {EVIL: EVIL}}
    record["plan"] |= {"why": EVIL, "operators": [{"name": EVIL, "exactness": EVIL, "says": EVIL}], "head_policy": EVIL}
    record["decided"] |= {"criterion": EVIL, "calibration": {"says": EVIL, "name": EVIL, "sha256": EVIL}}
    run["model"] |= {"surgery": record, "source": EVIL}
    folder = write(tmp_path / "x<script>", run)
    (folder / "recipe.yaml").write_text("name: </code></pre><script>alert(2)</script>\n")
    heads = {
        "attentions": [{"kind": EVIL, "stage": 0, "layer": 0, "importance": [1.0]}],
    }
    write(folder, heads, "heads.json")
    page, _ = page_of(tmp_path)
    assert not page.open and not page.wrong and "script" not in page.names()
    assert "<script>alert(1)</script>" in page.text and "<script>alert(2)</script>" in page.text
    assert not any(key.startswith("on") for _, given in page.elements for key in given)


def test_odd_files_beside_a_summary_are_no_reason_to_fail(tmp_path):
    whole = workspace(tmp_path / "runs") / "digits-vit"
    (whole / "lean-s0" / "metrics.jsonl").write_text('{"type": "train", "step": 1, "loss": 1.0}\n{"type": "tr')
    (whole / "lean-s0" / "heads.json").write_text('{"attentions": [{"importance": ["a", null, -1]}, 7], "curve": []}')
    write(whole / "lean-s0", {"rows": [{"seconds": 3, "name": None}, 4], "load": [], "remarks": 7}, "bench.json")
    (whole / "lean-s1" / "metrics.jsonl").write_bytes(b"\xff\xfe")
    (whole / "lean-s1" / "recipe.yaml").unlink()
    broken = json.loads((whole / "control-s0" / "summary.json").read_text())
    broken["model"]["surgery"] = {"plan": {"operators": 3, "after": []}, "decided": [], "proof": 7}
    write(whole / "control-s0", broken)
    page, _ = page_of(tmp_path / "runs")
    assert not page.open and not page.wrong
    odd = Decisions.from_dict({"candidates": [{"judged_by": 1.0, "data": ["part"]}, {"judged_by": 2.0, "data": {}}]})
    assert len(list_candidates(odd)[1]) == 2


def test_without_more_than_a_summary(tmp_path):
    """A single run, a language model, models that nobody trained: each has its page, and says what it lacks."""
    single = page_of(write(tmp_path / "one", summary(experiment=None)))[0]
    assert "Not measured" in single.text and "leansurgeon heads RUN" in single.text
    for i, made in enumerate(perplexities({"original": (23.4, 23.6), "lean": (22.1, 22.3)})):
        made["kappa"] = kappa((17.0, None, None))
        write(tmp_path / "two" / f"r{i}", made)
    language = page_of(tmp_path / "two")[0]
    assert language.table("Results").row("lean")["perplexity"].value == pytest.approx(22.2)
    assert "≥2.9e7" in language.text and "hollow:" in language.text
    model = page_of(write(tmp_path / "three", surgery("lean"), "surgery.json"))[0]
    assert model.table("three: before and after").row("parameters, all")["after"].text == "152,394"


def test_the_data_of_the_command_can_be_typed(saved, tmp_path):
    """`--calibrate digits` or `lines` would name no data."""
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure.data.calibration import from_task, open_calibration

    vit = open_source("digits-vit")
    own = from_task("digits", {"split_seed": 3}, vit, cache=tmp_path, samples=8).as_record().as_dict()
    again = open_calibration(own["name"], vit, cache=tmp_path, samples=8).as_record().as_dict()
    assert own == again and own["name"] == "task:digits,split_seed=3"
    folder, text = sentence_encoder(saved, tmp_path, 40)
    data = open_calibration(str(text), open_source(str(folder)), cache=tmp_path).as_record().as_dict()
    assert data["name"] == str(text)


def test_the_command_of_a_cut_is_one_command_without_folders_of_this_machine(tmp_path):
    record = surgery("lean", call="leansurgeon shrink /home/me/models/big/vit --layers 3 --keep '$(touch y)'")
    page, _ = page_of(write(tmp_path / "one", record, "surgery.json"))
    assert "leansurgeon shrink '…/models/big/vit' --layers 3 --keep '$(touch y)'" in page.text
    for odd in ("rm -rf /", "leansurgeon shrink 'x", "leansurgeon x\ny"):
        page, _ = page_of(write(tmp_path / "two", surgery("lean", call=odd), "surgery.json"))
        assert not page.wrong and "rm -rf" not in page.text and "leansurgeon shrink" not in page.text
    said = page_of(write(tmp_path / "three", surgery("lean", call="leansurgeon shrink a; touch x"), "surgery.json"))[0]
    assert "leansurgeon shrink 'a;' touch x" in said.text


def test_the_experiments_own_recipe_is_named_and_shown(tmp_path):
    root = workspace(tmp_path / "runs")
    (root / "digits-vit" / "experiment.yaml").write_text("kind: experiment\nsource: digits-vit  # all of it\n")
    page, _ = page_of(root)
    assert "leansurgeon run experiment.yaml --seeds 0,1,2" in page.text and "# all of it" in page.text


def test_run_leaves_the_recipe_that_the_page_names(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from leansurgeon.cli.main import app
    from leansurgeon.training.recipe import reading

    def trained(_recipe, workspace, *, begin, **_):
        begin(_recipe)  # before anything is trained
        assert (workspace / "digits-vit" / "experiment.yaml").is_file()
        for made in digits():
            write(workspace / "digits-vit" / f"{made['experiment']['arm']}-s{made['seed']}", made)
        return [Summary.from_dict(made) for made in digits()]

    monkeypatch.setattr("leansurgeon.experiment.run", trained)
    arguments = ["run", "digits-vit", "--set", "train.duration=3ep", "--seeds", "4,5", "--workspace", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    left = reading.load(str(tmp_path / "digits-vit" / "experiment.yaml"))
    assert left == reading.load("digits-vit", ["train.duration=3ep", "seeds=[4,5]"])
    # "Do it again" holds the --set of the first call.
    text = page_of(tmp_path)[0].text
    assert "leansurgeon run digits-vit --set train.duration=3ep --seeds 4,5" in text
    assert str(tmp_path) not in text and f"--workspace '…/{'/'.join(tmp_path.parts[-3:])}'" in text


def test_raw_and_invariant_kappa_side_by_side(tmp_path):
    run = summary(experiment=None)
    for i, layer in enumerate(run["kappa"]["layers"], 1):
        layer["output"] = {"median": 10.0 * i}
        layer["jacobian"] = {"at_least": 5.0 * i, "exact": False}
        layer["weights"] = {"q": {"value": 3.0 * i}, "vo": {"value": None, "lower_bound": 1e7}}
    page, found = page_of(write(tmp_path / "a", run))
    table = page.table("Kappa that depends on the basis")
    assert [row[table.heads.index("A W_o")].value for row in table.rows] == [10.0, 20.0, 30.0]
    assert [row[table.heads.index("W_q")].value for row in table.rows] == [3.0, 6.0, 9.0]
    assert [row[table.heads.index("Jacobian")].text for row in table.rows] == ["≥5.00", "≥10", "≥15"]
    assert [row[table.heads.index("A")].value for row in table.rows] == [17, 44, 95]
    titles = [given["aria-label"] for name, given in page.elements if name == "svg" and given.get("role") == "img"]
    assert any("A W_o" in said for said in titles) and any("Jacobian" in said for said in titles)
    assert found["sections"][0]["rows"][0]["kappa"]["output"]["value"] == 20.0
    assert page.table("Results").row("a")["kappa A W_o"].value == 20.0


def test_files_that_cannot_be_written_are_usage_errors(tmp_path):
    report = leansurgeon.report(write(tmp_path / "run", summary()), progress=False)
    for place, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "a.html", "no folder")):
        with pytest.raises(UsageError, match=words):
            report.html(place)
    report.html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    # A page is put in its place: that must not replace what stands there for something else.
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no ordinary file"):
        report.html(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link.html").symlink_to("b.html")
    report.html(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "b.html").read_text().startswith("<!doctype html>")
    (tmp_path / "loop.html").symlink_to("loop.html")  # points to nothing
    report.html(tmp_path / "loop.html")
    assert str(report)  # the table is as before
