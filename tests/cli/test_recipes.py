"""`leansurgeon recipes` and `leansurgeon retrain` as a user calls them."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from importlib import import_module

import pytest
from typer.testing import CliRunner

from leansurgeon.architectures.presets import PRESETS
from leansurgeon.cli.main import app, main
from leansurgeon.errors import UsageError
from leansurgeon.training.recipe import reading
from tests.support.processes.forks import commanded

RUNNER = CliRunner()


def _ok(*args: str):
    done = RUNNER.invoke(app, list(args), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_list_show_and_copy(tmp_path):
    table = _ok("recipes", "list").stdout
    assert all(name in table for name in reading.list_shipped())
    assert max(map(len, table.splitlines())) <= 80
    listed = json.loads(_ok("recipes", "list", "--json").stdout)
    assert listed["schema_version"] == 1
    digits = next(row for row in listed["recipes"] if row["name"] == "digits-vit")
    assert (digits["task"], digits["arms"]) == ("digits", "original, lean, control, lean-fresh, control-fresh")
    assert digits["hardware"] == "2 CPU cores" and all(row["hardware"] for row in listed["recipes"])
    text = reading.list_shipped()["digits-vit"].read_text()
    assert _ok("recipes", "show", "digits-vit").stdout == text
    target = tmp_path / "mine.yaml"
    assert _ok("recipes", "copy", "digits-vit", str(target)).stdout.strip() == str(target)
    assert target.read_text().splitlines()[1:] == text.splitlines()[1:]  # the first leads editors to the schema
    assert reading.load(str(target)).name == "digits-vit"
    with pytest.raises(UsageError, match="exists already"):
        _ok("recipes", "copy", "digits-vit", str(target))
    _ok("recipes", "copy", "fashion-vit", str(target), "--force")
    _ok("recipes", "copy", "digits-vit", str(tmp_path))
    assert (tmp_path / "digits-vit.yaml").read_text().splitlines()[1:] == text.splitlines()[1:]


def test_a_recipe_with_a_base_can_be_shown_whole_and_copied(tmp_path):
    assert "base: imagenet-common" in _ok("recipes", "show", "imagenet-volo-d4").stdout
    whole = _ok("recipes", "show", "imagenet-volo-d4", "--resolved").stdout
    (tmp_path / "whole.yaml").write_text(whole)
    assert reading.load(str(tmp_path / "whole.yaml")) == reading.load("imagenet-volo-d4")
    assert "Table 6" in _ok("recipes", "show", "imagenet-common").stdout
    _ok("recipes", "copy", "imagenet-volo-d4", str(tmp_path))
    assert reading.load(str(tmp_path / "imagenet-volo-d4.yaml")) == reading.load("imagenet-volo-d4")


def test_a_copy_goes_to_a_folder_that_is_made(tmp_path):
    printed = _ok("recipes", "copy", "digits-vit", f"{tmp_path}/new/sub/").stdout.strip()
    assert printed == str(tmp_path / "new" / "sub" / "digits-vit.yaml")
    assert reading.load(printed).name == "digits-vit"
    with pytest.raises(UsageError, match=r"digits-vit\.yaml/below\b.*Not a directory"):
        _ok("recipes", "copy", "digits-vit", f"{printed}/below/")


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("runs")
    wanted = ["--heads", "8", "--layers", "2", "--mlp-dim", "16", "--no-proof"]
    _ok("shrink", "digits-vit", *wanted, "-o", str(workspace / "lean"))
    return workspace


def test_retrain_takes_the_newest_shrunk_model_and_its_recipe(shrunk, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(shrunk / "cache"))
    sets = ["--set", "train.duration=2st", "--set", "train.log_every=1", "--set", "measure.kappa.samples=4"]
    done = _ok("retrain", "--workspace", str(shrunk), "--set", "train.seed=3", "--json", *sets)
    summary = json.loads(done.stdout)  # exactly one document
    assert summary["status"] == "done" and summary["steps"] == 2 and summary["seed"] == 3
    assert summary["recipe"]["train"]["optim"]["lr"] == 2e-3  # weights that start fresh take the full rate
    assert len(summary["kappa"]["layers"]) == 2
    assert summary["model"]["init_std"] == 0.125  # the preset's own initializer_range
    assert "recipe digits-vit" in done.stderr
    run = next(path for path in shrunk.iterdir() if (path / "summary.json").exists())
    assert json.loads((run / "summary.json").read_text()) == summary
    assert reading.load(str(run / "recipe.yaml")).train.seed == 3  # the resolved recipe can be used again
    # A run folder is a model too: its best weights have learned something, so they start at the lower rate.
    again = _ok("retrain", str(run), "-r", "digits-vit", "-o", str(shrunk / "again"), *sets)
    assert again.stdout.strip() == str(shrunk / "again")
    assert json.loads((shrunk / "again" / "summary.json").read_text())["recipe"]["train"]["optim"]["lr"] == 3e-4
    # What was trained loads with plain transformers and is what was measured.
    from transformers import ViTForImageClassification

    model = ViTForImageClassification.from_pretrained(run / "model")
    assert sum(p.numel() for p in model.parameters()) == summary["model"]["parameters"]


def test_sigterm_says_what_was_kept(shrunk, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(shrunk / "cache"))
    run = shrunk / "terminated"
    sets = ["--set", "train.duration=5000st", "--set", "train.eval.every=1st"]
    process = commanded("retrain", shrunk / "lean", "-o", run, *sets, cwd=shrunk)
    end = time.monotonic() + 120
    while not (run / "model").is_dir() and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out, err = process.wait()
    assert code == 75 and out == "", err
    assert re.search(r"\bafter step \d+", err, re.S) and err.endswith(f"--resume {run}\n")
    assert "Traceback" not in err and (run / "model" / "config.json").is_file()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["run", "digits-vit"], r"\binterrupted\b.*\bsame command\b"),
        (["report"], r"\binterrupted\b"),
    ],
)
def test_ctrl_c_is_answered(command, words, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("leansurgeon.experiment.run", interrupted)
    monkeypatch.setattr(import_module("leansurgeon.report.collect"), "collect", interrupted)
    monkeypatch.setattr(sys, "argv", ["leansurgeon", *command])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert re.search(rf"^leansurgeon: .*{words}.*\.\n$", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seeds", "x"], "^--seeds x: whole numbers"),
        (["--seeds", "1,-2"], "^--seeds 1,-2: whole numbers"),
        (["--seeds", "1,1"], r"--seeds\b.*\btwice\b"),
        (["--set", "arms.lean.heads=0"], r"^Arm 'lean': --heads .*\b1\b"),
        (["--set", "arms.lean.layers=9"], "^Arm 'lean': --layers 9"),
    ],
)
def test_a_wrong_run_is_refused_before_any_training(args, words, tmp_path, monkeypatch):
    monkeypatch.setattr("leansurgeon.experiment.drive", lambda *a: pytest.fail("training started"))
    with pytest.raises(UsageError, match=words):
        RUNNER.invoke(app, ["run", "digits-vit", "--workspace", str(tmp_path), *args], catch_exceptions=False)


def test_a_preset_and_its_recipe_name_each_other():
    """`retrain` takes the recipe of a model's preset, so its data must fit the sizes in that preset's config."""
    bound = {name: preset.recipe for name, preset in PRESETS.items() if preset.recipe}
    assert bound
    for name, recipe in bound.items():
        assert reading.load(recipe).source == PRESETS[name].name == name


def test_dry_run_prints_the_resolved_recipe_and_trains_nothing(shrunk, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(shrunk / "cache"))
    before = sorted(shrunk.iterdir())
    done = _ok("retrain", str(shrunk / "lean"), "--dry-run", "--json", "--set", "train.micro_batch=16")
    plan = json.loads(done.stdout)["plan"]
    assert (plan["steps"], plan["steps_per_epoch"], plan["accumulation"]) == (660, 22, 4)
    text = _ok("retrain", str(shrunk / "lean"), "--dry-run", "--cpu-processes", "2")
    (shrunk / "cache" / "resolved.yaml").write_text(text.stdout)
    assert reading.load(str(shrunk / "cache" / "resolved.yaml")).train.batch == 64
    assert "micro batch  32" in text.stderr
    assert sorted(shrunk.iterdir()) == sorted({*before, shrunk / "cache"})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], r"\bmodel\b.*\bnowhere\b"),
        (["--workspace", "nowhere"], r"\bmodel\b.*\bnowhere\b"),
        (["--gpus", "0"], r"--gpus .*\b1\b"),
        (["--gpus", "2", "--cpu-processes", "2"], "exclude each other"),
        (["--cpu-processes", "-1"], r"--cpu-processes .*\b1\b"),
    ],
)
def test_wrong_calls_are_one_sentence(args, words):
    with pytest.raises(UsageError, match=words):
        RUNNER.invoke(app, ["retrain", *args], catch_exceptions=False)


def test_a_model_without_a_bound_recipe_asks_for_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no surgery\.json") as error:
        RUNNER.invoke(app, ["retrain", str(tmp_path)], catch_exceptions=False)
    assert "--recipe" in error.value.hint
    (tmp_path / "surgery.json").write_text('{"source": {"name": "some/model"}}')
    with pytest.raises(UsageError, match=r"\bpreset\b.*--recipe"):
        RUNNER.invoke(app, ["retrain", str(tmp_path)], catch_exceptions=False)


def test_more_gpus_than_the_machine_has(shrunk, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"\b2\b.*\b0\b"):
        RUNNER.invoke(app, ["retrain", str(shrunk / "lean"), "--gpus", "2"], catch_exceptions=False)
