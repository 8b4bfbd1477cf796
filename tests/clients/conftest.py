"""Results of `shrink`, of every kind that clients are tried with. Run: pytest -o addopts= -m clients tests/clients"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import build
from tests.support.command_line import leansurgeon
from tests.support.models import strangers
from tests.support.models.word_models import words

VOCABULARY = 384  # room for the tokens of the sentencepiece model that llama.cpp wants
MORE_HEADS = {
    "llama": ("--heads", 8),
    "gpt2": ("--heads", 8, "--head-dim", "split"),
    "gpt2-own": ("--heads", 8, "--head-dim", "keep"),
    "bert": ("--heads", 8, "--head-dim", "split"),
    "bert-own": ("--heads", 8, "--head-dim", "keep"),
    "vit": ("--heads", 8),
    "timm": ("--layers", 3),
}


def source_of(kind: str, folder: Path) -> Path:
    """A tiny random model of a kind, with its tokenizer or processor."""
    if kind == "timm":
        return strangers.timm_vit(folder, 5)
    family = kind.removesuffix("-own")
    changes = {"vit": dict(num_channels=3)}
    changes["bert"] = dict(position_embedding_type="absolute")  # as published BERTs have it; CTranslate2 asks for it
    changes["llama"] = dict(vocab_size=VOCABULARY, attention_bias=False, mlp_bias=False)
    build(family, **changes.get(family, {})).save_pretrained(folder)
    if family == "vit":
        strangers.processor(folder, 8, 3)
    else:
        words(folder, mask="<extra_id_0>" if family == "bert" else None)
        named(folder)
    return folder


def named(folder: Path) -> None:
    """Give a tokenizer the token that begins a text, as published ones have it; CTranslate2 asks for it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)


def shrunk(source: Path, out: Path, kind: str) -> Path:
    """The source with twice the heads and three of its four layers, as anybody would cut it."""
    layers = () if kind == "timm" else ("--layers", 3)
    done = leansurgeon("shrink", source, *MORE_HEADS[kind], *layers, "--uncalibrated", "-o", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def cut(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a result by its kind, made once."""
    home, made = tmp_path_factory.mktemp("cuts"), {}

    def result(kind: str) -> Path:
        if kind not in made:
            made[kind] = shrunk(source_of(kind, home / f"{kind}-source"), home / kind, kind)
        return made[kind]

    return result


def loaded(folder: Path, kind: str):
    """The result by plain libraries, in fp32."""
    import timm
    import torch
    import transformers

    if kind == "timm":
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    heads = {"llama": "CausalLM", "gpt2": "CausalLM", "bert": "MaskedLM", "vit": "ImageClassification"}
    auto = getattr(transformers, f"AutoModelFor{heads[kind.removesuffix('-own')]}")
    trust = {"trust_remote_code": True} if kind.endswith("-own") else {}
    return auto.from_pretrained(folder, dtype=torch.float32, **trust).eval()


def inputs_of(kind: str) -> dict:
    """A batch of two that the model takes."""
    import torch

    generator = torch.Generator().manual_seed(3)
    if kind == "timm":
        return {"x": torch.randn(2, 3, 16, 16, generator=generator)}
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    ids = torch.randint(11, 61, (2, 12), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def logits_of(model, inputs: dict):
    """Logits of either library."""
    import torch

    with torch.no_grad():
        found = model(**inputs)
    return found if torch.is_tensor(found) else found.logits
