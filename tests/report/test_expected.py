"""What recipes expect of their arms, beside what was measured."""

from __future__ import annotations

import json

import pytest

from leansurgeon.report.collect import collect
from leansurgeon.report.notes import notes
from leansurgeon.report.sections import sections
from leansurgeon.report.tables.render import render
from leansurgeon.report.verdict import expectations
from tests.support.report.report_fixtures import digits, experiment_section, perplexities, summary, write

EXPECTED = {
    "original": {"parameters": 302154, "accuracy": 0.976},
    "lean": {"parameters": 152000, "accuracy": 0.94},
    "another": {"accuracy": 0.5},
}


def expecting(made: list[dict], expected: object = EXPECTED) -> list[dict]:
    return [run | {"recipe": run["recipe"] | {"expected": expected}} for run in made]


def test_parameters_agree_exactly_and_a_metric_within_what_the_seeds_allow():
    (section,) = experiment_section(expecting(digits()))
    found = {(one.name, one.figure): one for one in expectations(section)}
    assert {key: one.agrees for key, one in found.items()} == {
        ("original", "parameters"): True,
        ("original", "accuracy"): True,
        ("lean", "parameters"): False,
        ("lean", "accuracy"): False,  # 98.4 +- 0.4 % of 360, and 94 % was expected
    }
    assert found["lean", "parameters"].measured == 152394
    assert found["lean", "accuracy"].measured == pytest.approx(0.98427, abs=1e-4)
    caveats = [note.says for note in notes(section) if note.caveat and "expects" in note.says]
    assert len(caveats) == 1 and "152,000" in caveats[0] and "152,394" in caveats[0] and "94.0 %" in caveats[0]
    document = json.loads(render([section], "json"))["sections"][0]["expected"]
    assert [(one["name"], one["figure"], one["expected"]) for one in document] == [
        (name, figure, EXPECTED[name][figure]) for name in ("original", "lean") for figure in ("parameters", "accuracy")
    ]
    # Three seeds of 97.5, 97.8 and 97.5 %: sd / sqrt(3) = 0.093 points, of 360 images 0.81 points; 0.81 together.
    for expected, agrees in ((0.976 + 0.015, True), (0.976 + 0.018, False)):
        (section,) = experiment_section(expecting(digits(), {"original": {"accuracy": expected}}))
        assert [one.agrees for one in expectations(section)] == [agrees], expected


def test_a_single_run_is_compared_with_the_arm_of_its_size(tmp_path):
    same = expecting([summary("original", experiment=None)])[0]
    other = expecting([summary("control", experiment=None)])[0]
    write(tmp_path / "same", same)
    write(tmp_path / "other", other)
    (section,) = sections(collect([tmp_path]).runs)
    assert [(one.name, one.expected) for one in expectations(section)] == [("same", 302154), ("same", 0.976)]


def test_perplexity_and_loss_and_nothing_of_debug_runs_or_odd_recipes():
    runs = perplexities({"original": (23.4, 23.6), "lean": (22.1, 22.3)})
    (section,) = experiment_section(expecting(runs, {"lean": {"perplexity": 22.2, "loss": 3.1, "top5": 0.9}}))
    assert [(one.figure, one.measured) for one in expectations(section)] == [
        ("perplexity", pytest.approx(22.2)),
        ("loss", pytest.approx(3.1)),
    ]
    debug = [run | {"experiment": run["experiment"] | {"name": "digits-vit-debug"}} for run in expecting(digits())]
    assert expectations(experiment_section(debug)[0]) == []
    for odd in (None, [], 3, {"lean": 3}, {"lean": {"accuracy": "much"}}):
        assert expectations(experiment_section(expecting(digits(), odd))[0]) == []
