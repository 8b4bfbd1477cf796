"""What a stranger reads who brings the wrong thing: what it is, and what to type next."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys

import pytest
import torch

from leansurgeon import architectures
from leansurgeon.errors import UnsupportedModel
from tests.support.command_line import leansurgeon
from tests.support.models import strangers


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "folder"])
def test_bare_weights_come_with_lines_that_make_a_folder_of_them(tmp_path, kind, monkeypatch):
    """The lines run as they stand, once NAME and FOLDER are filled in."""
    source = strangers.model(tmp_path / "source", "llama")
    bare = tmp_path / "bare"
    bare.mkdir()
    if kind == "pickle":
        weights = bare / "model.pt"
        torch.save(strangers.build("llama").state_dict(), weights)
    else:
        weights = bare / "weights.safetensors"
        weights.write_bytes((source / "model.safetensors").read_bytes())
    done = leansurgeon("shrink", bare if kind == "folder" else weights, "--layers", 2)
    assert done.returncode == 3
    lines = [line.strip() for line in done.stderr.splitlines() if line.startswith(" " * 4) and "These" not in line]
    code = "\n".join(lines[lines.index(next(line for line in lines if "import" in line)) :])
    made = tmp_path / "made"
    exec(code.replace("NAME", str(source)).replace("FOLDER", str(made)), {})
    wish = ("--keep", "0,2", "--uncalibrated", "--no-proof", "-o", tmp_path / "lean")
    assert leansurgeon("shrink", made, *wish).returncode == 0


def test_a_family_is_called_near_only_where_it_is():
    with pytest.raises(UnsupportedModel, match="'qwen3'"):
        architectures.of({"model_type": "qwen33"})
    with pytest.raises(UnsupportedModel) as caught:
        architectures.of({"model_type": "zzyzx"})
    assert "nearest" not in caught.value.message


def test_data_that_is_not_there_is_said_at_once(tmp_path):
    """Nothing listens at the port, and nobody tries it for half a minute; the processor's time tells, since the machine
    may be busy.
    """
    home = {"HF_HOME": str(tmp_path / "empty"), "HF_ENDPOINT": "http://127.0.0.1:9", "LEANSURGEON_CACHE": str(tmp_path)}
    environment = {k: v for k, v in os.environ.items() if not k.upper().endswith(("PROXY", "OFFLINE"))} | home
    source = strangers.model(tmp_path / "own", "llama")
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    for data in ("someone/stories", str(tmp_path / "nowhere")):
        done = subprocess.run(
            [sys.executable, "-m", "leansurgeon", "retrain", str(source), "--data", data, "-o", str(tmp_path / "run")],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr and "--data austen" in done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start < 4 and not (tmp_path / "run").exists()


def test_a_set_that_not_all_arms_take_is_said():
    from leansurgeon.experiment.arms import explain_sets
    from leansurgeon.training.recipe import reading

    before = reading.load("austen-gpt")
    recipe = reading.load("austen-gpt", ["train.optim.lr=5e-4"])
    (told,) = explain_sets(recipe, ["train.optim.lr=5e-4", "train.batch=8", "seeds=[0]"], before)
    took, kept = told.split(";")
    assert re.search(r"changes original, lean-fresh, control-fresh$", took) and "lean, control" in kept
    assert "--set retrain.optim.lr=5e-4" in kept
    reading.load("austen-gpt", ["retrain.optim.lr=5e-4"])
    same = f"train.optim.lr={before.train.optim.lr}"
    assert explain_sets(reading.load("austen-gpt", [same]), [same], before) == []


def test_an_experiment_without_a_gpu_is_trained_in_fp32():
    from leansurgeon.commands.healing import for_device
    from leansurgeon.training.recipe import reading

    said = []
    asked = ["train.precision=fp16", "retrain.precision=fp16", "train.compile=true"]
    made = for_device(reading.load("austen-gpt", asked), cpu=True, say=said.append)
    assert said == ["There is no GPU to train on: fp32 instead of fp16 and no compile."]
    for transferred in (False, True):
        found = made.training(transferred=transferred).train
        assert (found.precision, found.compile) == ("fp32", False)
    plain = reading.load("austen-gpt", ["train.precision=bf16"])
    assert for_device(plain, cpu=True, say=said.append) is plain and len(said) == 1


def test_the_three_headline_commands_run_as_they_are_typed(tmp_path, monkeypatch):
    """With a preset of a hundredth of the size, and seconds for minutes."""
    from dataclasses import replace

    from leansurgeon.architectures.presets import PRESETS

    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    whole = PRESETS["bert-crammed"]
    small = {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 1024}
    config = whole.config | {key: value for key, value in small.items() if key in whole.config}
    assert config != whole.config
    monkeypatch.setitem(PRESETS, "bert-crammed", replace(whole, config=config))
    cut = leansurgeon("shrink", "bert-crammed", "--heads", 24, "--layers", 10, cwd=tmp_path)
    assert cut.returncode == 0, cut.stderr
    healed = leansurgeon("retrain", "--data", "austen", "--time", "10s", cwd=tmp_path)
    assert healed.returncode == 0, healed.stderr
    summary = json.loads((tmp_path / healed.stdout.strip() / "summary.json").read_text())
    assert summary["final"]["loss"] < summary["before"]["loss"] and "austen" in summary["name"]
    shown = leansurgeon("report", cwd=tmp_path)
    assert shown.returncode == 0 and "perplexity" in shown.stdout
