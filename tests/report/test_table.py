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
from leansurgeon.report import humans, notes
from leansurgeon.report.runs import Run, read_run
from leansurgeon.report.sections import sections
from leansurgeon.report.tables import columns
from leansurgeon.report.tables import render as terminal
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


def words(text: str, name: str) -> str:
    return " ".join(line_of(text, name).split())


def test_throughput_is_called_by_its_unit_and_small_figures_keep_their_digits() -> None:
    (section,) = sections(runs(summary(experiment=None, throughput=812.34, throughput_unit="tokens/s")))
    column = columns.define_columns(section)["throughput"]
    assert (column.head, column.cell(section.rows[0])) == ("tokens/s", "812")
    (slow,) = sections(runs(summary(experiment=None, throughput=45.23)))
    assert column.cell(slow.rows[0]) == "45.2"


def test_digits_table_says_what_the_issue_asks_for() -> None:
    text = experiment_table(digits())
    assert words(text, "original") == "original 6x4 97.6 ± 0.2 % 302,154 – 612 MiB 31.5 364 960"
    assert words(text, "lean") == "lean 3x8 98.4 ± 0.4 % 152,394 -49.6 % 588 MiB 18.2 44 95"
    assert "peak RSS" in text and "(CPU)" in text
    assert re.search(r"^original +40 +183 +307 +422 +606 +960$", text, re.M)  # depths differ: layer by layer
    assert text.index("\noriginal ") < text.index("\nlean   ") < text.index("\ncontrol ")
    assert text.index("lean vs original") < text.index("L x")  # the verdict comes first


def test_default_tables_fit_80_columns() -> None:
    long = perplexities(
        {"original": (23.4, 123.6), "lean-with-a-rather-long-name": (22.1, 22.3), "control": (9e3, 1e4)}
    )
    for s in long:
        s["model"]["parameters"] = 8_030_261_248
        s["memory"]["bytes"] = 1_234_567_890_123
    names = [summary(arm, experiment=None, name="a-name-of-a-run") for arm in ARMS]
    half = runs(*(n | {"kappa": kappa((17.0, None, None))} for n in names))
    read = {"best": {"metric": 0.971}, "last": {"metric": 0.969}}
    bounds = kappa((None, None, None))
    tested = [s | {"test": read, "kappa": bounds} for s in digits()]
    tables = [
        experiment_table(tested),
        experiment_table(digits()),
        experiment_table(long),
        experiment_table(perplexities({"original": (23.4, 23.6), "lean": (22.1, 22.3), "control": (22.0, 22.4)})),
        render(sections(half)),
        render(sections(half), kappa=True),
        render(experiment_section(digits()), kappa=True),
    ]
    for text in tables:
        assert max(map(len, text.splitlines())) <= WIDTH, text
    assert "ms/ " in tables[1] and "ms/ " not in tables[0]
    assert re.search(r"\b80 columns: ms/step;.*--wide", tables[0], re.S)
    assert not any("Not in 80 columns" in text for text in tables[1:])
    assert "8.03 B" in tables[2]
    # Names that do not fit run over several lines, and nothing of them is lost.
    assert all(f"14250{i}" in text for text in tables[4:6] for i in range(3))


def test_repeated_seeds_debug_runs_and_gaps_are_not_mixed() -> None:
    made = digits(arms=("original", "lean"))[:-1]  # lean lacks seed 2
    old = [summary("lean", 0, finished="2025-01-01T00:00:00+00:00", final={"loss": 9.0, "metric": 0.1})]
    other = [summary("lean", 1, finished="2025-01-01T00:00:00+00:00", steps=2)]
    found = [
        read_run(Path(f"r{i}"), Summary.from_dict(m), i - 10.0 if m["finished"] < "2026" else float(i))
        for i, m in enumerate(made)
    ]
    found += [read_run(Path(f"old{i}"), Summary.from_dict(m), -1.0 - i) for i, m in enumerate(old + other)]
    (section,) = sections(found)
    lean = section.rows[1]
    assert lean.seeds == (0, 1) and lean.metric.mean == pytest.approx((0.9806 + 0.9833) / 2)
    said = " ".join(note.says for note in section.notes)
    assert re.search(r"\b1 run\b[^;]*\bnewer\b", said, re.S) and re.search(r"\b1 run\b[^;]*\bsettings\b", said, re.S)
    assert re.search(r"\blean\b.*\b2 of 3 seeds\b", said, re.S)


def test_debug_runs_of_the_same_name_are_another_table() -> None:
    debug = summary("lean", 0)
    debug["task"] = debug["task"] | {"train_samples": 64}
    assert len(sections(runs(*digits(), debug))) == 2


def test_memory_is_named_after_what_was_measured() -> None:
    cpu, gpu = summary("lean", experiment=None), summary("control", experiment=None)
    gpu["memory"] = {"bytes": 13_400_000_000, "kind": "cuda allocator peak"}
    assert "GPU" in render(sections(runs(gpu))) and "RSS" not in render(sections(runs(gpu)))
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


def test_single_runs_carry_a_caution() -> None:
    assert re.search(
        r"\bSingle runs\b.*`leansurgeon run`",
        render(sections(runs(*(summary(a, experiment=None) for a in ARMS)))),
        re.S,
    )


def test_csv_holds_plain_numbers_and_every_row() -> None:
    text = experiment_table(digits(), "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [r["name"] for r in rows] == ["original", "lean", "control"]
    assert int(rows[1]["parameters"]) == 152394
    assert float(rows[1]["metric"]) == pytest.approx(0.98427, abs=1e-4)
    assert rows[1]["metric_sd"] and rows[1]["kappa_centred"] and rows[1]["rank"] == "17/17"
    layers = list(csv.DictReader(io.StringIO(render(experiment_section(digits()), "csv", kappa=True))))
    assert len(layers) == 12 and float(layers[0]["kappa_median"]) == 40


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t=", "\r="])
def test_no_cell_of_a_csv_begins_a_formula(begin: str, tmp_path: Path) -> None:
    """A spreadsheet would run it; numbers below zero stay numbers."""
    evil = f"{begin}HYPERLINK(1)"
    made = [
        s | {"experiment": s["experiment"] | {"arm": evil, "name": evil}} for s in digits(arms=("original", "lean"))
    ]
    for run in made:
        run["task"] = run["task"] | {"name": evil, "metric": evil}
    found = [read_run(Path(f"{begin}x/{i}"), Summary.from_dict(run), float(i)) for i, run in enumerate(made)]
    cells = [cell for row in csv.reader(io.StringIO(render(sections(found), "csv"))) for cell in row]
    assert sum("HYPERLINK" in cell for cell in cells) >= 4
    for cell in cells:
        assert re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell) or cell[:1] not in ("=", "+", "-", "@", "\t", "\r"), cell
    numbers = list(csv.DictReader(io.StringIO(experiment_table(digits(), "csv"))))
    assert float(numbers[1]["change"]) == pytest.approx(152394 / 302154 - 1)


@pytest.mark.parametrize("name", ["a|b", "*a*", "_a_ `b`", "<b>x</b>", "[x](y)", "a\\\\b", "~~a~~", "&lt;"])
def test_names_are_shown_in_markdown_as_they_are(name) -> None:
    """As a renderer has them, in a table, its title and its sentences."""
    from markdown_it import MarkdownIt

    made = [s | {"experiment": s["experiment"] | {"arm": name, "name": name}} for s in digits(arms=("lean",))]
    html = (
        MarkdownIt("commonmark", {"html": True})
        .enable("table")
        .enable("strikethrough")
        .render(experiment_table(made, "markdown"))
    )
    assert f'<td style="text-align:left">{escape(name)}' in html
    assert not re.search(r"<(em|code|b|a|s|del)>", html.replace("<strong>", ""))


def test_markdown_has_rank_centred_and_verdicts() -> None:
    text = experiment_table(
        [s | {"experiment": s["experiment"] | {"arm": "a|b"}} for s in digits(arms=("lean",))], "markdown"
    )
    assert "a\\|b" in text and "kappa centred" in text and "rank" in text
    assert "standard errors" in experiment_table(digits(), "markdown")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_latex_is_balanced_and_escaped() -> None:
    made = [s | {"experiment": s["experiment"] | {"arm": "lean_8"}} for s in digits(arms=("lean",))]
    text = experiment_table(made, "latex")
    assert r"lean\_8" in text and r"$\pm$" in text and r"\%" in text and r"\bottomrule" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body}) == 1
    assert not re.search(r"(?<!\\)%", "\n".join(body))


def test_unknown_format() -> None:
    with pytest.raises(UsageError, match=r"'markdown'"):
        experiment_table(digits(), "markdwon")


@pytest.mark.parametrize("style", FORMATS)
def test_every_format_has_every_arm_with_its_mean(style) -> None:
    text = experiment_table(digits(), style)
    for arm in ("original", "lean", "control"):
        mean = fmean(one["final"]["metric"] for one in digits(arms=(arm,)))
        figures = {f"{100 * mean:.1f}", f"{mean:.4f}", f"{mean:.3f}", repr(mean)}
        assert arm in text and any(figure in text for figure in figures), (arm, figures)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (humans.count(152394), "152,394"),
        (humans.count(119_589_889, short=True), "119.6 M"),
        (humans.change(152394, 302154), "-49.6 %"),
        (humans.change(5, None), "–"),
        (humans.memory(12.3 * 2**20), "12.3 MiB"),
        (humans.memory(612 * 2**20), "612 MiB"),
        (humans.memory(1023.6 * 2**20), "1.0 GiB"),
        (humans.plain(9.996), "10.0"),
        (humans.plain(999.9), "1,000"),
        (humans.plain(3.1e7), "3.1e7"),
        (humans.seconds(161), "2.7 min"),
        (humans.join_words(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_humans(shown: str, text: str) -> None:
    assert shown == text


def test_step_times_of_trainings_side_by_side_carry_a_caution() -> None:
    assert "side by side" not in experiment_table(digits())
    made = digits()
    made[1]["started"] = made[0]["started"]
    assert "side by side" in experiment_table(made)


def test_a_table_does_not_depend_on_which_training_ended_first() -> None:
    """`run` prints it in the order of the recipe; side by side, arms end in any order."""
    made = [summary(experiment="sweep") for _ in range(4)]
    for run, name in zip(made, ("l4-h10", "l4-h2", "l4-h16", "original"), strict=True):
        run["experiment"]["arm"] = name
    first, second = (experiment_section(runs)[0] for runs in (made, made[::-1]))
    assert first == second
    assert [row.name for row in first.rows] == ["original", "l4-h2", "l4-h10", "l4-h16"]


def test_seeds_of_other_settings_are_no_seeds_of_one_arm() -> None:
    """The digest tells a changed recipe even where it takes as many steps."""
    made = [summary("lean", seed) for seed in range(3)]
    for run, digest in zip(made, ("a", "b", "b"), strict=True):
        run["experiment"]["digest"] = digest
    (section,) = experiment_section(made)
    assert section.rows[0].seeds == (1, 2)
    assert any(re.search(r"\b1 run\b.*\bsettings\b.*\(lean\)", note.says) for note in section.notes)


def test_the_spread_of_a_perplexity_stands_beside_it() -> None:
    text = experiment_table(perplexities({"original": (23.4, 23.6, 23.5), "lean": (22.1, 22.3, 22.2)}))
    assert "23.50 ± 0.10" in line_of(text, "original")


def test_a_run_that_heals_shows_the_model_that_it_leaves(tmp_path):
    """Three runs of one task: one that got better, one whose best is the model as it was, and one from scratch."""
    heals = {"recipe": {"name": "digits-vit", "train": {"checkpoint": {"keep_start": True, "keep_best": True}}}}
    final = {"loss": 0.3, "metric": 0.61}
    made = [
        summary(
            "lean", experiment=None, name=name, final=final, best={"loss": 0.2, "metric": best, "step": step}, **more
        )
        for name, best, step, more in (
            ("healed", 0.72, 90, heals),
            ("as-it-was", 0.68, 0, heals),
            ("fresh", 0.9, 9, {}),
        )
    ]
    (section,) = sections(runs(*made))
    found = {row.name.split()[0]: (row.metric.mean, row.loss.mean) for row in section.rows}
    assert sorted(found.values()) == [(0.61, 0.3), (0.68, 0.2), (0.72, 0.2)]
    (alone,) = sections(runs(made[1]))
    said = " ".join(note.says for note in notes.notes(alone))
    assert (
        "model/" not in said and "as it was" in said and "no longer holds a model" in said and "last step" not in said
    )
    there = [replace(run, path=tmp_path) for run in runs(made[1])]
    (tmp_path / "model").mkdir()
    said = " ".join(note.says for note in notes.notes(sections(there)[0]))
    assert "which is in model/" in said and "no longer holds a model" not in said
    assert "as it was" not in " ".join(note.says for note in notes.notes(sections(runs(made[0]))[0]))


def test_long_heads_are_broken_at_the_blank_nearest_to_their_middle() -> None:
    assert terminal.break_head("twelve chars") == "twelve chars"  # no longer than twelve
    assert terminal.break_head("accuracy on the test") == "accuracy on\nthe test"
    assert terminal.break_head("one\nbroken already here") == "one\nbroken already here"


def test_names_run_down_the_lines_that_they_have() -> None:
    name = columns.Column("name", "name", lambda row: row[0], left=True)
    shown = [name, columns.Column("i", "i", lambda row: row[1])]
    layers = [("a long name", 0), ("a long name", 1), ("b", 0)]
    lines = terminal.draw_grid(layers, shown, 6).splitlines()[2:]
    assert [line.rstrip("01 ") for line in lines] == ["a long", "name", "b"]
    alone = terminal.draw_grid([list(row) for row in layers[:2]], shown, 6).splitlines()[2:]
    assert [line.rstrip("01 ") for line in alone] == ["a long", "name"] * 2
