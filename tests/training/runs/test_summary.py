"""summary.json: one form, read as it was written; odd values are gaps, what is none is refused by name."""

import json

import pytest

from leansurgeon.checkpoints.record import Origin, SurgeryRecord
from leansurgeon.training.runs import summary
from leansurgeon.training.runs.summary import DamagedSummary, Memory, Model, OnTest, Part, Scores, Start, Summary, Task
from tests.support.report.report_fixtures import summary as as_earlier_versions_wrote_it

WHOLE = Summary(
    model=Model(
        "digits-vit", {"stages": [{"depth": 3}]}, 7, {"mlp": 3}, None, 0.125, Start("lean", {"config.json": "ab"})
    ),
    task=Task("digits", "accuracy", "top-1 accuracy", True, True, 1437, 360, {"source": "UCI"}),
    name="run",
    seed=3,
    before=Scores(2.3, 0.1),
    final=Scores(0.1, 0.97, {"accuracy": 0.97, "top5": 1.0}),
    best=Scores(0.09, 0.98, step=12),
    steps=20,
    left_out_steps=(4, 5),
    resumed_after=(11,),
    memory=Memory(2**28, "process peak RSS"),
    test=OnTest(40, Scores(0.2, 0.9), None),
    recipe={"train": {"batch": 64}},
    experiment=Part("x", "lean", 3, "0123", "control", "transfer", "", {"arm": {"heads": "8"}}),
    other={"later": [1, 2]},
)


def read_with(**changes) -> Summary:
    return Summary.from_dict(WHOLE.as_dict() | changes)


def test_what_was_written_is_read_again(tmp_path):
    summary.write(tmp_path, WHOLE)
    assert summary.read(tmp_path) == summary.read_if_whole(tmp_path) == WHOLE
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["memory"] == {"bytes": 2**28, "kind": "process peak RSS"} and written["schema_version"] == 1
    assert written["model"]["start"] == {"name": "lean", "files": {"config.json": "ab"}}
    assert written["best"] == {"loss": 0.09, "metric": 0.98, "step": 12} and written["later"] == [1, 2]
    assert "other" not in written and read_with(other={"a": 1}).as_dict()["other"] == {"a": 1}
    assert "settings" not in Part("x").as_dict() and Part("x", settings={}).as_dict()["settings"] == {}


def test_a_metric_as_it_is_said():
    assert [WHOLE.task.format_metric(value) for value in (None, 0.9716)] == ["unknown", "97.2 %"]
    assert Task("text", "perplexity").format_metric(31.41549) == "31.415"
    unlabelled = {key: value for key, value in WHOLE.task.as_dict().items() if key != "metric_label"}
    assert read_with(task=unlabelled).task.metric_label == "accuracy"


def test_the_surgery_before_a_training_is_typed_or_unknown():
    record = SurgeryRecord(Origin("digits-vit", "preset", "digits-vit"), initialised="fresh")
    assert Model(surgery=record.as_dict()).record == record
    assert Model().record is None and Model(surgery={"source": 5}).record is None


def test_a_file_of_an_earlier_version_loses_nothing():
    before = as_earlier_versions_wrote_it()
    after = Summary.from_dict(before).as_dict()
    for key, value in before.items():
        parts = ("model", "task", "experiment")
        assert value.items() <= after[key].items() if key in parts else value == after[key], key


@pytest.mark.parametrize("odd", [None, "x", [1], {}, True, float("nan"), 10**400])
def test_odd_values_are_gaps(odd):
    keys = (
        "final",
        "step_ms",
        "steps",
        "memory",
        "test",
        "kappa",
        "experiment",
        "recipe",
        "left_out_steps",
        "versions",
    )
    found = read_with(**dict.fromkeys(keys, odd))
    assert found.step_ms is found.steps is found.memory.bytes is None and found.recipe == {}
    assert found.final in (None, Scores()) and found.model == WHOLE.model
    assert found.left_out_steps == (() if odd != [1] else (1,))


def test_one_odd_entry_empties_a_list_and_leaves_a_map():
    found = read_with(left_out_steps=[4, "x", None, 5], versions={"torch": "2.11", "timm": 5}, status=5)
    assert found.left_out_steps == () and found.versions == {"torch": "2.11"} and found.status == ""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schema_version": None}, "no schema_version"),
        ({"schema_version": 99}, "has schema 99"),
        ({"model": None}, "lacks model"),
        ({"task": 5}, "lacks task, task.metric"),
        (None, "JSON object"),
    ],
)
def test_what_is_no_summary_is_refused_by_name(changes, named, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(WHOLE.as_dict() | changes if changes else []))
    with pytest.raises(DamagedSummary, match=named) as error:
        summary.read(tmp_path)
    assert str(tmp_path / "summary.json") in error.value.message and summary.read_if_whole(tmp_path) is None
