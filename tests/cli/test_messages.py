"""What a stranger reads who brings the wrong thing: what it is, and what to type next."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leansurgeon.architectures.presets import PRESETS
from leansurgeon.experiment.arms import explain_sets
from leansurgeon.training.recipe import reading
from tests.cli.answers import read, typed, works
from tests.support.models import strangers


@pytest.mark.parametrize("kind", ["pickle", "folder"])
def test_bare_weights_come_with_lines_that_make_a_folder_of_them(tmp_path, kind):
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
    done = typed(f"shrink {bare if kind == 'folder' else weights} --layers 2")
    assert done.returncode == 3
    lines = [line.strip() for line in done.stderr.splitlines() if line.startswith(" " * 4) and "These" not in line]
    code = "\n".join(lines[lines.index(next(line for line in lines if "import" in line)) :])
    made = tmp_path / "made"
    exec(code.replace("NAME", str(source)).replace("FOLDER", str(made)), {})
    wish = f"--keep 0,2 --uncalibrated --no-proof -o {tmp_path}/lean"
    assert typed(f"shrink {made} {wish}").returncode == 0


def test_data_that_is_not_there_is_said(tmp_path):
    source = strangers.model(tmp_path / "own", "llama")
    for data in ("someone/stories", tmp_path / "nowhere"):
        done = typed(f"retrain {source} --data {data} -o {tmp_path}/run")
        assert done.returncode == 2 and "--data austen" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_set_that_not_all_arms_take_is_said():
    before = reading.load("austen-gpt")
    recipe = reading.load("austen-gpt", ["train.optim.lr=5e-4"])
    (told,) = explain_sets(recipe, ["train.optim.lr=5e-4", "train.batch=8", "seeds=[0]"], before)
    took, kept = told.split(";")
    assert took.endswith("changes original, lean-fresh, control-fresh") and "lean, control" in kept
    assert "--set retrain.optim.lr=5e-4" in kept
    reading.load("austen-gpt", ["retrain.optim.lr=5e-4"])


def test_the_three_headline_commands_run_as_they_are_typed(tmp_path, monkeypatch):
    """With a preset of a hundredth of the size, and seconds for minutes."""
    whole = PRESETS["bert-crammed"]
    small = {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 1024}
    config = whole.config | {key: value for key, value in small.items() if key in whole.config}
    assert config != whole.config
    monkeypatch.setitem(PRESETS, "bert-crammed", replace(whole, config=config))
    works("shrink bert-crammed --heads 24 --layers 10", cwd=tmp_path)
    healed = works("retrain --data austen --time 3s", cwd=tmp_path)
    summary = read(tmp_path / healed.stdout.strip() / "summary.json")
    assert summary["final"]["loss"] < summary["before"]["loss"] and "austen" in summary["name"]
    shown = works("report", cwd=tmp_path)
    assert "perplexity" in shown.stdout
