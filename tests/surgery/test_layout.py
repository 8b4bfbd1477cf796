"""Hidden states whose channels are not the last axis, and blocks that pass on something besides them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cosine_similarity, mse_loss

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
    config = config_of("tnt")
    teacher = Loaded(model, family_of("tnt"), config, None, None)
    student = Loaded(stir(copy.deepcopy(model)), family_of("tnt"), config, None, None)
    pairs = taps(student), taps(teacher)
    states = {}
    for name, one in (("student", student), ("teacher", teacher)):
        for i, block in enumerate(one.model.blocks):
            block.register_forward_hook(lambda m, a, out, at=(name, i): states.update({at: out[1]}))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        student.model(x), teacher.model(x)
        for i, (a, b) in enumerate(zip(*pairs, strict=True)):
            error = state_error(a.take(), b.take(), None)
            assert len(error) == len(x)
            theirs = mse_loss(states["student", i], states["teacher", i])
            assert float(error.mean()) == pytest.approx(float(theirs), rel=1e-4)
