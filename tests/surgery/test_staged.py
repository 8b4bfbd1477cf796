"""Models of several stages, cut with data at every one of them: whole groups of layers."""

import numpy as np
import pytest
import torch
from PIL import Image

import leansurgeon
from leansurgeon.checkpoints.source import open_source
from leansurgeon.shape import SPACINGS, Shape, Stage, evenly_per_stage, groups_of
from leansurgeon.surgery import choose_layers
from tests.surgery.test_timm_families import count as count_of
from tests.surgery.test_timm_families import output, reload, save_small

DEEPER = {"swin": {"depths": [2, 2, 6, 2]}}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder, draws = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(12):
        kind = folder / f"kind{i % 3}"
        kind.mkdir(exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(kind / f"{i}.png")
    return folder


@pytest.mark.parametrize(
    ("key", "layers", "method", "heads"),
    [
        ("swin", "2,2,5,2", "auto", None),
        ("davit", "1,1,2,1", "auto", "1,2,2,2"),  # in windows that the library pads
        ("volo", "1,2,3,1", "angular", None),
    ],
)
def test_every_stage_is_cut_with_data(key, layers, method, heads, images, tmp_path):
    source, model = save_small(key, tmp_path / "source", **DEEPER.get(key, {}))
    made = leansurgeon.shrink(
        str(source), layers=layers, method=method, heads=heads, head_dim="keep", data=str(images), samples=4,
        proof=False, out=tmp_path / "out", progress=False,
    )  # fmt: skip
    kept = made.record.decided.layers
    for span, count in zip(open_source(str(source)).shape.spans, layers.split(","), strict=True):
        here = [i - span.start for i in kept if i in span]
        assert len(here) == int(count)
        if key == "swin":  # plain windows and shifted ones take turns, pair by pair
            assert all(i % 2 == j % 2 for j, i in enumerate(here))
            assert all(b == a + 1 for a, b in zip(here[::2], here[1::2], strict=False))
    lean = reload(made.folder)
    assert output(lean).isfinite().all() and count_of(lean) < count_of(model)
    counters = [value for name, value in lean.state_dict().items() if name.endswith("batches_tracked")]
    assert all(value.shape == () and value.dtype == torch.int64 for value in counters)
    assert bool(counters) == (key == "volo")


@pytest.mark.parametrize("keep", range(1, 9))
def test_whatever_chooses_keeps_whole_groups_in_their_places(keep):
    """Layers of a result are of the kinds of its places: here two take turns."""
    before = Shape((Stage(8, 4, 8, 4, 64, 32),))
    after = before.with_(depth=keep)
    angle = {(i, n): (i * 7 % 5) / 9 for n in range(1, 9) for i in range(9 - n)}
    evidence = choose_layers.Evidence([(i * 5 % 7) / 9 for i in range(8)], angle, groups_of(before, after, 2))
    sets = [evenly_per_stage(before, after, 2, name) for name in SPACINGS]
    sets += [choose_layers.by_influence(evidence), choose_layers.by_angle(evidence)]
    sets += [choose_layers.by_angle(evidence, blocks=2), *choose_layers.blocks(evidence).values()]
    for kept in filter(None, sets):
        assert len(set(kept)) == keep and [i % 2 for i in kept] == [j % 2 for j in range(keep)], kept
