"""`--class-attention`: class attention that follows the heads of the blocks, against timm's own models."""

import pytest
import timm
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.surgery.cuts import cut
from tests.surgery.test_timm_families import output, reload, save_small

BLOCKS = {"xcit": "cls_attn_blocks", "cait": "blocks_token_only"}


def follow(source, out, **wanted):
    return cut(source, out, class_attention=True, **wanted)


@pytest.mark.parametrize("key", BLOCKS)
def test_added_heads_are_exact_and_stand_in_the_class_attention_too(key, tmp_path):
    source, model = save_small(key, tmp_path / "source")
    steps, _ = follow(source, tmp_path / "wide", heads="7", head_dim="keep")
    assert steps.exactness == "exact" and steps.as_dict()["class_attention"] and "class attention" in steps.why
    wide = reload(tmp_path / "wide")
    torch.testing.assert_close(output(wide), output(model), atol=1e-5, rtol=1e-5)
    attention = getattr(wide, BLOCKS[key])[1].attn
    assert attention.num_heads == 7 and attention.q.weight.shape == (56, 32)
    assert not attention.proj.weight[:, 32:].any() and attention.q.weight[32:].std() > 0
    assert sum(p.numel() for p in wide.parameters()) == steps.parameters_after.total
    # And from there: without the flag the class attention stays.
    cut(tmp_path / "wide", tmp_path / "more", heads="9")
    wider = reload(tmp_path / "more")
    assert getattr(wider, BLOCKS[key])[0].attn.q.out_features == 56
    torch.testing.assert_close(output(wider), output(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("key", BLOCKS)
def test_fewer_heads_are_the_strongest_of_each_class_attention(key, tmp_path):
    source, model = save_small(key, tmp_path / "source")
    _, record = follow(source, tmp_path / "few", heads="2", head_dim="keep")
    few = reload(tmp_path / "few")
    for number, (old, new) in enumerate(zip(getattr(model, BLOCKS[key]), getattr(few, BLOCKS[key]), strict=True), 1):
        strength = old.attn.proj.weight.reshape(32, 4, 8).norm(dim=(0, 2))
        kept = strength.topk(2).indices.sort().values
        assert record.decided.kept_heads[f"outside.{number}"] == tuple(kept.tolist())
        assert torch.equal(new.attn.v.weight.reshape(2, 8, 32), old.attn.v.weight.reshape(4, 8, 32)[kept])


def test_split_heads_that_follow_need_no_modelling_file(tmp_path):
    """timm's constructor gives one number of heads to both, which is what was asked for."""
    source, model = save_small("cait", tmp_path / "source")
    steps, _ = follow(source, tmp_path / "split", heads="8", head_dim="split", init="fresh-attention")
    assert steps.architecture.name == "timm_cait"
    split = timm.create_model(f"local-dir:{tmp_path / 'split'}", pretrained=True)
    old, new = model.blocks_token_only[0].attn, split.blocks_token_only[0].attn
    assert new.num_heads == 8 and torch.equal(old.proj.weight, new.proj.weight)
    assert not torch.isclose(old.q.weight, new.q.weight).all(1).any()


def test_parameters_of_the_papers_xcit_with_class_attention():
    """Counted with timm in the facts: 59.003M with cross-covariance heads alone, 61.103M with class attention."""
    source = open_source("xcit-m")
    for follows, millions in ((False, 59.003), (True, 61.103)):
        steps = plan(source, RequestedShape("16", "12", class_attention=follows))
        assert round(steps.parameters_after.total / 1e6, 3) == millions


def test_what_cannot_follow_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"--class-attention: timm_volo leaves\b"):
        plan(open_source("volo-d3"), RequestedShape(heads="2x", class_attention=True))
    with pytest.raises(UnsupportedModel, match=r"--class-attention: timm_vit has no\b"):
        plan(open_source("vit-b"), RequestedShape(heads="16", class_attention=True))
    source, _ = save_small("xcit", tmp_path / "source")
    cut(source, tmp_path / "apart", heads="7")
    with pytest.raises(UsageError, match=r"cls_num_heads.*\b4\b.*\b7\b"):
        plan(open_source(str(tmp_path / "apart")), RequestedShape(heads="9", class_attention=True))
