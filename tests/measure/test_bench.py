"""What `leansurgeon bench` times and how it is told: seen from inside the model, by a clock, and by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.costs import bench, speed
from leansurgeon.measure.costs.memory import Setting
from leansurgeon.measure.costs.speed import Timing

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


def test_the_models_own_number_of_heads_takes_part_once():
    assert len(bench.contenders(open_source("digits-vit"), [4, 4])[0]) == 1


STEPS = {"first": [1.0, 2.0, 8.0], "second": [3.0, 1.0, 4.0]}  # in every round by the first one: 3, 0.5, 0.5


@pytest.fixture
def rows(monkeypatch) -> list[bench.BenchRow]:
    """Two models whose steps, single and large forward passes all take other times: `STEPS`, x 0.01 and x 0.1."""
    source = open_source("digits-vit")
    (own,), _ = bench.contenders(source, [])
    model = SimpleNamespace(model=torch.nn.Linear(3, 1), large={"input_ids": None})
    scales = {"step": [1, 1], "forward_1": [0.01, 0.02], "forward": [0.1, 0.4]}
    times = [
        {name: Timing.of([scale[i] * s for s in steps]) for name, scale in scales.items()}
        for i, steps in enumerate(STEPS.values())
    ]
    monkeypatch.setattr(speed, "TimedModel", lambda *_: model)
    monkeypatch.setattr(speed, "runs", lambda _: None)
    monkeypatch.setattr(speed, "time_benches", lambda *_: times)
    monkeypatch.setattr(speed, "peaks", lambda *_: [3 * 2**20, 5 * 2**20])
    return bench.time_contenders([own, own], Setting(8, 16, "fp32"), [], 3, "cpu", lambda _: None)[0]


def test_ratios_are_taken_round_by_round_and_rates_of_what_they_name(rows):
    found = [row.as_dict() for row in rows]
    assert found[1]["step_against_first"]["median"] == 0.5  # of the medians it would be 1.5
    assert [row["training_per_second"] for row in found] == [128 / 2, 128 / 3]
    assert [row["forward_per_second"] for row in found] == pytest.approx([128 / 0.2, 128 / 1.2])


def test_a_sweep_keeps_what_the_config_says_of_every_layer(saved):
    source = open_source(str(saved("modernbert")[0]))
    found, _ = bench.contenders(source, [2])
    assert len(found) == 2
    for contender in found:
        assert contender.config.get("layer_types") == source.config.get("layer_types")
