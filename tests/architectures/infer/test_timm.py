"""Models of timm that nobody declared, inferred from the arguments of their constructors."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import save_for_hf

from leansurgeon import architectures
from leansurgeon.architectures import infer
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.models import timm_any
from leansurgeon.surgery.undeclared_timm import check_timm_name
from tests.support.models.undeclared import shrunk

ALL = {"depth", "heads", "mlp_dim"}


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("deit3_small_patch16_224", {}),  # LayerScale, by a declared family's name (deit_*) or not
        ("vit_base_patch16_reg4_gap_256", {}),  # register tokens, by a declared family's name
        ("vit_small_patch16_rope_224", {}),  # EVA's attention, by a ViT's name
        ("pit_ti_224", {}),  # lists with an entry a stage, and a width that is no argument
        ("vit_base_patch16_siglip_224", {}),  # one ratio for the blocks and for the pool
        ("vit_base_patch16_xp_224", {"heads": "", "mlp_dim": ""}),  # attention and MLP side by side, in one matrix
        ("twins_pcpvt_small", {"heads": ""}),  # positions stand behind the first block of a stage, which stays
    ],
)
def test_what_is_proven_equals_a_cut_by_hand(name, refused):
    row = check_timm_name(f"timm/{name}")
    assert row.built and row.right, row
    assert {what for what in ALL if row.can(what)} == ALL - set(refused)
    for what, reason in refused.items():
        assert row.refused[what] and reason in row.refused[what]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("hiera_tiny_224", "stages"), pytest.param("mvitv2_tiny", "no number of layers", marks=pytest.mark.families)],
)
def test_what_cannot_be_cut_is_refused_by_name(name, reason):
    with pytest.raises(UnsupportedModel, match=name) as caught:
        architectures.of(infer.timm_config(name))
    assert reason in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A ViT with register tokens as timm saves it, at two of its stages' usual sizes; and the model."""
    path = tmp_path_factory.mktemp("registers") / "source"
    args = dict(depth=4, embed_dim=48, num_heads=6, img_size=64, num_classes=7)
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_reg4_gap_256", **args).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_for_hf(model, path, model_args=args, safe_serialization=True)
    return path, model


def test_plain_timm_loads_what_it_can_express(folder, tmp_path):
    """Layers and MLP change by timm's own arguments: the entry point stays, and nothing of ours is needed."""
    path, model = folder
    made = shrunk(path, tmp_path / "cut", keep="0,1,3", mlp_dim="240")
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert config["architecture"] == "vit_base_patch16_reg4_gap_256"
    assert (config["model_args"]["depth"], config["model_args"]["mlp_ratio"]) == (3, 5)
    cut = timm.create_model(f"local-dir:{tmp_path / 'cut'}", pretrained=True).eval()
    assert sum(p.numel() for p in cut.parameters()) == made.parameters_after.total
    image = torch.randn(2, 3, 64, 64)
    model.blocks[2].forward, whole = (lambda x, **_: x), model.blocks[2].forward
    by_hand = model(image)
    model.blocks[2].forward = whole
    assert torch.allclose(cut(image), by_hand, atol=1e-5) and cut(image).shape == (2, 7)


def test_heads_that_do_not_fit_the_width_need_our_entry_point(folder, tmp_path):
    path, model = folder
    shrunk(path, tmp_path / "wide", heads="9", head_dim="keep")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["architecture"] == infer.TIMM_LEAN
    assert load_file(tmp_path / "wide" / "model.safetensors")["blocks.0.attn.qkv.weight"].shape == (3 * 9 * 8, 48)
    wide = timm.create_model(f"local-dir:{tmp_path / 'wide'}", pretrained=True).eval()
    image = torch.randn(2, 3, 64, 64)
    assert torch.allclose(wide(image), model(image), atol=1e-5)
    again = open_source(str(tmp_path / "wide"))
    assert again.shape.stages[0].heads == 9 and again.shape.stages[0].head_dim == 8
    with pytest.raises(UsageError, match="48 is not divisible by 9"):
        shrunk(path, tmp_path / "split", heads="9", head_dim="split")


@pytest.mark.parametrize(
    "change",
    [
        {"base": "local-dir:/somewhere"},
        {"native": {"checkpoint_path": "weights.pth"}},
        {"native": {"num_heads": "weights.pth"}},
    ],
)
def test_a_config_names_no_file_to_unpickle(change):
    stage = {"blocks": "blocks", "heads": "num_heads", "kv_heads": None, "head_dim": "lean_head_dim"}
    lean = {"base": "vit_tiny_patch16_224", "native": {"num_heads": 3}, "stages": [stage | {"numbers": {}}]} | change
    with pytest.raises(ValueError, match="numbers of heads"):
        timm_any.create("leansurgeon_any", {"lean": lean, "num_heads": 3, "lean_head_dim": 64, "checkpoint_path": ""})
