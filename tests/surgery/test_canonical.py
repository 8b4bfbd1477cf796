"""Matrices in one form: there and back loses no bit, and they are what the library's attention computes with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel
from leansurgeon.shape import Stage
from leansurgeon.surgery.canonical import (
    ROLES,
    Attention,
    of_attention,
    pack,
    rotary,
    score_gain,
    score_scale,
    unpack,
    why_unsupported,
)
from tests import conftest
from tests.checkpoints.test_skeleton import CASES, batches, expected, make, of_layer, opened

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


def read(source, layer: int) -> tuple[Attention, Stage, list[TensorSpec]]:
    """The attention of a layer, its stage and its tensors."""
    specs = of_attention(s for s in source.specs if s.layer == layer)
    stage = source.shape.stages[specs[0].stage]
    return unpack(specs, stage, source.weights.float32), stage, specs


@pytest.mark.parametrize("key", CASES)
def test_there_and_back_is_every_bit(key, tmp_path):
    source, _ = make(key, tmp_path / "source")
    if key in UNSUPPORTED:
        assert UNSUPPORTED[key] in why_unsupported(source)
        return
    assert why_unsupported(source) is None
    for i in range(source.shape.depth):
        attention, stage, specs = read(source, i)
        assert attention.q.shape == (stage.heads, stage.head_dim, stage.width)
        assert attention.k.shape == attention.v.shape == (stage.kv_heads, stage.head_dim, stage.width)
        assert attention.o.shape == (stage.width, stage.heads, stage.head_dim)
        packed, tensors = pack(attention, specs), of_layer(source, i)
        assert packed.keys() == {s.name for s in source.specs if s.layer == i and s.role in ROLES}
        for name, values in packed.items():
            assert values.dtype == np.float32 and np.array_equal(values, tensors[name]), name


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
    attention, stage, _ = read(source, int(next(p for p in path.split(".") if p.isdigit())))
    inside, out = seen(model.get_submodule(path), lambda: expected(source, model, batch))
    if projection:
        _, out = seen(model.get_submodule(projection), lambda: expected(source, model, batch))
    got = attend(attention, inside, score_scale(source, stage), **ways)
    assert np.abs(got - out).max() < 2e-5 * np.abs(out).max()


# -- a result --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["gpt2", "gpt_neox", "llama", "bert"])
def test_heads_in_another_order_change_nothing(key, tmp_path):
    """Packed into the file and run by the library: the order of heads has no meaning where each brings its own."""
    source, model = make(key, tmp_path / "source")
    skeleton, (a, _, specs) = opened(source), read(source, 0)
    kv = np.arange(a.kv_heads)[::-1]
    each = a.heads // a.kv_heads
    q = (kv[:, None] * each + np.arange(each)).reshape(-1)
    take = {"q": q, "k": kv, "v": kv, "q_bias": q, "k_bias": kv, "v_bias": kv}
    moved = {n: getattr(a, n)[i] for n, i in take.items() if getattr(a, n) is not None}
    before = of_layer(source, 0)
    packed = before | pack(replace(a, o=a.o[:, q], **moved), specs)
    assert not all(np.array_equal(packed[n], values) for n, values in before.items())
    from leansurgeon.checkpoints.blockwise.stream import Stream

    stream = Stream(skeleton, batches(source, model))
    outs = []
    for tensors in (packed, before):
        skeleton.fill(0, tensors)
        outs.append(stream.run())
    for got, want in zip(*outs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_scale_of_scores(tmp_path):
    def source(family, **changes):
        folder = tmp_path / f"{family}{len(changes)}{sorted(changes)}"
        conftest.build(family, **changes).save_pretrained(folder)
        return open_source(str(folder))

    def scale(source):
        return score_scale(source, source.shape.stages[0])

    def gain(source):
        return score_gain(source, source.shape.stages[0], replace(source.shape.stages[0], head_dim=2))

    assert scale(source("bert")) == pytest.approx(8**-0.5) and gain(source("bert")) == pytest.approx(0.5)
    flat = source("gpt2", scale_attn_weights=False)
    assert scale(flat) == 1.0 and gain(flat) == 1.0
    assert scale(source("t5")) == 1.0
    with pytest.raises(UnsupportedModel, match=r"\bscale_attn_by_inverse_layer_idx\b"):
        scale(source("gpt2", scale_attn_by_inverse_layer_idx=True))
    one = source("llama")
    gemma2 = replace(one, config=one.config | {"query_pre_attn_scalar": 64})
    assert scale(gemma2) == pytest.approx(1 / 8) and gain(gemma2) == 1.0
    assert scale(replace(one, config=one.config | {"attention_multiplier": 0.25})) == 0.25
    with pytest.raises(UnsupportedModel, match="caps its scores"):
        scale(replace(one, config=one.config | {"attn_logit_softcapping": 50.0}))
    assert rotary(one) and not rotary(flat)
