"""Formats that other runtimes read: GGUF for llama.cpp, CTranslate2; what they cannot hold is said before the cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.clients.cells import kinds
from tests.clients.conftest import MORE_HEADS, VOCABULARY, inputs_of, loaded, logits_of, shrunk, source_of
from tests.support.models.word_models import WORDS

pytestmark = pytest.mark.clients
TOKENS = 40
# The folder of llama.cpp's own converter; llama-cpp-python's source package brings it (vendor/llama.cpp).
CONVERTER = "LLAMA_CPP"


def gguf(folder: Path, file: Path) -> subprocess.CompletedProcess:
    """llama.cpp's own conversion, in fp32."""
    script = Path(os.environ[CONVERTER]) / "convert_hf_to_gguf.py"
    asked = [sys.executable, str(script), str(folder), "--outtype", "f32", "--outfile", str(file)]
    return subprocess.run(asked, capture_output=True, text=True, check=False)


def pieces(folder: Path) -> None:
    """A sentencepiece model beside a result: llama.cpp reads no tokenizer of whole words. Only ids are compared."""
    import sentencepiece

    text = folder / "pieces.txt"
    text.write_text("\n".join(WORDS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip


def greedy(model, ids: list[int], count: int) -> list[int]:
    """The tokens that transformers takes, whatever ends a text."""
    found = torch.tensor([ids])
    for _ in range(count):
        found = torch.cat([found, logits_of(model, {"input_ids": found})[:, -1:].argmax(-1)], dim=1)
    return found[0, len(ids) :].tolist()


@kinds("llama.cpp")
def test_llama_cpp_takes_the_same_tokens(kind, cut, tmp_path):
    from llama_cpp import Llama

    pieces(cut(kind))
    done = gguf(cut(kind), tmp_path / "model.gguf")
    assert done.returncode == 0, done.stderr[-2000:]
    model = Llama(str(tmp_path / "model.gguf"), n_ctx=64, n_threads=1, verbose=False)
    prompt = inputs_of(kind)["input_ids"][0].tolist()
    found = []
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        found.append(token)
        if len(found) == TOKENS:
            break
    assert model.n_vocab() == VOCABULARY
    assert found == greedy(loaded(cut(kind), kind), prompt, TOKENS)


def test_gguf_cannot_hold_a_bert_of_our_own_and_shrink_said_so(cut, tmp_path):
    source = cut("bert-own").with_name("bert-own-source")
    said = plan(open_source(str(source)), RequestedShape(heads="8", layers="3", head_dim="keep")).cannot_hold
    assert any("GGUF" in name for name in said.formats)
    assert gguf(cut("bert-own"), tmp_path / "model.gguf").returncode != 0


def ct2(folder: Path, out: Path, **options) -> Path:
    """CTranslate2's own conversion."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder), **options).convert(str(out))
    return out


@kinds("CTranslate2")
def test_ctranslate2_answers_as_transformers_does(kind, cut, tmp_path):
    import ctranslate2

    out = ct2(cut(kind), tmp_path / "ct2")
    model, inputs = loaded(cut(kind), kind), inputs_of(kind)
    ids = inputs["input_ids"].tolist()
    if kind == "bert":
        found = ctranslate2.Encoder(str(out)).forward_batch(ids).last_hidden_state
        with torch.no_grad():
            wanted = model.bert(**inputs).last_hidden_state
    else:
        found, wanted = ctranslate2.Generator(str(out)).forward_batch(ids), logits_of(model, inputs)
    assert np.allclose(np.array(found), wanted.numpy(), atol=1e-3)


@pytest.mark.parametrize(("heads", "holds"), [(8, False), (2, True)])
def test_ctranslate2_reads_no_head_dim_for_a_llama_and_shrink_said_so(heads, holds, tmp_path):
    """The tiny Llama is 32 wide with heads of 16: two of them are as wide as the model, eight are not."""
    import ctranslate2

    source = source_of("llama", tmp_path / "source")
    said = plan(open_source(str(source)), RequestedShape(heads=str(heads), layers="3")).cannot_hold
    assert (said is None) == holds
    assert said is None or said.instead == "--heads 2"
    before, MORE_HEADS["llama"] = MORE_HEADS["llama"], ("--heads", heads)
    try:
        out = shrunk(source, tmp_path / "lean", "llama")
    finally:
        MORE_HEADS["llama"] = before
    inputs = inputs_of("llama")
    try:
        generator = ctranslate2.Generator(str(ct2(out, tmp_path / "ct2")))
        found = np.array(generator.forward_batch(inputs["input_ids"].tolist()))
        same = bool(np.allclose(found, logits_of(loaded(out, "llama"), inputs).numpy(), atol=1e-3))
    except (RuntimeError, ValueError):
        same = False
    assert same == holds
