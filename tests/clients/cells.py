"""What is tried: which client takes which kind of result. The guide's page shows these cells and no others."""

from __future__ import annotations

import pytest

KINDS = {
    "llama": "Llama, heads of their own size",
    "gpt2": "GPT-2, split heads",
    "gpt2-own": "GPT-2, our modelling file",
    "bert": "BERT, split heads",
    "bert-own": "BERT, our modelling file",
    "vit": "ViT of transformers",
    "timm": "ViT of timm",
}
CELLS = {
    "transformers pipelines": ("llama", "gpt2", "gpt2-own", "bert", "bert-own", "vit"),
    "Trainer": ("llama", "bert-own", "vit"),
    "peft": ("llama", "gpt2", "gpt2-own"),
    "sentence-transformers": ("bert", "bert-own"),
    "lm-evaluation-harness": ("llama", "gpt2-own"),
    "timm's validation": ("timm",),
    "torch.export": ("llama", "bert-own", "vit", "timm"),
    "torch.compile": ("llama", "timm"),
    "torchao int8": ("llama", "bert"),
    "ONNX Runtime": ("llama", "bert", "bert-own", "vit", "timm"),
    "OpenVINO": ("bert", "timm"),
    "CTranslate2": ("gpt2", "bert"),
    "llama.cpp": ("llama",),
}


def kinds(client: str):
    """The kinds that a client is tried with, as the parameters of its test."""
    return pytest.mark.parametrize("kind", CELLS[client])
