"""`leansurgeon shrink` as a user types it: exact counts, proof in a fresh process, and every kind of bad input."""

from __future__ import annotations

import errno
import json
import re

import pytest
import torch
from safetensors import SafetensorError

from tests.cli.answers import document, read, typed, works
from tests.conftest import build

# The integers of the paper's rows (parameter_counts.md), original and lean.
ROWS = [
    ("bert-crammed --heads 24 --layers 10", 119_589_889, 84_182_017),
    ("vit-b --heads 16 --layers 7 --mlp-dim 1536", 86_567_656, 40_112_872),
    ("deit-b --heads 16 --layers 7 --mlp-dim 1536", 86_567_656, 40_112_872),
    ("vit-l --heads 30 --layers 8 --mlp-dim 2048", 203_614_184, 98_597_864),
    ("gpt2-tinystories --heads 16 --layers 4", 89_160_785, 64_150_609),
    ("lra/listops --heads 2x --layers 1", 209_802, 192_906),
    ("lra/image --heads 8 --layers 1", 174_986, 191_242),
    ("digits-vit --heads 8 --layers 3 --mlp-dim 128", 302_154, 152_394),
]


@pytest.mark.parametrize(("arguments", "before", "after"), ROWS, ids=lambda v: str(v).split(" ")[0])
def test_dry_run_prints_exact_integers_and_writes_nothing(arguments, before, after, tmp_path):
    plan = document(f"shrink --dry-run {arguments}", cwd=tmp_path)["plan"]
    assert (plan["parameters_before"]["total"], plan["parameters_after"]["total"]) == (before, after)
    assert list(tmp_path.iterdir()) == []


def test_a_preset_is_cut_written_and_proved(tmp_path):
    wanted = "--heads 8 --layers 3 --mlp-dim 128"
    done = works(f"shrink digits-vit {wanted}", cwd=tmp_path)
    folder = tmp_path / "runs/digits-vit-h8-l3"
    record = read(folder / "surgery.json")
    assert record["proof"]["parameters"] == 152_394
    assert record["proof"]["loaded_with"] == "transformers.ViTForImageClassification.from_pretrained"
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    again = typed("shrink digits-vit --heads 8 --layers 3", cwd=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr


def test_a_checkpoint_is_cut_and_its_json_is_one_document(saved, tmp_path):
    folder, _ = saved("bert")
    (folder / "tokenizer.json").write_text("{}")
    found = document(f"shrink {folder} --heads 8 --head-dim keep -o out", cwd=tmp_path)
    assert found["proof"]["missing"] == [] and "trust_remote_code" in found["proof"]["loaded_with"]
    assert (tmp_path / "out/decoupled_bert.py").exists() and (tmp_path / "out/tokenizer.json").exists()


def checkpoint(folder, **changes):
    build("bert").save_pretrained(folder)
    return folder


def truncated(folder):
    file = checkpoint(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def foreign(folder):
    (checkpoint(folder) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def missing(folder):
    (checkpoint(folder) / "model.safetensors").unlink()


def pickled(folder):
    model = build("bert")
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def misfit(folder):
    config = read(checkpoint(folder) / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))


def unknown_family(folder):
    config = read(checkpoint(folder) / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "berta"}))


def quantised(folder):
    config = read(checkpoint(folder) / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))


BAD_FOLDERS = [
    (truncated, 3, "truncated"),
    (foreign, 3, "Git LFS pointer"),
    (missing, 3, r"\bmodel\.safetensors\b"),
    (pickled, 3, "--allow-pickle"),
    (misfit, 3, r"\bweights\b"),
    (unknown_family, 3, r"'bert'"),
    (quantised, 3, "'gptq'"),
]


@pytest.mark.parametrize(("damage", "code", "says"), BAD_FOLDERS, ids=lambda v: getattr(v, "__name__", None))
def test_bad_sources_are_one_sentence_and_leave_nothing(damage, code, says, tmp_path):
    damage(tmp_path / "source")
    done = typed("shrink source --layers 2 -o out", cwd=tmp_path)
    assert done.returncode == code
    assert (
        re.search(says, done.stderr)
        and "Traceback" not in done.stderr
        and len(done.stderr.splitlines()) <= (4 if damage is pickled else 2)
    )  # with the lines that mend it
    assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == 1


BAD_NUMBERS = [
    ("bert-crammed --heads 7", r"\b768\b.*\b7 heads\b.*\b6, 8\b"),
    ("bert-crammed --heads 0", r"--heads .*\b1\b"),
    ("bert-crammed --layers -3", r"--layers .*\b1\b"),
    ("bert-crammed --layers 20", r"\b16 layers\b"),
    ("bert-crammed --heads 1.3x", r"\b15\.6\b"),
    ("bert-crammed --heads many", r"--heads many\b"),
    ("bert-crammed --heads 16,32", r"\b2 stages\b.*\b1\b"),
    ("bert-crammed --head-dim wide", r"\bauto, keep, split\b"),
    ("bert-crammed --init random", r"\btransfer, fresh or fresh-attention\b"),
    ("bert-crammd --layers 3", r"'bert-crammed'"),
    ("./nowhere --layers 3", r"\bfolder\b.*\bnowhere\b"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD_NUMBERS, ids=lambda v: v.replace("/", "_"))
def test_bad_arguments_are_one_sentence_with_the_numbers(arguments, says, tmp_path):
    done = typed(f"shrink {arguments}", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert re.search(says, done.stderr) and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_is_read_on_request_and_an_evil_one_never(tmp_path):
    pickled(tmp_path / "source")
    done = works("shrink source --layers 2 -o out --allow-pickle", cwd=tmp_path)

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save({"weight": Evil()}, tmp_path / "source/pytorch_model.bin")
    done = typed("shrink source --layers 2 -o out2 --allow-pickle", cwd=tmp_path)
    assert done.returncode == 3 and "weights_only=True" in done.stderr
    assert not (tmp_path / "owned").exists() and not (tmp_path / "out2").exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    """Every copy answers as on a full disk; tests/checkpoints/test_weights.py meets the kernel's own answer."""
    build("bert", hidden_size=256, intermediate_size=512).save_pretrained(tmp_path / "source")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("leansurgeon.checkpoints.weights.copy_range", full)
    done = typed("shrink source --layers 2 --uncalibrated -o out", cwd=tmp_path)
    assert done.returncode == 1 and "disk is full" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_preset_on_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    """Presets are written by safetensors itself, whose error is a class of its own."""

    def full(*_, **__):
        raise SafetensorError("Error while serializing: No space left (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    done = typed("shrink digits-vit --layers 2 -o out", cwd=tmp_path)
    assert done.returncode == 1 and "disk is full" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
