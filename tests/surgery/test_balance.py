"""Balance: the library computes the same, and condition numbers are what an SVD of the product says they can be."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import leansurgeon
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.kappa.basis import balance
from leansurgeon.surgery.canonical import rotary, score_gain, score_scale
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out
from tests import conftest
from tests.checkpoints.test_skeleton import CASES, batches, expected, make
from tests.support.models.undeclared import computed, reloaded, small_model
from tests.surgery.cuts import cut, logits

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
SCORES = {"bert", "gpt2", "vit", "opt", "lean-bert", "lean-gpt2", "timm-vit", "bert-crammed"}  # queries and keys, too
NOT_SCORES = {"llama", "qwen3", "gpt_neox", "dinov3_vit", "timm-eva", "timm-swinv2"}


EVEN = Method(balance=True)


@pytest.mark.parametrize("key", CASES)
def test_every_family_says_the_same_in_another_basis(key, tmp_path):
    assert_balance_is_exact(key, tmp_path)


@pytest.mark.parametrize("key", ["gpt_neox", "modernbert"])  # other layouts, which a commit leaves out above
def test_every_layout_is_packed_as_it_was_unpacked(key, tmp_path):
    assert_balance_is_exact(key, tmp_path)


def assert_balance_is_exact(key, tmp_path):
    source, model = make(key, tmp_path / "source")
    if key in UNSUPPORTED:
        with pytest.raises(UnsupportedModel, match=UNSUPPORTED[key]):
            plan(source, RequestedShape(), method=EVEN)
        return
    _, record = cut(tmp_path / "source", tmp_path / "out", EVEN)
    (step,) = record.plan.operators
    assert (step.name, record.plan.exactness) == ("balance", "exact")
    assert step.settings["scores"] or key not in SCORES
    assert not step.settings["scores"] or key not in NOT_SCORES
    new = load(tmp_path / "out").model.eval()
    for batch in batches(source, model):
        a, b = (expected(source, m, batch) for m in (model, new))
        assert (a - b).abs().max() < 1e-4 * a.std()
    after, balanced = open_source(str(tmp_path / "out")), record.decided.balance
    assert list(balanced) == [str(i) for i in range(source.shape.depth)]
    changed = {s.role for s in source.specs if not np.array_equal(*(m.weights.raw(s.name) for m in (source, after)))}
    assert "o" in changed and changed <= {"q", "k", "v", "qk", "qkv", "o"}
    for layer in balanced.values():
        for pair in ("ov", "qk") if step.settings["scores"] else ("ov",):
            before, after = (max(layer[name][when]["worst"] for name in pair) for when in ("before", "after"))
            assert after < before


def test_both_factors_reach_the_root_of_the_products_condition():
    """Against torch's SVD of the whole product; and no larger of the two could be smaller."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(40, 8)) @ rng.normal(size=(8, 8)), rng.normal(size=(8, 30))
    pair = balance(left, right)
    values = torch.linalg.svdvals(torch.from_numpy(left @ right))[:8]
    root = float((values[0] / values[-1]).sqrt())
    for new, reached in zip((pair.left, pair.right), pair.after, strict=True):
        assert np.linalg.cond(new) == pytest.approx(root) == pytest.approx(reached)
    np.testing.assert_allclose(pair.left @ pair.right, left @ right, rtol=1e-11, atol=1e-11)
    assert balance(pair.left, pair.right).basis is None  # balanced already


def test_a_silent_head_is_left_alone():
    rng = np.random.default_rng(0)
    left, right = np.zeros((20, 4)), rng.normal(size=(4, 20))
    for columns in (0, 2):  # a child of a split head has half of them
        left[:, :columns] = rng.normal(size=(20, columns))
        assert balance(left, right).basis is None


def test_balance_comes_last(saved, tmp_path):
    """On top of added heads, dropped layers and tensors that calibration has changed."""
    folder, model = saved("llama")
    name, inputs = "model.layers.1.self_attn.o_proj.weight", conftest.example(model)
    cut(folder, tmp_path / "wide", EVEN, heads="8")
    assert "**balance** (exact)" in (tmp_path / "wide/README.md").read_text()
    before, after = (logits(m, inputs) for m in (model, load(tmp_path / "wide").model))
    assert (before - after).abs().max() < 1e-4 * before.std()

    source = open_source(str(folder))
    healed = {name: source.weights.float32("model.layers.2.self_attn.o_proj.weight") * 1.5}
    answers = []
    for kind, method in (("even", EVEN), ("uneven", Method())):
        steps = plan(source, RequestedShape(layers="3"), method=method)
        carry_out(DecidedCut(steps, healed), tmp_path / kind, check=False)
        answers.append(logits(load(tmp_path / kind).model, inputs))
    assert (answers[0] - answers[1]).abs().max() < 1e-4 * answers[0].std()


def test_what_cannot_stay_the_same_is_refused(saved, tmp_path):
    model = conftest.build("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    with pytest.raises(UnsupportedModel, match="these weights are BF16"):
        plan(open_source(str(tmp_path / "half")), RequestedShape(), method=EVEN)
    folder, _ = saved("bert")
    with pytest.raises(UsageError, match="--init fresh forgets it"):
        plan(open_source(str(folder)), RequestedShape(init="fresh"), method=EVEN)


@pytest.mark.parametrize(("model_type", "scores"), [("stablelm", False), ("gpt_bigcode", True)])
def test_an_inferred_family_that_rotates_keeps_its_queries_and_keys(model_type, scores, tmp_path):
    """What is said to be exact was applied and compared, without the proof, too: plain transformers says the same. In
    the other one all heads share a key.
    """
    model, config = small_model(model_type, tmp_path / "source")
    made = leansurgeon.shrink(str(tmp_path / "source"), balance=True, proof=False, out=tmp_path / "out", progress=False)
    assert made.record.plan.operators[0].settings == {"scores": scores}
    new = reloaded(tmp_path / "out", model)
    before, after = (computed(m, config) for m in (model, new))
    assert (before - after).abs().max() < 1e-4 * before.std()
    one, other = model.state_dict(), new.state_dict()
    assert not all(torch.equal(one[name], other[name]) for name in one)


# -- scores -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "scale", "gain"),
    [
        ("bert", {}, 8**-0.5, 0.5),
        ("gpt2", {"scale_attn_weights": False}, 1.0, 1.0),
        ("llama", {"query_pre_attn_scalar": 64}, 1 / 8, 1.0),
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
