"""What an earlier call of an experiment left: taken over where the result is the same, never replaced unasked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from leansurgeon import experiment
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.experiment import jobs, trials
from leansurgeon.experiment.arms import list_wanted_shapes
from leansurgeon.experiment.jobs import make_jobs
from leansurgeon.training.recipe.schema import ExperimentRecipe, merge
from leansurgeon.training.runs import checkpoint, summary

WHOLE = {
    "name": "test",
    "kind": "experiment",
    "source": "digits-vit",
    "task": {"name": "digits"},
    "train": {"duration": "8st", "batch": 8, "optim": {"lr": 1e-3}},
    "retrain": {"optim": {"lr": 1e-4}},
    "arms": {"original": {}, "lean": {"heads": 8, "layers": 3, "mlp_dim": 128}, "control": {"control_of": "lean"}},
}


def list_jobs(folder, **changes):
    recipe = ExperimentRecipe.model_validate(merge(WHOLE, changes))
    return make_jobs(recipe, folder, list_wanted_shapes(recipe, open_source("digits-vit")), "original", 1)


def trained(job, **changes) -> summary.Summary:
    """What the training of a job leaves, without the training."""
    stages = [{"depth": 3, "heads": 8, "mlp_dim": 128}] if job.arm == "lean" else [{"depth": 6, "heads": 4}]
    left = summary.Summary(
        model=summary.Model(source=job.source, shape={"stages": stages}, parameters=152_394),
        task=summary.Task("digits", "accuracy", "top-1 accuracy", percent=True, eval_samples=360),
        name=job.experiment.name,
        seed=job.seed,
        final=summary.Scores(0.1, 0.97),
        recipe=jobs.get_training(job).model_dump(mode="json"),
        experiment=jobs.describe_part(job),
    )
    left = replace(left, **changes)
    job.run.mkdir(parents=True, exist_ok=True)
    summary.write(job.run, left)
    return left


# What is changed, and the key that decides (None where nothing that decides has changed), for original and lean.
CHANGES = {
    "nothing": ({}, None, None),
    "more seeds": ({"seeds": [0, 1, 2]}, None, None),
    "another arm": ({"arms": {"small": {"heads": 4, "layers": 2}}}, None, None),
    "what changes no result": (
        {
            "expected": {"lean": {"accuracy": 0.9}},
            "train": {
                "checkpoint": {"every": "10m", "keep_last": 9, "keep_best": False},
                "eval": {"batch": 9},
                "trackers": ["tensorboard"],
                "workers": 3,
                "log_every": 7,
            },
        },
        None,
        None,
    ),
    "a default, said": ({"train": {"micro_batch": None, "precision": "fp32"}, "source_config": {}}, None, None),
    "learning rate": ({"train": {"optim": {"lr": 2e-3}}}, "train.optim.lr", "train.optim.lr of the original"),
    "of the lean": ({"retrain": {"optim": {"lr": 2e-4}}}, None, "train.optim.lr"),
    "task": ({"task": {"size": 1}}, "task.size", "task.size"),
    "measure": ({"measure": {"kappa": {"samples": 7}}}, "measure.kappa.samples", "measure.kappa.samples"),
    "shape": ({"arms": {"lean": {"mlp_dim": 64}}}, None, "arm.mlp_dim"),
    "way of cutting": ({"arms": {"lean": {"heal": "local"}}}, None, "method.heal"),
    "source": ({"source_config": {"hidden_size": 32}}, "source_config.hidden_size", "source_config.hidden_size"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_arm_is_taken_over_while_what_decides_it_is_the_same(change, tmp_path):
    changes, *keys = CHANGES[change]
    before, now = list_jobs(tmp_path), list_jobs(tmp_path, **changes)
    for arm, key in zip(("original", "lean"), keys, strict=True):
        left = trained(before[arm, 0])
        if key is None:
            assert jobs.find_finished(now[arm, 0]) == left
            assert jobs.describe_part(now[arm, 0]).digest == left.experiment.digest  # a report takes them for one arm
        else:
            with pytest.raises(UsageError) as error:
                jobs.find_finished(now[arm, 0])
            assert f": {key} was" in error.value.message and "--force" in error.value.hint
            assert jobs.describe_part(now[arm, 0]).digest != left.experiment.digest
        assert summary.read(before[arm, 0].run) == left
    assert jobs.find_finished(now["control", 0]) is None  # nobody has trained it


def test_a_default_that_came_later_does_not_count(tmp_path):
    (job, lean, _) = list_jobs(tmp_path).values()
    for one in (job, lean):
        trained(one)
        file = one.run / "summary.json"
        written = json.loads(file.read_text())
        settings = written["experiment"]["settings"]
        for recipe in (written["recipe"], settings.get("original", {"train": {"eval": {}}})):
            recipe["train"].pop("sparse_prediction", None)
            recipe["train"]["eval"].pop("at_start", None)
        del settings["method"]["balance"], settings["arm"]["whole_groups"]
        file.write_text(json.dumps(written))
        assert jobs.find_finished(one) is not None
    other = list_jobs(tmp_path, train={"sparse_prediction": False})["original", 0]
    with pytest.raises(UsageError, match=r"sparse_prediction\b.*\bTrue\b.*\bFalse\b"):
        jobs.find_finished(other)


def test_nothing_is_trained_where_a_finished_arm_would_be_replaced(tmp_path):
    left = trained(list_jobs(tmp_path)["lean", 0])
    changed = ExperimentRecipe.model_validate(merge(WHOLE, {"train": {"batch": 16}}))
    with pytest.raises(UsageError, match="lean, seed 0"):
        experiment.run(changed, tmp_path)
    assert summary.read(list_jobs(tmp_path)["lean", 0].run) == left
    assert [path.name for path in (tmp_path / "test").iterdir()] == ["lean-s0"]


def test_an_interrupted_arm_of_other_settings_is_not_given_up_unasked(tmp_path, monkeypatch):
    before, now = list_jobs(tmp_path)["original", 0], list_jobs(tmp_path, train={"optim": {"lr": 2e-3}})["original", 0]
    state = {"recipe": jobs.get_training(before).model_dump(mode="json")}
    monkeypatch.setattr(checkpoint, "newest", lambda folder: folder / "checkpoints" / "step-00000003")
    monkeypatch.setattr(checkpoint, "read_state", lambda path: state)
    jobs.check_interrupted(before)
    with pytest.raises(UsageError, match=r"train\.optim\.lr.*0\.001.*0\.002"):
        jobs.check_interrupted(now)


def test_a_cut_is_taken_over_only_if_it_would_be_the_same(tmp_path, monkeypatch):
    made = []

    def cut(job, say, *limit):
        made.append(job.arm)
        job.start.mkdir(parents=True, exist_ok=True)
        (job.start / "config.json").write_text("{}")

    monkeypatch.setattr(trials, "make_start", cut)
    source = open_source("digits-vit")
    for changes in ({}, {}, {"arms": {"lean": {"mlp_dim": 64}}}, {"task": {"size": 1}}):
        trials.make_starts(list_jobs(tmp_path, **changes), source, lambda line: None)
    each = ["original", "lean", "control"]
    assert made == [*each, "lean", "control", *each]  # the control's MLP follows that of lean
