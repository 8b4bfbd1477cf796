"""Models and texts in memory go the way of those on the disk, to the same bits."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import leansurgeon
from leansurgeon.commands import in_memory
from leansurgeon.errors import UnsupportedModel, UsageError
from tests.conftest import build
from tests.support.models.word_models import WORDS, sentence_encoder, words


@pytest.fixture
def encoder(saved, tmp_path):
    """A BERT without a head, the folder that it lies in, and sentences."""
    folder, text = sentence_encoder(saved, tmp_path, 60)
    model = AutoModel.from_pretrained(folder)
    model.save_pretrained(folder)  # with its pooler
    return model, folder, text.read_text().splitlines()


def same(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_model_gives_the_model_that_its_folder_gives(encoder, tmp_path, capsys):
    model, folder, texts = encoder
    before = copy.deepcopy(model.state_dict())
    how = {"layers": 2, "data": texts, "heal": "none", "progress": False}
    lean = leansurgeon.shrink(model, **how)
    assert type(lean) is type(model) and lean.config.num_hidden_layers == 2 and lean.training == model.training
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    cut = leansurgeon.shrink(folder, out=tmp_path / "cut", **how)
    assert same(lean, cut.model) and cut.model.leansurgeon is cut
    assert lean.leansurgeon.proof.compared == cut.proof.compared and cut.proof.compared.embeddings.cosine < 1
    assert (cut.before.depth, cut.after.depth) == (4, 2)
    assert cut.parameters == sum(p.numel() for p in lean.parameters())
    assert "layers" in str(cut) and cut.as_dict()["proof"]["parameters"] == cut.parameters
    assert capsys.readouterr() == ("", "")  # nothing was said, and nothing printed

    # The result stays with the model, through copies and pickles, and is healed by the source in memory.
    assert copy.deepcopy(lean).leansurgeon.folder == lean.leansurgeon.folder
    assert pickle.loads(pickle.dumps(lean.leansurgeon)).record == lean.leansurgeon.record
    with torch.no_grad():
        lean.embeddings.word_embeddings.weight += 0.01  # somebody trained it by himself
    changes = {"train.duration": "2st", "train.batch": 4}
    healed = leansurgeon.heal(lean, texts, set=changes, out=tmp_path / "run", progress=False)
    run = healed.leansurgeon
    assert type(healed) is type(model) and run.summary.steps == 2 and run.record.initialised == "trained"
    assert run.summary.recipe["train"]["distill"]["teacher"] == "source"
    start = run.summary.before
    assert start.metric < 0.999 and run.before == start.metric  # against the source, with the moved embeddings


def test_heads_of_their_own_size_keep_the_precision_and_can_be_saved(tmp_path):
    """More heads of a BERT need a modelling file; `save_pretrained` takes it along."""
    model = build("bert").to(torch.bfloat16).eval()
    lean = leansurgeon.shrink(model, heads="2x", head_dim="keep", out=tmp_path / "lean", progress=False)
    assert next(lean.parameters()).dtype == torch.bfloat16 and lean.leansurgeon.folder == tmp_path / "lean"
    x = {"input_ids": torch.arange(3, 20)[None]}
    with torch.no_grad():
        torch.testing.assert_close(lean(**x)[0], model(**x)[0], atol=0.05, rtol=0.05)  # silent heads add zeros
    lean.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/decoupled_bert.py").is_file()
    assert same(leansurgeon.load(tmp_path / "again"), lean)
    assert leansurgeon.load(tmp_path / "lean").leansurgeon.proof == lean.leansurgeon.proof
    assert torch.save(lean, io.BytesIO()) is None


def test_a_decoder_with_its_tokenizer_and_a_timm_model(tmp_path, saved):
    import timm

    folder, _ = saved("llama")
    words(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = [" ".join(WORDS[i : i + 30]) for i in range(20)] * 10
    found = leansurgeon.kappa(model, texts, samples=2, probes=0, progress=False)
    assert len(found.layers) == 4 and "kappa" in str(found)
    small = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    lean = leansurgeon.shrink(small, layers=1, uncalibrated=True, proof=False, progress=False)
    assert len(lean.blocks) == 1 and lean(torch.zeros(1, 3, 224, 224)).shape == (1, 3)
    assert same(lean.blocks[0], small.blocks[0]) or same(lean.blocks[0], small.blocks[-1])
    # By an entry point of ours.
    more = {"heads": 4, "head_dim": "keep", "out": tmp_path / "wide"}
    wide = leansurgeon.shrink(small, layers=1, uncalibrated=True, proof=False, progress=False, **more)
    assert same(leansurgeon.load(tmp_path / "wide"), wide)


def test_a_fresh_model_that_somebody_trained_has_learned():
    """Who trains a model by himself need not tell: its weights are no longer those of the folder."""
    options = {"proof": False, "progress": False, "uncalibrated": True}
    fresh = leansurgeon.shrink(build("vit"), layers=3, init="fresh", proof=False, progress=False)
    again = leansurgeon.shrink(fresh, layers=2, **options)
    assert again.leansurgeon.record.initialised == "fresh"
    with torch.no_grad():
        fresh.classifier.weight += 1
    assert leansurgeon.shrink(fresh, layers=2, **options).leansurgeon.record.initialised == "transfer"


def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedModel, match="Linear"):
        leansurgeon.shrink(torch.nn.Linear(2, 2), layers=1)
    with pytest.raises(UsageError, match="tokenizer"):
        leansurgeon.shrink(build("bert").bert, layers=2, data=["a text of some words"] * 20, progress=False)


def test_folders_of_models_in_memory_go_with_them(capfd, monkeypatch):
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", True)  # whatever other tests have left
    kept = in_memory.write_copy(build("bert").bert)
    assert logging.is_progress_bar_enabled() and capfd.readouterr() == ("", "")
    folder = kept.folder
    assert (folder / "config.json").is_file()
    del kept
    assert not folder.exists()
