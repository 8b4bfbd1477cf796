"""What is printed: width, grouping, kinds of memory, kappa that is only bounded, and the machine formats."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import fmean

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.report.notes import notes
from leansurgeon.report.runs import Run, read_run
from leansurgeon.report.sections import sections
from leansurgeon.report.tables.render import FORMATS, render
from leansurgeon.training.runs.summary import Summary
from leansurgeon.words import WIDTH
from tests.support.report.report_fixtures import (
    ARMS,
    digits,
    experiment_section,
    experiment_table,
    kappa,
    perplexities,
    summary,
)


def runs(*made: dict) -> list[Run]:
    return [
        read_run(Path(f"runs/digits-vit-s{i}-20260131-14250{i}"), Summary.from_dict(m), float(i))
        for i, m in enumerate(made)
    ]


def line_of(text: str, name: str) -> str:
    """The line of the table, which stands behind what is said of it."""
    table = text[text.index("---") :] if "---" in text else text
    return next(line for line in table.splitlines() if line.startswith(name))


def test_digits_table_says_what_the_issue_asks_for() -> None:
    text = experiment_table(digits())
    for line in (
        "original 6x4 97.6 ± 0.2 % 302,154 – 612 MiB 31.5 364 960",
        "lean 3x8 98.4 ± 0.4 % 152,394 -49.6 % 588 MiB 18.2 44 95",
    ):
        assert " ".join(line_of(text, line.split()[0]).split()) == line
    assert "peak RSS" in text and "(CPU)" in text
    assert re.search(r"^original +40 +183 +307 +422 +606 +960$", text, re.M)  # depths differ: layer by layer
    assert text.index("\noriginal ") < text.index("\nlean   ") < text.index("\ncontrol ")
    assert text.index("lean vs original") < text.index("L x")  # the verdict comes first


def test_default_tables_fit_80_columns() -> None:
    long = perplexities({"original": (23.4, 23.6), "lean-with-a-rather-long-name": (22.1, 22.3), "control": (9e3, 1e4)})
    for s in long:
        s["model"]["parameters"] = 8_030_261_248
        s["memory"]["bytes"] = 1_234_567_890_123
    half = runs(*(summary(arm, experiment=None, kappa=kappa((17.0, None, None))) for arm in ARMS))
    read = {"best": {"metric": 0.971}, "last": {"metric": 0.969}}
    tested = [s | {"test": read, "kappa": kappa((None, None, None))} for s in digits()]
    tables = [
        experiment_table(tested),
        experiment_table(digits()),
        experiment_table(long),
        render(sections(half)),
        render(sections(half), kappa=True),
        render(experiment_section(digits()), kappa=True),
    ]
    for text in tables:
        assert max(map(len, text.splitlines())) <= WIDTH, text
    assert "ms/ " in tables[1] and "ms/ " not in tables[0]
    assert re.search(r"\b80 columns: ms/step;.*--wide", tables[0], re.S)
    assert not any("Not in 80 columns" in text for text in tables[1:])
    assert "8.03 B" in tables[2] and "23.50 ± 0.14" in tables[2]
    # Names that do not fit run over several lines, and nothing of them is lost.
    assert all(f"14250{i}" in text for text in tables[3:5] for i in range(3))
    assert re.search(r"\bSingle runs\b.*`leansurgeon run`", tables[3], re.S)


def test_repeated_seeds_debug_runs_and_gaps_are_not_mixed() -> None:
    made = digits(arms=("original", "lean"))[:-1]  # lean lacks seed 2
    old = {"finished": "2025-01-01T00:00:00+00:00"}
    again = summary("lean", 0, final={"loss": 9.0, "metric": 0.1}, **old)
    shorter = summary("lean", 1, steps=2, **old)
    changed = summary("lean", 1, **old)  # as many steps, but another digest
    changed["experiment"]["digest"] = "a"
    debug = summary("lean", 0)
    debug["task"] |= {"train_samples": 64}
    other, section = sections(runs(again, shorter, changed, *made, debug))
    lean = section.rows[1]
    assert lean.seeds == (0, 1) and lean.metric.mean == pytest.approx((0.9806 + 0.9833) / 2)
    said = " ".join(note.says for note in section.notes)
    assert re.search(r"\b1 run\b[^;]*\bnewer\b", said, re.S) and re.search(r"\b2 runs\b[^;]*\bsettings\b", said, re.S)
    assert re.search(r"\blean\b.*\b2 of 3 seeds\b", said, re.S)
    assert [row.seeds for row in other.rows] == [(0,)]


def test_memory_is_named_after_what_was_measured() -> None:
    cpu, gpu = summary("lean", experiment=None), summary("control", experiment=None, throughput_unit="tokens/s")
    gpu["memory"] = {"bytes": 13_400_000_000, "kind": "cuda allocator peak"}
    alone = render(sections(runs(gpu)), wide=True)
    assert "GPU" in alone and "RSS" not in alone and "tokens/s" in alone
    mixed = render(sections(runs(cpu, gpu)))
    assert "588 MiB CPU" in mixed and "12.5 GiB GPU" in mixed and "not comparable" in mixed


def test_rank_deficient_kappa_is_a_bound_and_not_a_number() -> None:
    made = digits()
    made[1]["kappa"] = kappa((17.0, None, 95.0))  # lean, seed 0
    text = experiment_table(made)
    assert "≥" in line_of(text, "lean") and re.search(r"\b64 blocks\b.*\brank\b", text, re.S)
    row = json.loads(experiment_table(made, "json"))["sections"][0]["rows"][1]
    assert row["kappa"]["median"]["value"] is None and row["kappa"]["median"]["lower_bound"] > 44
    assert row["kappa"]["layers"][0]["median"] == {"value": 17.0, "lower_bound": None}
    assert "16/17" in line_of(experiment_table(made, "markdown"), "| lean")  # of the layer that lacks most


def test_kappa_rows_per_layer() -> None:
    text = render(experiment_section(digits()), kappa=True)
    assert len(re.findall(r"17/17", text)) == 12
    assert line_of(text, "lean").split()[:4] == ["lean", "1", "19", "17"]
    first = json.loads(experiment_table(digits(), "json"))["sections"][0]["rows"][1]["kappa"]["layers"][0]
    assert [first[key]["value"] for key in ("median", "worst", "centred")] == [17.0, 42.5, 4.25]
    with pytest.raises(UsageError, match="measured kappa"):
        render(experiment_section([summary(kappa=None)]), kappa=True)


def test_csv_holds_plain_numbers_and_every_row() -> None:
    rows = list(csv.DictReader(io.StringIO(experiment_table(digits(), "csv"))))
    assert [r["name"] for r in rows] == ["original", "lean", "control"]
    assert int(rows[1]["parameters"]) == 152394
    assert float(rows[1]["change"]) == pytest.approx(152394 / 302154 - 1)  # below zero, and no formula
    assert float(rows[1]["metric"]) == pytest.approx(0.98427, abs=1e-4)
    assert rows[1]["metric_sd"] and rows[1]["kappa_centred"] and rows[1]["rank"] == "17/17"
    layers = list(csv.DictReader(io.StringIO(render(experiment_section(digits()), "csv", kappa=True))))
    assert len(layers) == 12 and float(layers[0]["kappa_median"]) == 40


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t=", "\r="])
def test_no_cell_of_a_csv_begins_a_formula(begin: str) -> None:
    """A spreadsheet would run it."""
    evil = f"{begin}HYPERLINK(1)"
    run = summary("lean", experiment=evil)
    run["experiment"]["arm"] = evil
    run["task"] |= {"name": evil, "metric": evil}
    cells = [cell for row in csv.reader(io.StringIO(experiment_table([run], "csv"))) for cell in row]
    assert sum("HYPERLINK" in cell for cell in cells) >= 4
    for cell in cells:
        assert re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell) or cell[:1] not in ("=", "+", "-", "@", "\t", "\r"), cell


@pytest.mark.parametrize("name", ["a|b", "*a*", "_a_ `b`", "<b>x</b>", "[x](y)", "a\\\\b", "~~a~~", "&lt;"])
def test_names_are_shown_in_markdown_as_they_are(name) -> None:
    """As a renderer has them, in a table, its title and its sentences."""
    from markdown_it import MarkdownIt

    made = summary("lean", experiment=name)
    made["experiment"]["arm"] = name
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    html = parser.render(experiment_table([made], "markdown"))
    assert f'<td style="text-align:left">{escape(name)}' in html
    assert not re.search(r"<(em|code|b|a|s|del)>", html.replace("<strong>", ""))


def test_latex_is_balanced_and_escaped() -> None:
    made = summary("lean")
    made["experiment"]["arm"] = "lean_8"
    text = experiment_table([made], "latex")
    assert r"lean\_8" in text and r"\%" in text and r"\bottomrule" in text
    assert r"$\pm$" in experiment_table(digits(), "latex")
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body}) == 1
    assert not re.search(r"(?<!\\)%", "\n".join(body))


def test_a_table_does_not_depend_on_which_training_ended_first() -> None:
    """`run` prints it in the order of the recipe; side by side, arms end in any order."""
    made = [summary(experiment="sweep") for _ in range(4)]
    for run, name in zip(made, ("l4-h10", "l4-h2", "l4-h16", "original"), strict=True):
        run["experiment"]["arm"] = name
    first, second = (experiment_section(runs)[0] for runs in (made, made[::-1]))
    assert first == second
    assert [row.name for row in first.rows] == ["original", "l4-h2", "l4-h10", "l4-h16"]


def test_a_run_that_heals_shows_the_model_that_it_leaves(tmp_path):
    """Three runs of one task: one that got better, one whose best is the model as it was, and one from scratch."""
    heals = {"recipe": {"name": "digits-vit", "train": {"checkpoint": {"keep_start": True, "keep_best": True}}}}
    alike = {"experiment": None, "final": {"loss": 0.3, "metric": 0.61}}
    healed = summary(**alike, best={"loss": 0.2, "metric": 0.72, "step": 90}, **heals)
    as_it_was = summary(**alike, best={"loss": 0.2, "metric": 0.68, "step": 0}, **heals)
    fresh = summary(**alike, best={"loss": 0.2, "metric": 0.9, "step": 9})
    (section,) = sections(runs(healed, as_it_was, fresh))
    shown = [(row.metric.mean, row.loss.mean) for row in section.rows]
    assert sorted(shown) == [(0.61, 0.3), (0.68, 0.2), (0.72, 0.2)]

    def said(run: Run) -> str:
        return " ".join(note.says for note in notes(sections([run])[0]))

    (alone,) = runs(as_it_was)
    assert "as it was" in said(alone) and "no longer holds a model" in said(alone)
    assert "model/" not in said(alone) and "last step" not in said(alone)
    (tmp_path / "model").mkdir()
    there = said(replace(alone, path=tmp_path))
    assert "which is in model/" in there and "no longer holds a model" not in there
    assert "as it was" not in said(runs(healed)[0])


@pytest.mark.parametrize("style", FORMATS)
def test_every_format_has_every_arm_with_its_mean_and_the_verdict(style) -> None:
    text = experiment_table(digits(), style)
    for arm in ARMS:
        mean = fmean(one["final"]["metric"] for one in digits(arms=(arm,)))
        figures = {f"{100 * mean:.1f}", f"{mean:.4f}", f"{mean:.3f}", repr(mean)}
        assert arm in text and any(figure in text for figure in figures), (arm, figures)
    assert ("standard errors" in " ".join(text.split())) == (style != "csv")
