"""A look before a long training: a dry run without the data, an evaluation, and a training on a few batches."""

import json
import re

import pytest

from leansurgeon.training.recipe.reading import dump, load
from tests import conftest
from tests.support.command_line import leansurgeon


def run_command(*arguments: object):
    done = leansurgeon(*arguments)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small ViTs for digits and for images of 28 x 28."""
    folder = tmp_path_factory.mktemp("models")
    conftest.build("vit").save_pretrained(folder / "digits")
    conftest.build("vit", image_size=28).save_pretrained(folder / "fashion")
    return folder


FOLDER = {"name": "folder", "data": "nowhere", "image_size": 8, "channels": 1, "classes": 10}
# Task, of none of which there is data, duration, training samples and steps: both are published, or nobody knows them.
ABSENT = {
    "published": ({"name": "fashion-mnist", "data": "nowhere"}, "2ep", 60_000, 60_000 // 64 * 2),
    "folder": (FOLDER, "2ep", None, None),
    "folder-steps": (FOLDER, "50st", None, 50),
}


@pytest.mark.parametrize("case", ABSENT)
def test_a_dry_run_needs_no_data(case, models, own_cache, tmp_path):
    task, duration, samples, steps = ABSENT[case]
    recipe = {"version": 1, "name": "absent", "task": task}
    recipe["train"] = {"duration": duration, "batch": 64, "micro_batch": 16, "optim": {"lr": 1e3}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    model = models / ("fashion" if case == "published" else "digits")
    done = run_command("retrain", model, "-r", tmp_path / "recipe.yaml", "--dry-run", "--gpus", "4", "--json")
    assert re.search(r"\bdata\b.*\bmade-up data\b", done.stderr, re.S)
    plan = json.loads(done.stdout)["plan"]
    assert plan["data"].startswith("synthetic: ")
    assert plan["train_samples"] == samples and plan["steps"] == steps
    assert plan["processes"] == 4 and plan["micro_batch"] == 16 and plan["accumulation"] == 1
    # An untrained model knows nothing of ten classes: ln 10, more or less. One update at this rate would spoil it.
    assert 1.5 < plan["first_loss"] < 6 and plan["flops_per_step"] > 6 * 64 * plan["parameters"]
    assert steps is None or plan["flops"] == plan["flops_per_step"] * steps


def test_an_evaluation_is_that_of_a_training_and_a_limit_cuts_epochs(models, own_cache, tmp_path):
    """--eval-only gives what the run calls `before`, and leaves no file."""
    words = ["retrain", models / "digits", "-r", "digits-vit", "--json", "--set", "train.eval.batch=100"]
    evaluated = json.loads(run_command(*words, "--eval-only").stdout)
    assert evaluated["samples"] == 360 and set(evaluated["metrics"]) == {"accuracy"}
    assert list(tmp_path.iterdir()) == []
    words += ["--set", "measure=null", "--set"]
    limits = ["train.duration=2ep", "--limit-batches", "2", "-o", tmp_path / "limited"]
    limited = json.loads(run_command(*words, *limits).stdout)
    assert limited["steps"] == 4 and limited["task"]["eval_samples"] == 200
    whole = json.loads(run_command(*words, "train.duration=1st", "-o", tmp_path / "whole").stdout)
    assert whole["before"]["loss"] == pytest.approx(evaluated["loss"], rel=1e-6)


@pytest.mark.slow
def test_the_command_runs_experiments_on_two_processes(tmp_path):
    recipe = load("digits-vit", ["measure=null"], debug=True)
    recipe = recipe.model_copy(update={"name": "one", "arms": {"original": recipe.arms["original"]}})
    (tmp_path / "one.yaml").write_text(dump(recipe))
    run_command("run", tmp_path / "one.yaml", "--cpu-processes", "2", "--workspace", tmp_path / "runs")
    (summary,) = [json.loads(file.read_text()) for file in (tmp_path / "runs").glob("*/*/summary.json")]
    assert summary["world_size"] == 2 and summary["experiment"]["arm"] == "original"
    refused = leansurgeon("run", "digits-vit", "--cpu-processes", "2", "--parallel", "3")
    assert "exclude each other" in refused.stderr
