"""A look before a long training: a dry run without the data, and an evaluation by several processes."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from leansurgeon.cli.main import app
from leansurgeon.rank import rank
from leansurgeon.training.recipe.reading import dump, load
from tests import conftest
from tests.support import training_interrupted as cut


def _run(*arguments) -> dict:
    done = CliRunner().invoke(app, [str(part) for part in arguments])
    assert done.exit_code == 0, done.output
    return {"out": done.stdout, "err": done.stderr}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small ViTs for digits and for images of 28 x 28."""
    folder = tmp_path_factory.mktemp("models")
    conftest.build("vit").save_pretrained(folder / "digits")
    conftest.build("vit", image_size=28).save_pretrained(folder / "fashion")
    return folder


# task and its options: of none of them there is data. Sizes are published, stand in the recipe, or nobody knows them.
ABSENT = {
    "published": ("fashion-mnist", {"data": "nowhere"}, "2ep", 60_000, 60_000 // 64 * 2),
    "folder": ("folder", {"data": "nowhere", "image_size": 8, "channels": 1, "classes": 10}, "2ep", None, None),
    "folder-steps": ("folder", {"data": "nowhere", "image_size": 8, "channels": 1, "classes": 10}, "50st", None, 50),
}


@pytest.mark.parametrize("case", ABSENT)
def test_a_dry_run_needs_no_data(case, models, tmp_path, monkeypatch):
    name, options, duration, samples, steps = ABSENT[case]
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    recipe = {"version": 1, "name": "absent", "task": {"name": name, **options}}
    recipe["train"] = {"duration": duration, "batch": 64, "micro_batch": 16, "optim": {"lr": 1e3}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    model = models / ("fashion" if name == "fashion-mnist" else "digits")
    done = _run("retrain", model, "-r", tmp_path / "recipe.yaml", "--dry-run", "--gpus", "4", "--json")
    assert re.search(r"\bdata\b.*\bmade-up data\b", done["err"], re.S) and "made-up data" in done["err"]
    plan = json.loads(done["out"])["plan"]
    assert plan["data"].startswith("synthetic: ")
    assert plan["train_samples"] == samples and plan["steps"] == steps
    assert plan["processes"] == 4 and plan["micro_batch"] == 16 and plan["accumulation"] == 1
    # An untrained model knows nothing of ten classes: ln 10, more or less. One update at this rate would spoil it.
    assert 1.5 < plan["first_loss"] < 6 and plan["flops_per_step"] > 6 * 64 * plan["parameters"]


def test_a_wrong_option_ends_a_dry_run_all_the_same(models, tmp_path):
    sets = ["--set", "task.splitseed=3"]
    done = CliRunner().invoke(app, ["retrain", str(models / "digits"), "-r", "digits-vit", "--dry-run", *sets])
    assert done.exit_code != 0 and "splitseed" in str(done.exception or done.output)


def _evaluated(model, folder) -> None:
    """What each process of an evaluation does, for 360 digits in batches of 50: five here, three there."""
    from leansurgeon.training.evaluator import evaluate_model
    from leansurgeon.training.recipe.reading import load_training

    recipe = load_training("digits-vit", ["train.eval.batch=50"], transferred=False)
    told = evaluate_model(recipe, model, cpu=True)._asdict()
    (folder / f"told-{rank()}").write_text(json.dumps(told))


def test_each_sample_counts_once_on_any_number_of_processes(models, tmp_path):
    found = []
    for count in (1, 2, 3):
        folder = tmp_path / str(count)
        folder.mkdir()
        assert cut.processes(count, _evaluated, models / "digits", folder) == [0] * count
        told = [json.loads((folder / f"told-{rank}").read_text()) for rank in range(count)]
        assert all(one == told[0] for one in told)
        found.append(told[0])
    for told in found:
        assert told["samples"] == 360 and told["metrics"] == found[0]["metrics"]
        assert told["loss"] == pytest.approx(found[0]["loss"], abs=1e-6)


@pytest.mark.slow
def test_the_command_evaluates_and_runs_experiments_on_two_processes(models, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = json.loads(_run("retrain", models / "digits", "-r", "digits-vit", "--eval-only", "--json")["out"])
    more = ["--eval-only", "--json", "--cpu-processes", "2"]
    two = json.loads(_run("retrain", models / "digits", "-r", "digits-vit", *more)["out"])
    assert two["samples"] == one["samples"] == 360 and two["metrics"] == one["metrics"]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)
    recipe = load("digits-vit", ["measure=null"], debug=True)
    recipe = recipe.model_copy(update={"name": "one", "arms": {"original": recipe.arms["original"]}})
    (tmp_path / "one.yaml").write_text(dump(recipe))
    _run("run", tmp_path / "one.yaml", "--cpu-processes", "2", "--workspace", tmp_path / "runs")
    (summary,) = [json.loads(file.read_text()) for file in (tmp_path / "runs").glob("*/*/summary.json")]
    assert summary["world_size"] == 2 and summary["experiment"]["arm"] == "original"
    refused = CliRunner().invoke(app, ["run", "digits-vit", "--cpu-processes", "2", "--parallel", "3"])
    assert "exclude each other" in str(refused.exception)
