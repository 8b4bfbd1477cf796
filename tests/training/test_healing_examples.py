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
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data import calibration
from tests.support.models import strangers

HEALING = Path(__file__).parents[2] / "examples" / "healing"


def ran(monkeypatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(HEALING / name), run_name="__main__")


@pytest.fixture
def texts(tmp_path):
    return strangers.texts(tmp_path / "texts", lines=400)


def test_a_plain_training_leaves_a_model_of_the_same_kind(tmp_path, texts, monkeypatch, capsys):
    source = strangers.encoder(tmp_path / "own")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(7)  # a word that may as well hide others
    tokenizer.save_pretrained(source)
    made = tmp_path / "made"
    ran(monkeypatch, "plain_trainer.py", source, texts, "-o", made, "--time", "2s", "--tokens", 16, "--lr", "1e-2")
    assert "steps of 4 x 16 tokens" in capsys.readouterr().out
    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    pooler = {name for name in before if "pooler" in name}  # masked language modelling has no use for it
    assert before.keys() - pooler == after.keys() and any(not torch.equal(before[n], after[n]) for n in after)
    assert transformers.AutoModel.from_pretrained(made).config.num_hidden_layers == 4


def open_task(name: str, texts: Path, model: Path, cache: Path, **options):
    task = tasks.make(name, {"data": str(texts)} | options)
    task.prepare(cache, model, workers=1, say=print)
    return task


def test_it_leaves_the_same_text_alone_as_retrain(tmp_path, texts):
    training_text = runpy.run_path(str(HEALING / "plain_trainer.py"))["training_text"]
    own = strangers.model(tmp_path / "own", "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(own)
    task = open_task("causal-lm", texts, own, tmp_path / "cache", seq_len=8)
    seen = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in training_text([str(texts)], True)]
    theirs = [token for token in task._array("train").tolist() if token != tokenizer.eos_token_id]  # between documents
    assert [token for text in seen for token in text] == theirs
    held = sum(len(task._array(split)) for split in ("eval", "test"))
    assert 0.1 < held / (held + len(theirs)) < 0.4


def sentence_of(ids, tokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_the_judge_of_language_models_counts_as_a_hand_does(tmp_path, texts, monkeypatch, capsys):
    """One window of what no command trains on."""
    own = strangers.model(tmp_path / "own", "llama", max_position_embeddings=512)
    ran(monkeypatch, "judge_models.py", own, own, "--text", texts / "a.txt", "--samples", 1, "--held")
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    model = transformers.AutoModelForCausalLM.from_pretrained(own).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(own)
    test = open_task("causal-lm", texts / "a.txt", own, tmp_path / "cache", seq_len=8)._array("test").tolist()
    ids = torch.tensor([token for token in test if token != tokenizer.eos_token_id])[:512].view(1, -1)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert [float(row[2]) for row in rows] == [pytest.approx(math.exp(loss), rel=1e-3)] * 2
    assert [row[3].strip() for row in rows] == ["1.000"] * 2


def test_the_judge_of_encoders_leaves_out_what_was_calibrated_on(tmp_path, texts, monkeypatch, capsys):
    own = strangers.encoder(tmp_path / "own")
    ran(monkeypatch, "judge_models.py", own, own, "--text", texts / "a.txt", "--samples", 40, "--held")
    (row,) = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert float(row[2]) == 1.0 and row[5].strip() == "100.0 %"
    held = runpy.run_path(str(HEALING / "judge_models.py"))["lines"]((texts / "a.txt").read_text(), True, 1_000)
    fitted = calibration.open_calibration(str(texts / "a.txt"), open_source(str(own)), cache=tmp_path / "cache")
    tokenizer = transformers.AutoTokenizer.from_pretrained(own)
    read = {sentence_of(ids, tokenizer) for part in (fitted.fit, fitted.guard) for b in part for ids in b["input_ids"]}
    assert held and not read & set(held)
    assert {sentence_of(ids, tokenizer) for b in fitted.heldout for ids in b["input_ids"]} == set(held)
