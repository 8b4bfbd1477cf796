"""What `leansurgeon bench` times and how it is told: seen from inside the model, by a clock, and by hand."""

from __future__ import annotations

import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.costs import bench, speed
from leansurgeon.measure.costs.memory import Setting

CPU = torch.device("cpu")


def made(name: str = "digits-vit", load: Setting | None = None) -> speed.TimedModel:
    source = open_source(str(name))
    return speed.TimedModel(source.config, source.architecture, load or Setting(3, 1, "fp32"), "auto", CPU)


def test_a_step_trains_a_clipped_batch_and_a_forward_pass_only_answers():
    one = made(load=Setting(3, 1, "bf16"))
    seen, norms = [], []

    def looks(model, args, kwargs):
        images = [*args, *kwargs.values()][0]
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        seen.append((model.training, torch.is_inference_mode_enabled(), cast, len(images)))

    def norm(optimizer, *_):
        gradients = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.cat(gradients).norm()))

    with torch.no_grad():
        one.model.get_submodule("classifier").weight.mul_(1e3)  # gradients that need clipping
    one.model.register_forward_pre_hook(looks, with_kwargs=True)
    one.optimizer.register_step_pre_hook(norm)
    one.step()
    one.forward(one.single)
    one.forward(one.large)
    cast = torch.bfloat16
    assert seen == [(True, False, cast, 3), (False, True, cast, 1), (False, True, cast, 3)]
    assert norms == pytest.approx([1.0], rel=1e-3)


def test_half_precision_keeps_less_for_the_backward_pass():
    """What a step of 8 more samples takes: half of fp32's activations are bf16's, but for norms and the softmax."""

    def per_sample(precision: str) -> float:
        small, large = speed.peaks([made("fashion-vit", Setting(batch, 1, precision)) for batch in (4, 12)])
        return (large - small) / 8

    assert 0.4 < per_sample("bf16") / per_sample("fp32") < 0.9


def test_a_sweep_keeps_what_the_config_says_of_every_layer(saved):
    source = open_source(str(saved("modernbert")[0]))
    found, _ = bench.contenders(source, [2])
    assert len(found) == 2
    for contender in found:
        assert contender.config.get("layer_types") == source.config.get("layer_types")
