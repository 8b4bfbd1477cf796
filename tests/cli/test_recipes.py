"""`leansurgeon recipes` and `leansurgeon retrain` as a user calls them."""

from __future__ import annotations

import re
import signal
import time
from importlib import import_module

import pytest
import torch
from transformers import ViTForImageClassification

from leansurgeon.architectures.presets import PRESETS
from leansurgeon.training.recipe import reading
from tests.cli.answers import document, read, stderr_of, typed, works
from tests.support.processes.forks import commanded


def test_list_show_and_copy(tmp_path):
    table = works("recipes list").stdout
    assert all(name in table for name in reading.list_shipped())
    assert max(map(len, table.splitlines())) <= 80
    listed = document("recipes list")
    assert listed["schema_version"] == 1
    digits = next(row for row in listed["recipes"] if row["name"] == "digits-vit")
    assert (digits["task"], digits["arms"]) == ("digits", "original, lean, control, lean-fresh, control-fresh")
    assert digits["hardware"] == "2 CPU cores" and all(row["hardware"] for row in listed["recipes"])
    text = reading.list_shipped()["digits-vit"].read_text()
    assert works("recipes show digits-vit").stdout == text
    target = tmp_path / "mine.yaml"
    assert works(f"recipes copy digits-vit {target}").stdout.strip() == str(target)
    assert target.read_text().splitlines()[1:] == text.splitlines()[1:]  # the first leads editors to the schema
    assert reading.load(str(target)).name == "digits-vit"
    again = typed(f"recipes copy digits-vit {target}")
    assert again.returncode == 2 and "exists already" in again.stderr
    works(f"recipes copy fashion-vit {target} --force")
    # A folder is made, and the recipe has its own name there.
    printed = works(f"recipes copy digits-vit {tmp_path}/new/sub/").stdout.strip()
    assert printed == f"{tmp_path}/new/sub/digits-vit.yaml" and reading.load(printed).name == "digits-vit"


def test_a_recipe_with_a_base_can_be_shown_whole_and_copied(tmp_path):
    assert "base: imagenet-common" in works("recipes show imagenet-volo-d4").stdout
    (tmp_path / "whole.yaml").write_text(works("recipes show imagenet-volo-d4 --resolved").stdout)
    works(f"recipes copy imagenet-volo-d4 {tmp_path}")
    for name in ("whole", "imagenet-volo-d4"):
        assert reading.load(f"{tmp_path}/{name}.yaml") == reading.load("imagenet-volo-d4")


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("runs")
    works(f"shrink digits-vit --heads 8 --layers 2 --mlp-dim 16 --no-proof -o {workspace}/lean")
    return workspace


def test_retrain_takes_the_newest_shrunk_model_and_its_recipe(shrunk):
    sets = "--set train.duration=2st --set train.log_every=1 --set measure.kappa.samples=4"
    summary = document(f"retrain --workspace {shrunk} --set train.seed=3 {sets}")  # exactly one document
    assert summary["status"] == "done" and summary["steps"] == 2 and summary["seed"] == 3
    assert summary["recipe"]["train"]["optim"]["lr"] == 2e-3  # weights that start fresh take the full rate
    assert len(summary["kappa"]["layers"]) == 2
    assert summary["model"]["init_std"] == 0.125  # the preset's own initializer_range
    run = next(path for path in shrunk.iterdir() if (path / "summary.json").exists())
    assert read(run / "summary.json") == summary
    assert reading.load(str(run / "recipe.yaml")).train.seed == 3  # the resolved recipe can be used again
    # A run folder is a model too: its best weights have learned something, so they start at the lower rate.
    again = works(f"retrain {run} -r digits-vit -o {shrunk}/again {sets}")
    assert again.stdout.strip() == f"{shrunk}/again"
    assert read(shrunk / "again" / "summary.json")["recipe"]["train"]["optim"]["lr"] == 3e-4
    # What was trained loads with plain transformers and is what was measured.
    model = ViTForImageClassification.from_pretrained(run / "model")
    assert sum(p.numel() for p in model.parameters()) == summary["model"]["parameters"]


def test_sigterm_says_what_was_kept(shrunk):
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
    ("line", "words"), [("run digits-vit", r"\binterrupted\b.*\bsame command\b"), ("report", r"\binterrupted\b")]
)
def test_ctrl_c_is_answered(line, words, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("leansurgeon.experiment.run", interrupted)
    monkeypatch.setattr(import_module("leansurgeon.report.collect"), "collect", interrupted)
    done = typed(line)
    assert done.returncode == 130 and re.search(rf"^leansurgeon: .*{words}.*\.\n$", done.stderr)


def test_a_preset_and_its_recipe_name_each_other():
    """`retrain` takes the recipe of a model's preset, so its data must fit the sizes in that preset's config."""
    bound = {name: preset.recipe for name, preset in PRESETS.items() if preset.recipe}
    assert bound
    for name, recipe in bound.items():
        assert reading.load(recipe).source == PRESETS[name].name == name


def test_dry_run_prints_the_resolved_recipe_and_trains_nothing(shrunk, tmp_path):
    before = sorted(shrunk.iterdir())
    plan = document(f"retrain {shrunk}/lean --dry-run --set train.micro_batch=16")["plan"]
    assert (plan["steps"], plan["steps_per_epoch"], plan["accumulation"]) == (660, 22, 4)
    text = works(f"retrain {shrunk}/lean --dry-run --cpu-processes 2")
    (tmp_path / "resolved.yaml").write_text(text.stdout)
    assert reading.load(str(tmp_path / "resolved.yaml")).train.batch == 64
    assert "micro batch  32" in text.stderr and sorted(shrunk.iterdir()) == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run digits-vit --seeds x", "--seeds x: whole numbers"),
        ("run digits-vit --seeds 1,1", r"--seeds\b.*\btwice\b"),
        ("run digits-vit --set arms.lean.heads=0", r"Arm 'lean': --heads .*\b1\b"),
        ("run digits-vit --set arms.lean.layers=9", "Arm 'lean': --layers 9"),
        ("retrain nowhere", r"\bmodel\b.*\bnowhere\b"),
        ("retrain --workspace nowhere", r"\bmodel\b.*\bnowhere\b"),
        ("retrain LEAN --gpus 0", r"--gpus .*\b1\b"),
        ("retrain LEAN --gpus 2", r"\b2\b.*\b0\b"),
        ("retrain LEAN --gpus 2 --cpu-processes 2", "exclude each other"),
        ("retrain LEAN --cpu-processes -1", r"--cpu-processes .*\b1\b"),
        ("retrain BARE", r"no surgery\.json.*--recipe"),
        ("retrain HUB", r"\bpreset\b.*--recipe"),
    ],
)
def test_wrong_calls_are_refused_before_any_training(line, words, shrunk, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("BARE", "HUB"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "HUB" / "surgery.json").write_text('{"source": {"name": "some/model"}}')
    done = typed(line.replace("LEAN", str(shrunk / "lean")), cwd=tmp_path)
    assert done.returncode == 2 and re.search(words, stderr_of(done)), done.stderr
    assert not (tmp_path / "runs").exists()
