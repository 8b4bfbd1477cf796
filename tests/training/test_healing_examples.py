"""The two scripts beside `examples/results/healing.md`: a plain training without a teacher, and the judge of both."""

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from leansurgeon import tasks
from tests.support.models import strangers

HEALING = Path(__file__).parents[2] / "examples" / "healing"


def ran(monkeypatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(HEALING / name), run_name="__main__")


@pytest.fixture
def texts(tmp_path):
    return strangers.texts(tmp_path / "texts", lines=400)


@pytest.fixture
def own(tmp_path):
    return strangers.model(tmp_path / "own", "llama", max_position_embeddings=512)


@pytest.fixture
def tokens_of(tmp_path, own):
    """The tokens of a split as `retrain` cuts a text, without those between documents."""
    end = transformers.AutoTokenizer.from_pretrained(own).eos_token_id

    def read(data, *splits):
        task = tasks.make("causal-lm", {"data": str(data), "seq_len": 8})
        task.prepare(tmp_path / "cache", own, workers=1, say=print)
        return [token for split in splits for token in task._array(split).tolist() if token != end]

    return read


def test_a_plain_training_leaves_a_model_of_the_same_kind(tmp_path, texts, monkeypatch, capsys):
    source = strangers.encoder(tmp_path / "encoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(7)  # a word that may as well hide others
    tokenizer.save_pretrained(source)
    made = tmp_path / "made"
    ran(monkeypatch, "plain_trainer.py", source, texts, "-o", made, "--time", "2s", "--tokens", 16, "--lr", "1e-2")
    assert "steps of 4 x 16 tokens" in capsys.readouterr().out
    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    pooler = {name for name in before if "pooler" in name}  # masked language modelling has no use for it
    assert before.keys() - pooler == after.keys() and any(not torch.equal(before[n], after[n]) for n in after)


def test_it_leaves_the_same_text_alone_as_retrain(texts, own, tokens_of):
    tokenizer = transformers.AutoTokenizer.from_pretrained(own)
    training_text = runpy.run_path(str(HEALING / "plain_trainer.py"))["training_text"]
    seen = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in training_text([str(texts)], True)]
    assert [token for text in seen for token in text] == tokens_of(texts, "train")
    assert len(tokens_of(texts, "eval", "test")) > 0.1 * len(tokens_of(texts, "train"))


def test_the_judge_of_language_models_counts_as_a_hand_does(texts, own, tokens_of, monkeypatch, capsys):
    """One window of what no command trains on."""
    ran(monkeypatch, "judge_models.py", own, own, "--text", texts / "a.txt", "--samples", 1, "--held")
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    ids = torch.tensor([tokens_of(texts / "a.txt", "test")[:512]])
    with torch.no_grad():
        loss = transformers.AutoModelForCausalLM.from_pretrained(own).eval()(input_ids=ids, labels=ids).loss.item()
    assert [float(row[2]) for row in rows] == [pytest.approx(math.exp(loss), rel=1e-3)] * 2
    assert [row[3].strip() for row in rows] == ["1.000"] * 2
