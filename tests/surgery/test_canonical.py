"""Matrices in one form are what the library's attention computes with; that they come back is seen in balance."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel
from leansurgeon.surgery.canonical import (
    of_attention,
    rotary,
    score_gain,
    score_scale,
    unpack,
)
from tests.checkpoints.test_skeleton import batches, expected, make

# Families without a canonical form, and what the reason must say.
UNSUPPORTED = {
    "timm-xcit": "between channels",
    "timm-volo": "without queries and keys",  # outlook attention
    "timm-davit": "several attentions",
    "timm-cait": "talking heads",
    "t5": "several attentions",  # a decoder block's own and the one that looks at the encoder
    "mt5": "several attentions",
    "bart": "several attentions",
    "mbart": "several attentions",
}


# -- against the library's attention ---------------------------------------------------------------


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attend(a, x, scale, *, causal=False, rotate=lambda v: v):
    """(tokens, width) through an attention, in float64; `rotate` turns (heads, tokens, head_dim)."""
    parts = []
    for weight, bias in ((a.q, a.q_bias), (a.k, a.k_bias), (a.v, a.v_bias)):
        y = np.einsum("hdw,tw->htd", weight.astype(np.float64), x)
        parts.append(y if bias is None else y + bias[:, None])
    each = a.heads // a.kv_heads
    q, k, v = rotate(parts[0]), *(np.repeat(p, each, axis=0) for p in (rotate(parts[1]), parts[2]))
    scores = scale * q @ k.transpose(0, 2, 1)
    if causal:
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    out = np.einsum("htd,whd->tw", softmax(scores) @ v, a.o.astype(np.float64))
    return out if a.o_bias is None else out + a.o_bias


def rotation(part: int, base: float = 10000.0):
    """Rotary positions in the first `part` numbers of each head, halves against each other (Su et al. 2021)."""

    def rotate(v):
        angle = np.arange(v.shape[1])[:, None] * base ** (-np.arange(0, part, 2) / part)
        a, b = v[..., : part // 2], v[..., part // 2 : part]
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        return np.concatenate([*turned, v[..., part:]], axis=-1)

    return rotate


def seen(module, run):
    """First input and output of a module while `run` runs, of one sample in float64."""
    found = {}

    def note(_, args, kwargs, out):
        found["in"] = args[0] if args else kwargs["hidden_states"]
        found["out"] = out if isinstance(out, torch.Tensor) else out[0]

    hook = module.register_forward_hook(note, with_kwargs=True)
    run()
    hook.remove()
    return found["in"][0].double().numpy(), found["out"][0].double().numpy()


ATTENTIONS = {  # family -> the attention of layer 1 in the built model, and how it looks at the tokens
    "bert": ("bert.encoder.layer.1.attention.self", dict(), "bert.encoder.layer.1.attention.output.dense"),
    "gpt2": ("transformer.h.1.attn", dict(causal=True), ""),
    "llama": ("model.layers.1.self_attn", dict(causal=True, rotate=rotation(16)), ""),
    "gpt_neox": ("gpt_neox.layers.1.attention", dict(causal=True, rotate=rotation(2)), ""),
    "modernbert": ("model.layers.3.attn", dict(rotate=rotation(8, 160000.0)), ""),
    "timm-vit": ("blocks.1.attn", dict(), ""),
    "lean-gpt2": ("transformer.h.1.attn", dict(causal=True), ""),
    "bert-crammed": ("encoder.layers.1.attention", dict(), ""),
}


@pytest.mark.parametrize("key", ATTENTIONS)
def test_attention_by_hand_is_the_librarys(key, tmp_path):
    source, model = make(key, tmp_path / "source")
    path, ways, projection = ATTENTIONS[key]
    batch = batches(source, model)[0]
    layer, stage = int(re.search(r"\d", path)[0]), source.shape.stages[0]
    attention = unpack(of_attention(s for s in source.specs if s.layer == layer), stage, source.weights.float32)
    inside, out = seen(model.get_submodule(path), lambda: expected(source, model, batch))
    if projection:
        _, out = seen(model.get_submodule(projection), lambda: expected(source, model, batch))
    got = attend(attention, inside, score_scale(source, stage), **ways)
    assert np.abs(got - out).max() < 2e-5 * np.abs(out).max()


@pytest.mark.parametrize(
    ("family", "changes", "scale", "gain"),
    [
        ("bert", {}, 8**-0.5, 0.5),
        ("gpt2", {"scale_attn_weights": False}, 1.0, 1.0),
        ("t5", {}, 1.0, 1.0),
        ("llama", {"query_pre_attn_scalar": 64}, 1 / 8, 1.0),
        ("llama", {"attention_multiplier": 0.25}, 0.25, 1.0),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", None),
        ("llama", {"attn_logit_softcapping": 50.0}, "caps its scores", None),
    ],
)
def test_the_scale_of_scores(family, changes, scale, gain, saved):
    """And the gain where heads of 8 become heads of 2."""
    source = open_source(str(saved(family)[0]))
    source, stage = replace(source, config=source.config | changes), source.shape.stages[0]
    assert rotary(source) is (family == "llama")
    if gain is None:
        with pytest.raises(UnsupportedModel, match=scale):
            score_scale(source, stage)
        return
    assert score_scale(source, stage) == pytest.approx(scale)
    assert score_gain(source, stage, replace(stage, head_dim=stage.head_dim // 4)) == pytest.approx(gain)
