"""Peaks of `torch.cuda.max_memory_allocated` that others measured and published, and our count of the same step.

The documentation of transformers (pages "BERT" and "DistilBERT", section "Training") prints them, measured with
https://gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331: weights in fp16, no optimizer, dropout on, no padding,
the sum of the logits as loss, MB of a million bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from leansurgeon.measure.costs.cuda_rules import CudaRules
from leansurgeon.measure.costs.memory import WORKSPACE
from leansurgeon.measure.costs.storages import Storages

MODELS = {"bert": ("BertForMaskedLM", "BertConfig"), "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig")}
GPU = {"bert": "A100-80GB, torch 2.2.0", "distilbert": "RTX 2060, torch 2.3.1"}


@dataclass(frozen=True)
class Published:
    model: str
    batch: int
    tokens: int
    eager: float  # MB at the peak
    sdpa: float


PUBLISHED = [
    Published("bert", 4, 256, 939.213, 764.834),
    Published("bert", 4, 512, 1970.447, 1227.162),
    Published("bert", 8, 256, 1594.295, 1226.114),
    Published("bert", 8, 512, 3629.401, 2134.262),
    Published("bert", 16, 256, 2874.426, 2134.262),
    Published("bert", 16, 512, 6964.659, 3961.013),
    Published("distilbert", 1, 128, 397.038, 399.629),
    Published("distilbert", 1, 256, 412.505, 412.606),
    Published("distilbert", 2, 128, 412.213, 412.606),
    Published("distilbert", 2, 256, 427.491, 425.787),
    Published("distilbert", 4, 128, 427.491, 425.787),
    Published("distilbert", 4, 256, 594.156, 502.745),
    Published("distilbert", 8, 128, 545.922, 502.745),
    Published("distilbert", 8, 256, 983.450, 798.480),
]


def counted(point: Published, attention: str) -> float:
    """MB at the peak of the second step of that script, with the rules that `leansurgeon plan` counts by."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = in_half_precision(*MODELS[point.model])
    model.set_attn_implementation(attention)
    model.train()
    with mode, Storages() as count:
        count.tag([*model.parameters(), *model.buffers()], "weights")
        with CudaRules(fused=attention == "sdpa"):
            for _ in range(2):
                count.mark()
                model.zero_grad()
                logits = model(input_ids=torch.zeros(point.batch, point.tokens, dtype=torch.int64)).logits
                # The gradient of a sum is one number, seen everywhere. The matrix product copies it out, inside its
                # kernel, where nothing is counted; so it is written out here.
                logits.backward(torch.ones_like(logits))
    return (count.peak + WORKSPACE["older"]) / 1e6


def in_half_precision(model: str, config: str) -> torch.nn.Module:
    """A model of transformers in its default shape, which is that of the published base model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        return getattr(transformers, model)(getattr(transformers, config)())
    finally:
        torch.set_default_dtype(before)
