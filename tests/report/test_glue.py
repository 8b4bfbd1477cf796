"""The GLUE table over runs, against Table 1 of the paper; and the test split beside validation."""

from __future__ import annotations

import json
import re

import pytest

from leansurgeon.report.collect import collect
from leansurgeon.report.sections import sections
from leansurgeon.report.tables.render import render
from tests.support.report.report_fixtures import experiment_section, summary

# Paper, Table 1: original and lean on the eight tasks, and what it prints as their average.
TABLE_1 = {
    "original": ({"mnli": 83.8, "sst2": 92.3, "stsb": 86.3, "rte": 55.1, "qnli": 90.1, "qqp": 87.3, "mrpc": 85.0,
                  "cola": 48.9}, 78.6),
    "lean": ({"mnli": 83.7, "sst2": 92.3, "stsb": 86.3, "rte": 55.3, "qnli": 90.0, "qqp": 87.3, "mrpc": 85.2,
              "cola": 48.9}, 78.6),
}  # fmt: skip


def write(folder, model, task, value, seed=0, digest=None, name=None):
    made = summary("lean", seed, experiment=None)
    made["task"] |= {"name": "glue", "metric": "f1", "metric_label": "F1", "eval_samples": 300, "data": {"task": task}}
    made["final"] = made["final"] | {"metric": value / 100}
    made["model"]["start"] = {
        "name": name or model,
        "files": {"model.safetensors": digest or model, "config.json": "c"},
    }
    path = folder / f"{model}-{task}-{seed}"
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(made))


def glue_of(folder):
    (found,) = [s for s in sections(collect([folder]).runs) if s.kind == "glue"]
    return found


def test_the_mean_is_that_of_the_paper(tmp_path):
    for model, (scores, _) in TABLE_1.items():
        for task, value in scores.items():
            write(tmp_path, model, task, value)
    found = glue_of(tmp_path)
    text = render([found])
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    for model, (scores, mean) in TABLE_1.items():
        assert lines[model][1:] == [f"{value:.1f}" for value in scores.values()] + [f"{mean:.1f}"]
    assert max(map(len, text.splitlines())) <= 80
    document = json.loads(render([found], "json"))["sections"][0]["rows"]
    assert [row["mean_of_scores"] for row in document] == pytest.approx([0.786, 0.786], abs=5e-4)
    assert document[1]["scores"]["stsb"]["mean"] == 0.863
    assert "78.6" in render([found], "markdown") and "78.6" in render([found], "latex")


def test_without_all_eight_there_is_no_mean(tmp_path):
    scores, _ = TABLE_1["lean"]
    for task in ("mnli", "sst2", "cola"):
        write(tmp_path, "lean", task, scores[task])
    found = glue_of(tmp_path)
    text = render([found])
    assert "3 of 8" in text and re.search(r"\bmissing\b.*\blean\b", " ".join(text.split()), re.S)
    assert json.loads(render([found], "json"))["sections"][0]["rows"][0]["mean_of_scores"] is None


def test_seeds_of_one_model_are_one_row_and_models_of_one_name_are_two(tmp_path):
    for seed, value in enumerate((80.0, 84.0)):
        write(tmp_path, "lean", "rte", value, seed)
    write(tmp_path, "other", "rte", 60.0, digest="another training", name="lean")
    rows = glue_of(tmp_path).rows
    assert sorted(round(row.scores["rte"].mean, 3) for row in rows) == [0.6, 0.82]


def test_the_test_split_stands_beside_validation():
    last, best = {"loss": 1.0, "metric": 0.40}, {"loss": 0.9, "metric": 0.41}
    runs = [summary("lean", seed, test={"samples": 2000, "last": last, "best": best}) for seed in range(3)]
    (section,) = experiment_section(runs)
    text = render([section])
    assert "41.0 ± 0.0 %" in text and "40.0" not in text
    assert re.search(r"\bbest in validation\b", " ".join(text.split()), re.S)
    assert max(map(len, text.splitlines())) <= 80
    assert "40.0 ± 0.0 %" in render([section], wide=True)
    row = json.loads(render([section], "json"))["sections"][0]["rows"][0]
    assert row["test"]["mean"] == pytest.approx(0.41) and row["test_last"]["mean"] == pytest.approx(0.40)
    (plain,) = experiment_section([summary("lean", seed) for seed in range(3)])
    assert "test" not in render([plain]).splitlines()[3]
