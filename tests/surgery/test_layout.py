"""Hidden states whose channels are not the last axis, and blocks that pass on something besides them."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.training.distill import state_error, taps
from tests.surgery.cuts import cut_with_data
from tests.surgery.test_timm_families import build, config_of, family_of, save_small, stir


@torch.no_grad()
def test_influence_is_measured_over_the_channels_of_every_place(tmp_path):
    """DaViT's blocks give (batch, channels, height, width)."""
    folder, model = save_small("davit", tmp_path / "source")
    images = torch.randn(3, 2, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    data = Calibration("noise", "noise", "-", *([{"pixel_values": part}] for part in images))
    wanted = []

    def note(_, given, made):
        wanted.append(1 - float(cosine_similarity(given[0].double(), made.double(), dim=1).mean()))

    for stage in model.stages:
        for block in stage.blocks:
            block.register_forward_hook(note)
    model(data.guard[0]["pixel_values"])
    less = {"layers": "1,1,2,1"}
    _, outcome = cut_with_data(tmp_path, (folder, data), less, layers="influence", heal="none")
    assert outcome.record.evidence["influence"] == pytest.approx(wanted, rel=1e-3)


def test_a_student_learns_the_state_of_its_patches_not_of_their_pixels():
    """TNT's blocks give both."""
    model = stir(build("tnt"))
    patches = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, a, out: patches.append(out[1]))
    tapped = taps(Loaded(model, family_of("tnt"), config_of("tnt"), None, None))
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32))
    for tap, wanted in zip(tapped, patches, strict=True):
        taken = tap.take()
        assert torch.equal(taken, wanted)
        assert state_error(taken, wanted + 2, None).tolist() == pytest.approx([4.0, 4.0], rel=1e-3)
