"""Transfer surgery against the library's own forward pass: what must be unchanged is compared with the source model."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.proof import prove, reload_check
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.shape import SPACINGS, Shape, Stage, evenly, evenly_per_stage
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out
from tests.conftest import FAMILIES, FIXED, KEEP, NARROW_MLP, SPLIT_ONLY, build, example, output

# What a block gives beside the hidden states: nothing in a tuple; T5 the biases of the positions for the next one.
PASS_ON = {
    "nystromformer": lambda hidden, *args, **kwargs: (hidden,),
    **dict.fromkeys(("t5", "mt5"), lambda hidden, *args, **kwargs: (hidden, args[1], args[4])),
}
UNPROVEN = ("nystromformer",)  # keep is refused there
DECOUPLED = ("bert", "roberta", "gpt2")  # keep needs our modelling file there


def cut(folder, out, **wanted):
    source = open_source(str(folder))
    steps = plan(source, RequestedShape(**wanted), seed=3)
    return steps, carry_out(DecidedCut(steps), out, check=False)


def logits(model, inputs):
    with torch.no_grad():
        return output(model, inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_shape_says_the_same_and_survives_saving(family, saved, tmp_path):
    folder, model = saved(family)
    steps, _ = cut(folder, tmp_path / "same")
    assert steps.operators == () and steps.before == steps.after
    same, inputs = load(tmp_path / "same"), example(model)
    assert (logits(model, inputs) - logits(same.model.eval(), inputs)).abs().max() < 1e-5
    same.save(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again").model.eval(), inputs), logits(same.model, inputs))


@pytest.mark.parametrize("family", KEEP)
def test_added_heads_do_not_change_the_function(family, saved, tmp_path):
    folder, model = saved(family)
    steps, _ = cut(folder, tmp_path / "wide", heads="2x", head_dim="keep")
    assert {o.name for o in steps.operators} == {"add-heads"} and steps.exactness == "exact"
    wide = load(tmp_path / "wide").model.eval()
    inputs = example(model)
    before, after = logits(model, inputs), logits(wide, inputs)
    assert (before - after).abs().max() < 1e-5 * before.std()
    assert sum(p.numel() for p in wide.parameters()) == steps.parameters_after.total


@pytest.mark.parametrize("family", SPLIT_ONLY)
def test_heads_that_keep_their_size_where_no_library_holds_them_are_inferred(family, saved, tmp_path):
    """By the modelling file for families that nobody declared, where it is proven; else refused with both numbers."""
    folder, model = saved(family)
    if family in UNPROVEN:
        with pytest.raises(UnsupportedModel, match=r"head_dim.*\b4\b.*\b8\b"):
            cut(folder, tmp_path / "wide", heads="2x", head_dim="keep")
        return
    steps, _ = cut(folder, tmp_path / "wide", heads="2x", head_dim="keep")
    assert steps.architecture.modelling == "decoupled_any.py" and steps.exactness == "exact"
    before, after = logits(model, example(model)), logits(load(tmp_path / "wide").model.eval(), example(model))
    assert (before - after).abs().max() < 1e-5 * before.std()


@pytest.mark.parametrize(("family", "why"), FIXED.items())
def test_heads_are_refused_where_what_they_compute_follows_from_their_number(family, why, saved, tmp_path):
    folder, _ = saved(family)
    for heads in ("8", "2"):
        with pytest.raises(UnsupportedModel, match=why) as caught:
            cut(folder, tmp_path / "wide", heads=heads, head_dim="keep")
    assert re.search(r"\bLayers\b.*\bdropped\b", caught.value.hint, re.S)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropped_layers_equal_the_source_without_them(family, saved, tmp_path):
    folder, model = saved(family)
    steps, _ = cut(folder, tmp_path / "shallow", layers="2")
    assert steps.layers == ((0, 3, 4, 7) if model.config.is_encoder_decoder else (0, 3))
    shallow = load(tmp_path / "shallow").model.eval()
    inputs = example(model)
    # The reference: the library's model with two blocks of each stack that pass their input on.
    passes = PASS_ON.get(family, lambda hidden, *args, **kwargs: hidden)
    for stack in [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4]:
        for i in (1, 2):
            stack[i].forward = passes
    assert torch.allclose(logits(model, inputs), logits(shallow, inputs), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_at_once_trains(family, saved, tmp_path):
    """Wider, shallower and narrower: the planned count is the built count and every parameter gets a gradient."""
    folder, model = saved(family)
    policy, mlp_dim = "keep" if family in KEEP else "split", str(NARROW_MLP.get(family, 24))
    wanted = dict(heads=None if family in FIXED else "8", mlp_dim=mlp_dim)
    steps, _ = cut(folder, tmp_path / "lean", layers="3", head_dim=policy, init="fresh-attention", **wanted)
    lean = load(tmp_path / "lean").model
    assert sum(p.numel() for p in lean.parameters()) == steps.parameters_after.total
    assert sum(steps.saved_by.values()) == steps.parameters_before.total - steps.parameters_after.total
    config = json.loads((tmp_path / "lean/config.json").read_text())
    how = prove.how_to_load(tmp_path / "lean", as_documented=True)
    reloaded, account = reload_check.load_transformers(tmp_path / "lean", config, how, {})
    assert account["missing"] == account["unexpected"] == account["mismatched"] == []
    assert reload_check.run(reloaded, [reload_check.example(reloaded, how)], "plain", None)[0]["finite"]
    output(lean, example(model)).pow(2).sum().backward()
    # New heads say nothing yet (zero output columns): their q, k, v start with a gradient that is zero.
    unused = ("pooler", "distill", "mask_token")
    without = [n for n, p in lean.named_parameters() if p.grad is None and not any(u in n for u in unused)]
    assert without == []


def test_the_pooling_head_of_siglip_changes_with_the_blocks(saved, tmp_path):
    """It takes the number of heads and the width of the MLP from the same config keys."""
    folder, model = saved("siglip_vision_model")
    cut(folder, tmp_path / "split", heads="8", mlp_dim="16", init="fresh-attention")
    old, new = model.head, load(tmp_path / "split").model.head
    assert new.attention.num_heads == 8
    assert not torch.isclose(new.attention.in_proj_weight, old.attention.in_proj_weight).any(dim=1).all()
    assert torch.equal(new.attention.out_proj.weight, old.attention.out_proj.weight)
    kept = (old.mlp.fc1.weight.norm(dim=1) * old.mlp.fc2.weight.norm(dim=0)).topk(16).indices.sort().values
    assert torch.equal(new.mlp.fc1.weight, old.mlp.fc1.weight[kept])
    assert torch.equal(new.mlp.fc2.weight, old.mlp.fc2.weight[:, kept])


def test_mlp_keeps_the_units_with_the_largest_weights(saved, tmp_path):
    folder, model = saved("llama")
    cut(folder, tmp_path / "narrow", mlp_dim="16")
    narrow = load(tmp_path / "narrow").model
    for old, new in zip(model.model.layers, narrow.model.layers, strict=True):
        m = old.mlp
        score = m.gate_proj.weight.norm(dim=1) * m.up_proj.weight.norm(dim=1) * m.down_proj.weight.norm(dim=0)
        kept = score.topk(16).indices.sort().values
        assert torch.equal(new.mlp.up_proj.weight, m.up_proj.weight[kept])
        assert torch.equal(new.mlp.down_proj.weight, m.down_proj.weight[:, kept])
        assert torch.equal(new.mlp.gate_proj.bias, m.gate_proj.bias[kept])


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_fewer_heads_equal_the_source_with_the_others_silenced(family, saved, tmp_path):
    folder, model = saved(family)
    out = tmp_path / "few"
    steps, record = cut(folder, out, heads="2", head_dim="keep")
    few = load(out).model.eval()
    head_dim = steps.before.stages[0].head_dim
    for i, name in enumerate(load(folder).projections):
        kept = record.decided.kept_heads[str(i)]
        module = dict(model.named_modules())[name]
        gone = [h for h in range(4) if h not in kept]
        with torch.no_grad():
            for h in gone:  # Conv1D keeps its input along the rows, Linear along the columns
                part = slice(h * head_dim, (h + 1) * head_dim)
                if family == "gpt2":
                    module.weight[part] = 0
                else:
                    module.weight[:, part] = 0
    inputs = example(model)
    assert torch.allclose(logits(model, inputs), logits(few, inputs), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "heads"), [("bert", "2"), ("bert", "8"), ("vit", "2"), ("llama", "8"), ("qwen3", "8")]
)
def test_split_keeps_the_output_projection_bit_for_bit_where_it_fits(family, heads, saved, tmp_path):
    """Also down to fewer heads and with grouped key/value heads: no column is dropped, moved or zeroed."""
    changes = {"head_dim": 8} if family in ("llama", "qwen3") else {}
    folder, model = saved(family, **changes)
    cut(folder, tmp_path / "split", heads=heads, head_dim="split", init="fresh-attention")
    old, new = dict(model.named_modules()), dict(load(tmp_path / "split").model.named_modules())
    for name in load(folder).projections:
        assert torch.equal(old[name].weight, new[name].weight)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(saved, tmp_path):
    folder, _ = saved("vit")
    source = open_source(str(folder))
    made = []
    for i, seed in enumerate((1, 1, 2)):
        carry_out(DecidedCut(plan(source, RequestedShape(heads="8"), seed)), tmp_path / str(i), check=False)
        made.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


def test_shards_are_read_and_tied_tensors_stay_tied(tmp_path):
    model = build("gpt2")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40kB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    cut(tmp_path / "shards", tmp_path / "cut", layers="2")
    lean = load(tmp_path / "cut").model
    assert lean.lm_head.weight is lean.transformer.wte.weight


def test_even_choice_of_layers():
    assert evenly(4, 2) == (0, 3) and evenly(6, 4) == (0, 2, 3, 5)
    assert evenly(12, 6) == (0, 2, 4, 7, 9, 11)  # DistilBERT's initialisation from BERT
    for depth in range(1, 40):
        for keep in range(1, depth + 1):
            kept = evenly(depth, keep)
            places = np.linspace(0, depth - 1, keep) if keep > 1 else np.zeros(1)
            assert len(set(kept)) == keep and np.abs(np.array(kept) - places).max() < 0.5 + 1e-9
            assert kept[0] == 0 and (keep == 1 or kept[-1] == depth - 1)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("period", [1, 2, 3])
def test_every_spacing_keeps_whole_groups_that_exist(spacing, period):
    """Layers that alternate: each stays at a place of its own kind, and none is invented behind the last."""
    for depth in range(1, 14):
        for keep in range(1, depth + 1):
            stages = (Shape((Stage(d, 1, 1, 1, 1, 1),) * 2) for d in (depth, keep))
            kept = evenly_per_stage(*stages, period, spacing)
            first = kept[:keep]
            assert list(first) == sorted(set(first)) and first[-1] < depth and len(kept) == 2 * keep
            assert [i % period for i in first] == [j % period for j in range(keep)]
            assert kept[keep:] == tuple(depth + i for i in first)


def test_record_and_card_say_what_was_done(saved, tmp_path):
    import hashlib

    folder, _ = saved("vit")
    cut(folder, tmp_path / "lean", heads="8", layers="2")
    record = json.loads((tmp_path / "lean/surgery.json").read_text())
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert record["source"]["sha256"] == {"model.safetensors": digest}
    assert [o["name"] for o in record["plan"]["operators"]] == ["drop-layers", "add-heads"]
    card = (tmp_path / "lean/README.md").read_text()
    assert "| heads | 4 | 8 |" in card and "add-heads" in card


def test_a_layer_that_would_lose_its_norm_as_the_first_one_is_refused(saved):
    """ModernBERT's first layer reads the embeddings as they are; every other one has a norm before its attention."""
    source = open_source(str(saved("modernbert")[0]))
    with pytest.raises(UsageError, match=r"Layer 1 .*'model.layers.1.attn_norm"):
        plan(source, RequestedShape(), method=Method(keep="1,2"))
    assert plan(source, RequestedShape(), method=Method(keep="0,2")).layers == (0, 2)
    assert plan(source, RequestedShape(init="fresh"), method=Method(keep="1,2")).layers == (1, 2)
