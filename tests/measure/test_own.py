"""Samples that a model makes itself: what is drawn, that it is what the model predicts, and that a cut learns by it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data import own
from leansurgeon.measure.data.calibration import Parts
from leansurgeon.tasks import splits
from leansurgeon.tasks.text.sentences import packaged_prose

LENGTH = 20


@pytest.fixture
def few(monkeypatch):
    """Small numbers of short windows."""
    monkeypatch.setattr(own, "WINDOWS", Parts(6, 2, 2))
    monkeypatch.setattr(own, "LINES", Parts(6, 2, 2))
    monkeypatch.setattr(own, "window", lambda *_: LENGTH)
    monkeypatch.setattr(own, "LINE_TOKENS", LENGTH)


def tokens(data):
    return torch.cat([b["input_ids"] for part in (data.fit, data.guard, data.heldout) for b in part])


def chance():
    return torch.Generator().manual_seed(0)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    share = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = share.log().expand(20_000, 4)

    def drawn(**how):
        return torch.bincount(own.Drawing(**how).draw(logits, chance()), minlength=4) / 20_000

    assert torch.allclose(drawn(), share, atol=0.015)
    assert torch.allclose(drawn(temperature=0.5), share**2 / (share**2).sum(), atol=0.015)
    assert torch.allclose(drawn(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.015)
    assert torch.allclose(drawn(top_p=0.7), torch.tensor([0.625, 0.375, 0, 0]), atol=0.015)  # two hold 0.8
    assert torch.allclose(drawn(banned=(0,)), torch.tensor([0, 0.6, 0.3, 0.1]), atol=0.015)


@pytest.mark.parametrize("said", [{}, {"do_sample": True, "temperature": 0.2, "top_k": 3, "eos_token_id": [5, 6]}])
def test_the_makers_sampling_is_taken_where_they_say_it(said, saved):
    folder, _ = saved("llama")
    (folder / "generation_config.json").write_text(json.dumps(said))
    found = own.Drawing.of(open_source(str(folder)))
    if said:
        assert found == own.Drawing(0.2, 3, 1.0, (5, 6))
    else:
        assert (found.temperature, found.top_k, found.top_p) == (1.0, None, 1.0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_texts_follow_the_model_with_and_without_kept_keys(family, saved, few):
    folder, model = saved(family)
    source = open_source(str(folder))
    data = own.samples(source, seed=3)
    ids = tokens(data)
    assert ids.shape == (10, LENGTH) and torch.equal(ids, tokens(own.samples(source, seed=3)))
    assert not torch.equal(ids, tokens(own.samples(source, seed=4))) and data.name == "own"
    assert torch.equal(data.fit[0]["labels"], data.fit[0]["input_ids"])

    def plain(input_ids):  # a forward that knows of no cache
        return SimpleNamespace(logits=model(input_ids=input_ids).logits)

    start = torch.tensor([[1], [2]])
    without_cache = torch.nn.Module()
    without_cache.inner = model
    without_cache.forward = plain
    kept, anew = (own.write_tokens(m, start, 12, own.Drawing(), chance()) for m in (model, without_cache))
    assert torch.equal(kept, anew)


def test_fillings_are_what_the_model_predicts(saved, few):
    """A model that always says one of two tokens fills its windows with them; some are hidden again as in training."""
    folder, model = saved("bert")
    save_words(folder, MASKED, mask_token="[MASK]")
    with torch.no_grad():
        model.cls.predictions.bias[:] = -1e4
        model.cls.predictions.bias[[7, 9, 48]] = 1e4  # 48 is the mask, which is never drawn
    model.save_pretrained(folder)
    batch = own.samples(open_source(str(folder))).fit[0]
    ids, hidden = batch["input_ids"], batch["labels"] != -100
    assert ids.shape[1] == LENGTH and set(ids[~hidden].tolist()) | set(batch["labels"][hidden].tolist()) <= {7, 9}
    assert set(ids[hidden].tolist()) == {48} and 0 < float(hidden.float().mean()) < 0.4


def test_an_encoder_without_a_head_gets_a_novel_where_it_reads_it(saved, few, tmp_path):
    folder = bare_bert(saved)
    save_words(folder, MASKED)  # knows no word of English
    plain = own.samples(open_source(str(folder)))
    assert "random tokens" in plain.says and "novel" not in plain.says
    letters = Tokenizer(models.BPE({c: i for i, c in enumerate(" abcdefghijklmnopqrstuvwxyz")}, []))
    assert not own.reads(PreTrainedTokenizerFast(tokenizer_object=letters), ["anne was nobody"])
    assert own.reads(save_words(tmp_path, ["[UNK]", "Anne", "was", "nobody"]), ["Anne was nobody"])


def test_prose_is_fitted_and_judged_by_the_side_of_its_content(saved, few, monkeypatch, tmp_path):
    """So no sentence is fitted that another command holds out."""
    sides = packaged_prose()
    words = sorted({word for texts in sides.values() for text in texts for word in text.split()})
    tokenizer = save_words(tmp_path, ["[UNK]", *words], pad_token="[UNK]")
    monkeypatch.setattr(own, "prose", lambda _: tokenizer)
    found = own.samples(open_source(str(bare_bert(saved))))
    for part, texts in zip((found.fit, found.guard, found.heldout), sides.values(), strict=True):
        starts = {" ".join(text.split()[:5]) for text in texts}
        read = [tokenizer.decode(row[:5]) for batch in part if "attention_mask" in batch for row in batch["input_ids"]]
        assert len(read) >= 256 and sum(text in starts for text in read) > 0.9 * len(read)  # the rest is shorter
    assert found.split == {"rule": splits.RULE} and found.stands_apart([{"rule": splits.RULE, "test": "1"}])


def test_noise_has_the_spectrum_of_photographs(saved, few):
    data = own.samples(open_source(str(saved("vit")[0])))
    pixels = torch.cat([b["pixel_values"] for b in data.fit]).double().numpy()
    np.testing.assert_allclose(pixels.mean((1, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(pixels.std((1, 2, 3)), 1, rtol=1e-4)
    power = (np.abs(np.fft.fft2(pixels)) ** 2).mean((0, 1))
    assert power[0, 1] > 3 * power[0, 3]  # three times the frequency, a ninth of the power, give or take


def test_what_cannot_be_made_says_so(saved, monkeypatch):
    with pytest.raises(UsageError, match="encoder and a decoder"):
        own.samples(open_source(str(saved("t5")[0])))
    monkeypatch.setitem(own.WORK, "cpu", 1.0)
    with pytest.raises(UsageError, match="too long"):
        own.samples(open_source(str(saved("gpt2")[0])))


def save_words(folder, words: list[str], **special) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, saved in a folder."""
    known = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    known.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="[UNK]", **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def bare_bert(saved):
    """A saved encoder whose config names no head."""
    folder, _ = saved("bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    return folder


MASKED = [*(f"w{i}" for i in range(48)), "[MASK]", "[UNK]"]
