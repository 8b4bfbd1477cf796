"""The two scripts beside `examples/results/healing.md`: a plain training without a teacher, and the judge of both."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.models import strangers

HEALING = Path(__file__).parents[2] / "examples" / "healing"


def ran(monkeypatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(HEALING / name), run_name="__main__")


@pytest.fixture
def texts(tmp_path):
    return strangers.texts(tmp_path / "texts", lines=400)


@pytest.mark.parametrize("kind", ["llama", "encoder"])
def test_a_plain_training_leaves_a_model_of_the_same_kind(kind, tmp_path, texts, monkeypatch, capsys):
    own = tmp_path / "own"
    source = strangers.encoder(own) if kind == "encoder" else strangers.model(own, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(7)  # a word that may as well hide others
    tokenizer.save_pretrained(source)
    made = tmp_path / "made"
    ran(monkeypatch, "plain_trainer.py", source, texts, "-o", made, "--time", "6s", "--tokens", 16, "--lr", "1e-2")
    assert "steps of 4 x 16 tokens" in capsys.readouterr().out
    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    pooler = {name for name in before if "pooler" in name}  # masked language modelling has no use for it
    assert before.keys() - pooler == after.keys() and any(not torch.equal(before[n], after[n]) for n in after)
    loaded = transformers.AutoModel.from_pretrained(made)
    assert loaded.config.num_hidden_layers == transformers.AutoConfig.from_pretrained(source).num_hidden_layers


def test_the_judge_counts_as_a_hand_does(tmp_path, texts, monkeypatch, capsys):
    own = strangers.model(tmp_path / "own", "llama", max_position_embeddings=512)
    ran(monkeypatch, "judge_models.py", own, own, "--text", texts / "a.txt", "--samples", 2)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    model = transformers.AutoModelForCausalLM.from_pretrained(own).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(own)
    ids = torch.tensor(tokenizer((texts / "a.txt").read_text(), add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // 512 * 512].view(-1, 512)[[0, len(ids) // 512 - 1]]
    with torch.no_grad():
        losses = [model(input_ids=window[None], labels=window[None]).loss.item() for window in windows]
    assert [float(row[2]) for row in rows] == [pytest.approx(math.exp(sum(losses) / 2), rel=1e-3)] * 2
    assert [row[3].strip() for row in rows] == ["1.000"] * 2
