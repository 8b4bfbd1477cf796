"""Models of several stages, cut with data at every one of them: whole groups of layers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import leansurgeon
from leansurgeon.checkpoints.source import open_source
from leansurgeon.shape import Groups, Shape, Stage, evenly_per_stage, groups_of
from leansurgeon.surgery import choose_layers
from tests.surgery.test_timm_families import build, save_folder, stir

DEEPER = {"swin": {"depths": [2, 2, 6, 2]}}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder, draws = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(24):
        kind = folder / f"kind{i % 3}"
        kind.mkdir(exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(kind / f"{i}.png")
    return folder


def saved(key, folder):
    model = stir(build(key, **DEEPER.get(key, {})))
    save_folder(key, folder, model)
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] |= DEEPER.get(key, {})
    (folder / "config.json").write_text(json.dumps(config))
    return model


def cut(folder, images, **wanted):
    out = folder.parent / "out"
    return leansurgeon.shrink(str(folder), data=str(images), samples=8, proof=False, out=out, progress=False, **wanted)


@pytest.mark.parametrize(
    ("key", "layers", "method"),
    [
        ("swin", "2,2,5,2", "auto"),
        ("swin", "1,2,3,1", "influence"),
        ("davit", "1,1,2,1", "auto"),
        ("volo", "1,2,3,1", "angular"),
        ("xcit", "3", "auto"),
    ],
)
def test_every_stage_is_cut_with_data(key, layers, method, images, tmp_path):
    model, source = saved(key, tmp_path / "source"), tmp_path / "source"
    made = cut(source, images, layers=layers, method=method)
    before, kept = open_source(str(source)).shape, made.record.decided.layers
    wanted = [int(word) for word in layers.split(",")]
    for span, count in zip(before.spans, wanted, strict=True):
        here = [i - span.start for i in kept if i in span]
        assert len(here) == count
        if key == "swin":  # plain windows and shifted ones take turns, pair by pair
            assert all(i % 2 == j % 2 for j, i in enumerate(here))
            assert all(b == a + 1 for a, b in zip(here[::2], here[1::2], strict=False))
    lean = timm.create_model(f"local-dir:{made.folder}", pretrained=True).eval()
    with torch.no_grad():
        assert lean(torch.randn(2, 3, 32, 32)).isfinite().all()
    counters = {n: t for n, t in load_file(made.folder / "model.safetensors").items() if n.endswith("batches_tracked")}
    assert all(t.shape == () and t.dtype == torch.int64 for t in counters.values())
    assert bool(counters) == (key in ("xcit", "volo"))
    assert sum(p.numel() for p in lean.parameters()) < sum(p.numel() for p in model.parameters())


def test_heads_of_windows_that_the_library_pads_are_trimmed(images, tmp_path):
    saved("davit", tmp_path / "source")
    made = cut(tmp_path / "source", images, heads="1,2,2,2", head_dim="keep")
    assert [stage.heads for stage in made.record.plan.after.stages] == [1, 2, 2, 2]


@pytest.mark.parametrize("period", [1, 2, 3])
def test_whatever_chooses_keeps_whole_groups_in_their_places(period):
    """Every depth up to 8 and every smaller one, by every rule: layers of a result are of the kinds of its places."""
    for depth in range(1, 9):
        for keep in range(1, depth + 1):
            stage = Stage(depth, 4, 8, 4, 64, 32)
            before, after = Shape((stage,)), Shape((stage,)).with_(depth=keep)
            groups = groups_of(before, after, period)
            angle = {(i, n): (i * 7 % 5) / 9 for n in range(1, depth + 1) for i in range(depth - n + 1)}
            evidence = choose_layers.Evidence([(i * 5 % 7) / 9 for i in range(depth)], angle, groups)
            sets = [evenly_per_stage(before, after, period, name) for name in ("even", "first-of-each")]
            sets += [choose_layers.by_influence(evidence), choose_layers.by_angle(evidence)]
            sets += [choose_layers.by_angle(evidence, rank=1), choose_layers.by_angle(evidence, blocks=2)]
            sets += choose_layers.blocks(evidence).values()
            for kept in filter(None, sets):
                assert len(kept) == keep and [i % period for i in kept] == [j % period for j in range(keep)], (
                    depth,
                    kept,
                )
                assert Groups(range(depth), keep, period).holds(kept)
    assert not Groups(range(6), 3, 2).holds((0, 3, 4)) and not Groups(range(6), 3, 2).holds((1, 2, 3))
