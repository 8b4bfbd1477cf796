"""timm's ViT with a free head_dim: the entry point against timm's model, the declaration against what timm builds."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import leansurgeon.models.timm_vit  # noqa: F401  registers the entry point
from leansurgeon import architectures
from leansurgeon.architectures.timm_models import folder_config, skeleton, source_config
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import complete, open_source, timm_config
from leansurgeon.errors import UnsupportedModel

TINY = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=4, mlp_ratio=2, num_classes=5)


def build(**changes):
    torch.manual_seed(0)
    return timm.create_model("leansurgeon_vit", **TINY | changes).eval()


def output(model, channels=3):
    torch.manual_seed(1)
    with torch.no_grad():
        return model(torch.randn(2, channels, 16, 16))


@pytest.mark.parametrize("head_dim", [None, 6])
def test_head_dim_of_timm_is_timms_model_to_the_bit(head_dim):
    ours = build(head_dim=head_dim)
    torch.manual_seed(0)
    theirs = timm.create_model("vit_base_patch16_224", **TINY).eval()
    mine, state = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(state)
    assert all(torch.equal(mine[name], state[name]) for name in state)
    assert torch.equal(output(ours), output(theirs))


def test_heads_need_not_divide_the_width_and_gradients_reach_every_parameter():
    """The new projections start as timm's."""
    model = build(num_heads=40, head_dim=7, embed_dim=96).train()
    for block in model.blocks:
        assert block.attn.qkv.weight.shape == (840, 96) and block.attn.scale == 7**-0.5
        for layer in (block.attn.qkv, block.attn.proj):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05) and not layer.bias.any()
    torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 5, "head_dim": 7, "in_chans": 1},
        {"num_heads": 5, "head_dim": 7, "qkv_bias": False, "global_pool": "avg", "class_token": False, "fc_norm": True},
    ],
)
def test_a_folder_loads_with_create_model(tmp_path, changes):
    args = TINY | changes
    model = build(**changes)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    config = folder_config(architectures.load_families()["leansurgeon_vit"], "leansurgeon_vit", args)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    channels = args.get("in_chans", 3)
    assert torch.equal(output(loaded, channels), output(model, channels))
    declared = architectures.load_families()["leansurgeon_vit"]
    assert architectures.of(config) is declared
    built = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert built == {spec.name: spec.shape for spec in declared.tensors(config)}


def test_unsupported_parts_are_named_by_the_entry_point():
    with pytest.raises(ValueError, match="qk_norm"):
        build(num_heads=5, head_dim=7, qk_norm=True)


def test_a_file_of_timms_own_may_hold_what_differs_from_the_name_only(tmp_path):
    """`model_args` as `timm.models.save_for_hf` writes them; elsewhere the number of classes stands outside them."""
    torch.manual_seed(0)
    changed = dict(depth=2, global_pool="avg", img_size=32)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **changed).eval()
    timm.models.save_for_hf(model, tmp_path, model_args=changed, safe_serialization=True)
    pixels = torch.randn(2, 3, 32, 32)
    for drop in ((), ("num_classes",), ("num_classes", "in_chans")):
        config = json.loads((tmp_path / "config.json").read_text())
        config["model_args"] = {k: v for k, v in config["model_args"].items() if k not in drop}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert open_source(str(tmp_path)).parameters.total == sum(p.numel() for p in model.parameters())
        with torch.no_grad():
            assert torch.equal(load(tmp_path).model.eval()(pixels), model(pixels))


@pytest.mark.parametrize(
    "given", [{}, {"model_args": None}, {"model_args": {"img_size": 32}}], ids=["no", "null", "size"]
)
def test_pixels_are_prepared_as_the_file_says_and_not_as_another_tag_of_its_name(given):
    """timm/vit_small_patch16_224.dino has ImageNet's mean; the tag that its name stands for has 0.5."""
    dino = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "crop_pct": 0.875}
    outer = {"architecture": "vit_small_patch16_224", "num_classes": 0} | given
    for file in (outer | {"pretrained_cfg": dino}, outer | dino):  # early files have no `pretrained_cfg`
        found = complete(file)
        assert {key: found["pretrained_cfg"][key] for key in dino} == dino
        assert found["model_args"]["num_classes"] == 0
        assert found["pretrained_cfg"]["input_size"][1] == (given.get("model_args") or {}).get("img_size", 224)


def test_model_args_that_timm_does_not_take_are_one_sentence():
    with pytest.raises(UnsupportedModel, match=r"'nonsense'"):
        complete({"architecture": "vit_tiny_patch16_224", "model_args": {"nonsense": 1}})


@pytest.mark.parametrize(
    "name",
    [
        "deit_base_distilled_patch16_224",
        "deit3_base_patch16_224",
        "vit_base_patch14_dinov2",
        "vit_base_patch14_reg4_dinov2",
        "vit_base_patch16_clip_224",
        "vit_base_patch16_siglip_224",
        "vit_base_patch16_rpn_224",
        "vit_base_r50_s16_224",
        "vit_medium_patch16_reg4_gap_256",
        "resnet18",
    ],
)
def test_variants_that_are_not_a_plain_vit_are_left_to_inference(name):
    assert source_config(architectures.load_families()["timm_vit"], name, skeleton(name)) is None


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UnsupportedModel, match="did you mean 'vit_base_patch16_224'"):
        timm_config("vit_base_patch16_24")
