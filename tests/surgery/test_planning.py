"""A plan knows the model at every shape on the way, and nobody works one out a second time."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path

import pytest

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import open_source
from leansurgeon.surgery.costs import costs
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import models_along, plan, without_data
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out, decide


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A small model with weights."""
    folder = tmp_path_factory.mktemp("planning") / "whole"
    carry_out(DecidedCut(plan(open_source("digits-vit"), RequestedShape())), folder, check=False)
    return folder


@pytest.fixture
def computed(monkeypatch) -> Counter[tuple]:
    """How often the tensors of a model were computed, by family, shape and kept layers."""
    counts: Counter[tuple] = Counter()
    specs = Reshaped.__dict__["specs"].func

    def counted(model: Reshaped) -> tuple[TensorSpec, ...]:
        counts[model.architecture.name, model.shape, model.kept] += 1
        return specs(model)

    replaced = cached_property(counted)
    replaced.__set_name__(Reshaped, "specs")
    monkeypatch.setattr(Reshaped, "specs", replaced)
    return counts


def test_a_shrink_computes_the_tensors_of_each_shape_once(computed, whole, tmp_path):
    source = open_source(str(whole))
    computed.clear()
    layers = source.shape.depth - 2
    steps = plan(source, RequestedShape(heads="8", layers=str(layers)))
    record = carry_out(decide(steps), tmp_path / "cut", check=False)
    assert record.plan.after.stages[0].depth == layers
    # As it is, with fewer layers, and with more heads; the MLP stays, so the fourth is the third.
    assert set(computed.values()) == {1} and len(computed) == 3, computed


def test_costs_compute_the_tensors_of_each_shape_once(computed):
    source = open_source("vit-b")
    computed.clear()
    priced = costs(source, RequestedShape(heads="16", layers="7"))
    assert set(computed.values()) == {1} and len(computed) == 3, computed
    planned = plan(source, RequestedShape(heads="16", layers="7"))
    assert (priced.before.parameters, priced.after.parameters) == (planned.parameters_before, planned.parameters_after)
    assert priced.saved["parameters"] == planned.saved_by


def test_a_step_that_changes_nothing_gives_the_same_model():
    steps = plan(open_source("digits-vit"), RequestedShape(layers="2"))
    before, shorter, with_heads, result = models_along(steps.target)
    assert shorter is with_heads is result is steps.target and before is not result
    assert result.at(result.shape) is result


@pytest.mark.parametrize("method", [Method(), Method(layers="first"), Method(keep="0,2"), Method(heal="none")])
def test_a_plan_without_data_is_the_plan_that_never_had_any(method, whole):
    source = open_source(str(whole))
    wanted = RequestedShape(layers="2", mlp_ratio="1")
    with_data = plan(source, wanted, 3, method, calibrated=True)
    assert (with_data.calibrated and "heal" in [o.name for o in with_data.operators]) or method.heal == "none"
    assert without_data(with_data) == plan(source, wanted, 3, method) != with_data
    assert without_data(with_data).target is with_data.target
