"""timm's ViT with a free head_dim: the entry point against timm's model, the declaration against what timm builds."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import leansurgeon.models.timm_vit  # noqa: F401  registers the entry point
from leansurgeon import architectures
from leansurgeon.architectures.timm_models import folder_config
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import complete, open_source
from leansurgeon.errors import UnsupportedModel

TINY = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=4, mlp_ratio=2, num_classes=5)


def build(**changes):
    torch.manual_seed(0)
    return timm.create_model("leansurgeon_vit", **TINY | changes).eval()


def output(model, channels=3):
    torch.manual_seed(1)
    with torch.no_grad():
        return model(torch.randn(2, channels, 16, 16))


def test_heads_need_not_divide_the_width_and_start_as_timms():
    attention = build(num_heads=40, head_dim=7, embed_dim=96).blocks[1].attn
    assert attention.qkv.weight.shape == (840, 96) and attention.scale == 7**-0.5
    for layer in (attention.qkv, attention.proj):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05) and not layer.bias.any()


@pytest.mark.parametrize(
    "changes",
    [
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


@pytest.mark.parametrize("given", [{"model_args": None}, {"model_args": {"img_size": 32}}], ids=["null", "size"])
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
