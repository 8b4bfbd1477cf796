"""The page: well formed, closed in itself, its numbers those of `report --json`, and harmless whatever names hold."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest

import leansurgeon
from leansurgeon.errors import UsageError
from leansurgeon.report.charts.forms import COLOURS, SERIES
from leansurgeon.report.charts.sections import OF_SECTION, of_section
from leansurgeon.report.collect import collect
from leansurgeon.report.page import page as html_page
from leansurgeon.report.page.parts import LAYERS_CAPTION
from leansurgeon.report.sections import sections
from leansurgeon.report.tables.render import make_document
from leansurgeon.training.recipe import reading
from leansurgeon.training.runs.summary import Summary
from tests.support import command_line
from tests.support.report.html_reading import Page
from tests.support.report.report_fixtures import digits, kappa, perplexities, summary, write
from tests.support.report.report_workspace import surgery, workspace

SCALES = {"%": 0.01, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "M": 1e6, "k": 1e3}
EVIL = "<script>alert(1)</script>\"'&\x00\x1b[31m"


def page_of(*folders: Path) -> tuple[Page, dict]:
    found = collect(folders)
    made = sections(found.runs)
    text = html_page.page(made, found)
    text.encode("utf-8")  # a lone surrogate would not
    page = Page(text)
    assert not page.open and not page.wrong
    return page, make_document(made, found.problems)


def text_of(folder: Path) -> str:
    found = collect([folder])
    return html_page.page(sections(found.runs), found)


@pytest.fixture(scope="module")
def digits_page(tmp_path_factory):
    return page_of(workspace(tmp_path_factory.mktemp("runs")))


def test_nothing_is_loaded(digits_page):
    page, _ = digits_page
    assert not page.names() & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use"}
    for name, given in page.elements:
        for key, value in given.items():
            assert not key.startswith("on"), f"{name} {key}"
            if key in ("href", "src", "style", "xlink:href", "action"):
                assert key == "href" and value.startswith("#")
            assert "://" not in (value or "") or (key, value) == ("xmlns", "http://www.w3.org/2000/svg")
    policy = next(a["content"] for n, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_style_and_parts_of_the_text(tmp_path):
    root = workspace(tmp_path)
    (root / "digits-vit" / "experiment.yaml").write_text("kind: experiment\nsource: digits-vit  # all of it\n")
    text = text_of(root)
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    assert "url(" not in style and "@import" not in style and "@font-face" not in style
    assert "prefers-color-scheme:dark" in style and "@media print" in style
    # Recipes and the tables of layers fold.
    outside = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    for words in ("# all of it", LAYERS_CAPTION):
        assert words in text and words not in outside
    assert "<details open" not in text and "leansurgeon run experiment.yaml --seeds 0,1,2" in text
    # Every chart stands under its heading.
    placed = {
        heading: re.findall(r"<figcaption><b>(.*?)</b>", part)
        for heading, part in re.findall(r"<h3>(.*?)</h3>(.*?)(?=<h3>|</section>)", text, re.S)
    }
    (section,) = sections(collect([root]).runs)
    charts = {part: [chart.title for chart in of_section(section, part)] for part in OF_SECTION}
    assert {part: titles for part, titles in placed.items() if titles} == {
        part: titles for part, titles in charts.items() if titles
    }


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


def test_every_figure_rounds_to_the_number_behind_it(digits_page):
    page, _ = digits_page
    assert len(page.data) > 150
    number = re.compile(r"[≥]?(-?\+?[\d,]+(?:\.(\d+))?)(?:e([+-]?\d+))?\s*(?:± [\d.,]+ )?(%|[KMG]iB|M\b)?")
    for cell in page.data:
        digits_shown, decimals, power, unit = number.match(cell.text).groups()
        scale = SCALES.get(unit, 1.0) * 10 ** int(power or 0)
        shown, half = float(digits_shown.replace(",", "")) * scale, 0.5001 * scale * 10 ** -len(decimals or "")
        assert abs(shown - cell.value) <= half + 1e-3 * abs(cell.value) * ("e" in cell.text), cell


def test_what_was_cut_and_why(digits_page):
    page, _ = digits_page
    text = page.text
    assert re.search(r"drop-layers \(near\): .*\b3 of 6\b[^:]*: 0, 1, 2\b", text, re.S)
    assert re.search(r"\bdepth -149,952\b.*\bheads \+49,728\b.*\bmlp -49,536\b", text, re.S)
    assert "accuracy 95.8 % (source 96.9 %) of 360" in text
    table = page.table("Sets of layers")
    chosen, judged = table.heads.index("chosen by"), len(table.heads) - 1
    assert [(row[chosen].text, row[judged].text) for row in table.rows] == [("even", "0.1281"), ("angular", "0.0012")]
    assert "again on all of it" in table.caption
    assert "/home/somebody" not in text and "…/digits-vit/original-s0/last" in text
    assert "leansurgeon run digits-vit --seeds 0,1,2" in text and re.search(r"\b1,437\b.*\b360\b", text, re.S)


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
    for run in digits():
        if (run["experiment"]["arm"], run["seed"]) != ("lean", 2):
            run["started"] = "2026-01-31T14:00:00+00:00"  # all at once
            write(tmp_path / f"{run['experiment']['arm']}-{run['seed']}", run)
    text = text_of(tmp_path)
    tiles = dict(re.findall(r'<dl class="tile">\s*<dt>(.*?)</dt>(.*?)</dl>', text, re.S))
    parts = dict(re.findall(r"<h3>(.*?)</h3>(.*?)(?=<h3>|</section>)", text, re.S))
    for says, tile, part in (
        ("lean has only 2 of 3 seeds", "Quality", "Results"),
        ("ran side by side", "Speed", "Memory and speed"),
    ):
        assert [name for name, content in tiles.items() if says in content] == [tile]
        assert [name for name, content in parts.items() if says in content] == [part]
        assert parts[part].index(says) < parts[part].index("<figure" if "<figure" in parts[part] else "<table")


def test_bench_stands_beside_the_training(digits_page):
    page, _ = digits_page
    lean = page.table("lean: batch 64, fp32").row("lean")
    assert lean["step, ms"].value == pytest.approx(30.0) and lean["forward of one sample, ms"].text == "–"
    assert lean["peak"].value == int(0.03 * 2**30) and lean["step against the first"].text == "0.75 (faster)"
    assert "head_dim 16 is below 64" in page.text and re.search(r"\bflash\b.*\bCPU\b", page.text, re.S)
    first = page.table("lean: batch 64, fp32").row("original")["step against the first"]
    assert first.text == "1.00" and "7 interleaved rounds" in page.text  # of itself nothing is to be told


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
    write(folder, {"attentions": [{"kind": EVIL, "stage": 0, "layer": 0, "importance": [1.0]}]}, "heads.json")
    page, _ = page_of(tmp_path)
    assert "script" not in page.names()
    assert "<script>alert(1)</script>" in page.text and "<script>alert(2)</script>" in page.text
    assert not any(key.startswith("on") for _, given in page.elements for key in given)


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
    # What depends on the basis of the heads stands beside what does not.
    run = summary(experiment=None)
    for i, layer in enumerate(run["kappa"]["layers"], 1):
        layer["output"] = {"median": 10.0 * i}
        layer["jacobian"] = {"at_least": 5.0 * i, "exact": False}
        layer["weights"] = {"q": {"value": 3.0 * i}}
    table = page_of(write(tmp_path / "a", run))[0].table("Kappa that depends on the basis")
    heads = [table.heads.index(name) for name in ("A", "A W_o", "W_q", "Jacobian")]
    assert [[row[i].text for i in heads] for row in table.rows] == [
        ["17", "10", "3.00", "≥5.00"],
        ["44", "20", "6.00", "≥10"],
        ["95", "30", "9.00", "≥15"],
    ]


def test_the_command_of_a_cut_is_one_command_without_folders_of_this_machine(tmp_path):
    for call, shown in (
        (
            "leansurgeon shrink /home/me/models/big/vit --layers 3 --keep '$(touch y)'",
            "leansurgeon shrink '…/models/big/vit' --layers 3 --keep '$(touch y)'",
        ),
        ("leansurgeon shrink a; touch x", "leansurgeon shrink 'a;' touch x"),
        ("rm -rf /", None),
        ("leansurgeon shrink 'x", None),
        ("leansurgeon x\ny", None),
    ):
        page, _ = page_of(write(tmp_path / "cut", surgery("lean", call=call), "surgery.json"))
        assert "rm -rf" not in page.text
        assert shown in page.text if shown else "leansurgeon shrink" not in page.text


def test_run_leaves_the_recipe_that_the_page_names(tmp_path, monkeypatch):
    def trained(recipe, workspace, *, begin, **_):
        begin(recipe)  # before anything is trained
        assert (workspace / "digits-vit" / "experiment.yaml").is_file()
        for made in digits():
            write(workspace / "digits-vit" / f"{made['experiment']['arm']}-s{made['seed']}", made)
        return [Summary.from_dict(made) for made in digits()]

    monkeypatch.setattr("leansurgeon.experiment.run", trained)
    sets = ["--set", "train.duration=3ep", "--seeds", "4,5"]
    done = command_line.leansurgeon("run", "digits-vit", *sets, "--workspace", tmp_path)
    assert done.returncode == 0
    left = reading.load(str(tmp_path / "digits-vit" / "experiment.yaml"))
    assert left == reading.load("digits-vit", ["train.duration=3ep", "seeds=[4,5]"])
    # "Do it again" holds the --set of the first call.
    text = page_of(tmp_path)[0].text
    assert "leansurgeon run digits-vit --set train.duration=3ep --seeds 4,5" in text
    assert str(tmp_path) not in text and f"--workspace '…/{'/'.join(tmp_path.parts[-3:])}'" in text


def test_files_that_cannot_be_written_are_usage_errors(tmp_path):
    report = leansurgeon.report(write(tmp_path / "run", summary()), progress=False)
    # A page is put in its place: that must not replace what stands there for something else.
    os.mkfifo(tmp_path / "pipe")
    for place, words in ((".", "is a folder"), ("no/a.html", "no folder"), ("pipe", "no ordinary file")):
        with pytest.raises(UsageError, match=words):
            report.html(tmp_path / place)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link.html").symlink_to("b.html")
    report.html(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "b.html").read_text().startswith("<!doctype html>")
    (tmp_path / "loop.html").symlink_to("loop.html")  # points to nothing
    report.html(tmp_path / "loop.html")
