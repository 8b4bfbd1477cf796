"""Transfer surgery against the library's own forward pass: what must be unchanged is compared with the source model."""

import pytest
import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.errors import UnsupportedModel
from tests.conftest import FAMILIES, FIXED, KEEP, NARROW_MLP, SPLIT_ONLY, build, example, output
from tests.surgery.cuts import cut, logits

# What a block gives beside the hidden states: nothing in a tuple; T5 the biases of the positions for the next one.
PASS_ON = {
    "nystromformer": lambda hidden, *args, **kwargs: (hidden,),
    **dict.fromkeys(("t5", "mt5"), lambda hidden, *args, **kwargs: (hidden, args[1], args[4])),
}
UNPROVEN = ("nystromformer",)  # keep is refused there


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_shape_says_the_same_and_survives_saving(family, saved, tmp_path):
    folder, model = saved(family)
    steps, _ = cut(folder, tmp_path / "same")
    assert steps.operators == () and steps.before == steps.after
    same, inputs = load(tmp_path / "same"), example(model)
    assert (logits(model, inputs) - logits(same.model, inputs)).abs().max() < 1e-5
    same.save(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again").model, inputs), logits(same.model, inputs))


@pytest.mark.parametrize("family", [*KEEP, *SPLIT_ONLY])
def test_added_heads_do_not_change_the_function(family, saved, tmp_path):
    """Where no library and no file of ours holds them, by the modelling file for families that nobody declared."""
    folder, model = saved(family)
    if family in UNPROVEN:
        with pytest.raises(UnsupportedModel, match=r"head_dim.*\b4\b.*\b8\b"):
            cut(folder, tmp_path / "wide", heads="2x", head_dim="keep")
        return
    steps, _ = cut(folder, tmp_path / "wide", heads="2x", head_dim="keep")
    assert {o.name for o in steps.operators} == {"add-heads"} and steps.exactness == "exact"
    assert family in KEEP or steps.architecture.modelling == "decoupled_any.py"
    wide, inputs = load(tmp_path / "wide").model, example(model)
    before, after = logits(model, inputs), logits(wide, inputs)
    assert (before - after).abs().max() < 1e-5 * before.std()
    assert sum(p.numel() for p in wide.parameters()) == steps.parameters_after.total


def test_heads_are_refused_where_what_they_compute_follows_from_their_number(saved, tmp_path):
    with pytest.raises(UnsupportedModel, match=FIXED["olmo2"]):
        cut(saved("olmo2")[0], tmp_path / "wide", heads="8", head_dim="keep")


@pytest.mark.parametrize("family", FAMILIES)
def test_dropped_layers_equal_the_source_without_them(family, saved, tmp_path):
    folder, model = saved(family)
    steps, _ = cut(folder, tmp_path / "shallow", layers="2")
    assert steps.layers == ((0, 3, 4, 7) if model.config.is_encoder_decoder else (0, 3))
    shallow, inputs = load(tmp_path / "shallow").model, example(model)
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
    old, new = model.model.layers[1].mlp, narrow.model.layers[1].mlp
    score = old.gate_proj.weight.norm(dim=1) * old.up_proj.weight.norm(dim=1) * old.down_proj.weight.norm(dim=0)
    kept = score.topk(16).indices.sort().values
    assert torch.equal(new.up_proj.weight, old.up_proj.weight[kept])
    assert torch.equal(new.down_proj.weight, old.down_proj.weight[:, kept])
    assert torch.equal(new.gate_proj.bias, old.gate_proj.bias[kept])


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
    made = []
    for i, seed in enumerate((1, 1, 2)):
        cut(folder, tmp_path / str(i), seed=seed, heads="8")
        made.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


def test_shards_are_read_and_tied_tensors_stay_tied(tmp_path):
    model = build("gpt2")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40kB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    cut(tmp_path / "shards", tmp_path / "cut", layers="2")
    lean = load(tmp_path / "cut").model
    assert lean.lm_head.weight is lean.transformer.wte.weight
