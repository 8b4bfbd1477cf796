"""Balance: the library computes the same, and condition numbers are what an SVD of the product says they can be."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import leansurgeon
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.kappa.basis import balance
from leansurgeon.surgery import canonical
from leansurgeon.surgery.balance import balance_attention
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out, decide
from tests import conftest
from tests.checkpoints.test_skeleton import CASES, batches, expected, make
from tests.surgery.test_canonical import UNSUPPORTED, attend

SCORES = {"bert", "gpt2", "vit", "opt", "lean-bert", "lean-gpt2", "timm-vit", "bert-crammed"}  # queries and keys, too
NOT_SCORES = {"llama", "qwen3", "gpt_neox", "dinov3_vit", "timm-eva", "timm-swinv2"}


def written(source, out, method=None, **wanted):
    steps = plan(source, RequestedShape(**wanted), 3, method or Method(balance=True))
    return carry_out(DecidedCut(steps), out, check=False)


@pytest.mark.parametrize("key", CASES)
def test_every_family_says_the_same_in_another_basis(key, tmp_path):
    source, model = make(key, tmp_path / "source")
    if key in UNSUPPORTED:
        with pytest.raises(UnsupportedModel, match=UNSUPPORTED[key]):
            plan(source, RequestedShape(), method=Method(balance=True))
        return
    record = written(source, tmp_path / "out")
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
        for pair in (("o", "v"), ("q", "k")) if step.settings["scores"] else (("o", "v"),):
            largest = {when: max(layer[name][when]["worst"] for name in pair) for when in ("before", "after")}
            assert largest["after"] < largest["before"]


def test_both_factors_reach_the_root_of_the_products_condition():
    """Against torch's SVD of the whole product; and no larger of the two could be smaller."""
    torch.manual_seed(0)
    left, right = torch.randn(40, 8, dtype=torch.float64), torch.randn(8, 30, dtype=torch.float64)
    left, right = left @ torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64) @ right
    pair = balance(left.numpy(), right.numpy())
    values = torch.linalg.svdvals(left @ right)[:8]
    root = float((values[0] / values[-1]).sqrt())
    for new, reached in zip((pair.left, pair.right), pair.after, strict=True):
        assert np.linalg.cond(new) == pytest.approx(root) == pytest.approx(reached)
    assert pair.before == pytest.approx((np.linalg.cond(left), np.linalg.cond(right)))
    np.testing.assert_allclose(pair.left @ pair.right, left @ right, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(pair.basis @ right.numpy(), pair.right, rtol=1e-9, atol=1e-9)
    again = balance(pair.left, pair.right)
    assert again.basis is None and again.left is not None  # balanced already


def test_a_silent_head_is_left_alone():
    rng = np.random.default_rng(0)
    left, right = np.zeros((20, 4)), rng.normal(size=(4, 20))
    pair = balance(left, right)
    assert pair.basis is None and np.array_equal(pair.right, right)
    half = rng.normal(size=(20, 4))
    half[:, 2:] = 0  # a child of a split head: half of the columns
    assert balance(half, right).basis is None


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_biases_and_groups_follow(kv_heads):
    """Attention by hand in fp64: each of a group's query heads in the basis of the one key/value head."""
    rng = np.random.default_rng(1)

    def draw(*sizes):
        return rng.normal(size=sizes).astype(np.float32)

    a = canonical.Attention(
        draw(4, 6, 20), draw(kv_heads, 6, 20), draw(kv_heads, 6, 20), draw(20, 4, 6),
        draw(4, 6), draw(kv_heads, 6), draw(kv_heads, 6), draw(20),
    )  # fmt: skip
    b, record = balance_attention(a, scores=True)
    x = rng.normal(size=(9, 20)) * 0.3
    want, got = (attend(one, x, 6**-0.5) for one in (a, b))
    assert np.abs(want - got).max() < 1e-5 * np.abs(want).max()
    assert all(record[name]["left"] == 0 and record[name]["heads"] == kv_heads for name in "ovqk")
    assert not np.allclose(a.q_bias, b.q_bias) and not np.allclose(a.v_bias, b.v_bias)


def test_balance_comes_last(saved, tmp_path):
    """On top of added heads, dropped layers and tensors that calibration has changed."""
    folder, model = saved("llama")
    source = open_source(str(folder))
    written(source, tmp_path / "wide", heads="8")
    wide, plain = load(tmp_path / "wide").model.eval(), tmp_path / "plain"
    inputs = conftest.example(model)
    with torch.no_grad():
        a, b = (conftest.output(m, inputs) for m in (model, wide))
    assert (a - b).abs().max() < 1e-4 * a.std()
    carry_out(DecidedCut(plan(source, RequestedShape(heads="8"), 3)), plain, check=False)
    old, new = load_file(plain / "model.safetensors"), load_file(tmp_path / "wide/model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    silent = (old[name] == 0).all(0)
    assert silent.sum() == 4 * 16 and (new[name][:, silent] == 0).all()

    target = "model.layers.1.self_attn.o_proj.weight"
    healed = {target: source.weights.float32("model.layers.2.self_attn.o_proj.weight") * 1.5}
    both = []
    for method in (Method(), Method(balance=True)):
        steps = plan(source, RequestedShape(layers="2"), 3, method)
        out = tmp_path / f"healed-{method.balance}"
        carry_out(DecidedCut(steps, healed), out, check=False)
        with torch.no_grad():
            both.append(conftest.output(load(out).model.eval(), inputs))
    assert (both[0] - both[1]).abs().max() < 1e-4 * both[0].std()


def test_on_heads_of_another_size(saved, tmp_path):
    """Heads split by the weights alone, and then balanced: the same as split alone."""
    folder, model = saved("bert")
    source, both = open_source(str(folder)), []
    for even in (False, True):
        method = Method(uncalibrated=True, balance=even)
        carry_out(decide(plan(source, RequestedShape(heads="8"), 0, method)), tmp_path / str(even), check=False)
        with torch.no_grad():
            both.append(conftest.output(load(tmp_path / str(even)).model.eval(), conftest.example(model)))
    assert (both[0] - both[1]).abs().max() < 1e-4 * both[0].std()


def test_the_record_tells_the_numbers(saved, tmp_path):
    folder, _ = saved("vit")
    written(open_source(str(folder)), tmp_path / "out")
    stored = json.loads((tmp_path / "out/surgery.json").read_text())
    assert stored["decided"]["balance"]["0"]["v"]["before"]["worst"] > 1
    assert "**balance** (exact)" in (tmp_path / "out/README.md").read_text()


def test_what_cannot_stay_the_same_is_refused(saved, tmp_path):
    model = conftest.build("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    even = Method(balance=True)
    with pytest.raises(UnsupportedModel, match="these weights are BF16"):
        plan(open_source(str(tmp_path / "half")), RequestedShape(), method=even)
    folder, _ = saved("bert")
    with pytest.raises(UsageError, match="--init fresh forgets it"):
        plan(open_source(str(folder)), RequestedShape(init="fresh"), method=even)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_an_inferred_family_that_rotates_keeps_its_queries_and_keys(kv_heads, tmp_path):
    """What is said to be exact was applied and compared, without the proof, too: plain transformers says the same."""
    import transformers

    torch.manual_seed(0)
    model = transformers.StableLmForCausalLM(
        transformers.StableLmConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=kv_heads,
            intermediate_size=48, vocab_size=61, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path / "source")
    made = leansurgeon.shrink(str(tmp_path / "source"), balance=True, proof=False, out=tmp_path / "out", progress=False)
    assert made.record.plan.operators[0].settings == {"scores": False}
    ids = torch.randint(0, 61, (2, 12))
    with torch.no_grad():
        old, new = model(ids).logits, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    assert (old - new).abs().max() < 1e-4 * old.std()
    changed = load_file(tmp_path / "out/model.safetensors")["model.layers.0.self_attn.v_proj.weight"]
    assert not torch.equal(changed, model.model.layers[0].self_attn.v_proj.weight)
