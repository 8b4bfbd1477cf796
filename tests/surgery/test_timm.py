"""Surgery on timm checkpoints, reloaded by `timm.create_model("local-dir:...")` as timm documents it."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.utils import accuracy

import leansurgeon.models.timm_vit  # noqa: F401  as the model card says
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel
from tests.surgery.cuts import cut
from tests.surgery.test_timm_families import save_small


def validated(folder, images) -> tuple[float, torch.Tensor]:
    """Top-1 in percent and logits the way timm's validate.py has them: its data config, its data set, its loader."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = resolve_data_config({}, model=model)
    assert config["input_size"] == (3, 32, 32)
    data = create_dataset("", root=str(images))
    loader = create_loader(
        data, config["input_size"], 4, use_prefetcher=False, num_workers=0, mean=config["mean"], std=config["std"],
        interpolation=config["interpolation"], crop_pct=config["crop_pct"], device=torch.device("cpu"),
    )  # fmt: skip
    with torch.no_grad():
        found = [(model(x), y) for x, y in loader]
    logits, labels = (torch.cat(part) for part in zip(*found, strict=True))
    return float(accuracy(logits, labels)[0]), logits


def test_timms_own_validation_takes_a_cut_model(tmp_path):
    """An exact cut says there what the source says, a model with fewer layers something else."""
    folder, _ = save_small("vit", tmp_path / "source")
    draws = np.random.default_rng(0)
    for i in range(10):
        place = tmp_path / "images" / f"class-{i % 5}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(place / f"{i}.png")
    cut(folder, tmp_path / "wide", heads="8", head_dim="keep")
    steps, _ = cut(folder, tmp_path / "lean", heads="8", layers="2", mlp_ratio=1.0, init="fresh-attention")
    assert steps.policy == "split" and "timm" in steps.why
    assert json.loads((tmp_path / "lean/config.json").read_text())["architecture"] == "vit_tiny_patch16_224"
    source, wide, lean = (validated(f, tmp_path / "images") for f in (folder, tmp_path / "wide", tmp_path / "lean"))
    assert wide[0] == source[0]
    assert torch.allclose(wide[1], source[1], atol=1e-5)
    assert not torch.allclose(lean[1], source[1], atol=1e-2)


def test_a_timm_name_offline_says_so_and_still_gives_its_architecture():
    with pytest.raises(UnsupportedModel, match="--init fresh"):
        open_source("timm/vit_tiny_patch16_224")
    source = open_source("timm/vit_tiny_patch16_224", weights=False)
    assert source.parameters.total == 5_717_416  # timm's own count of vit_tiny_patch16_224
    with pytest.raises(UnsupportedModel, match="did you mean"):
        open_source("timm/vit_tinny_patch16_224")
