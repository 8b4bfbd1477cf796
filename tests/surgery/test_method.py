"""Flags to a method, and what a plan makes of it; the split of heads against the library's own forward pass."""

from __future__ import annotations

import json
import re

import pytest
import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan, without_data
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import carry_out, decide
from tests.conftest import KEEP, example
from tests.surgery.cuts import cut, cut_with_data, logits


@pytest.mark.parametrize(
    ("text", "says"), [("4-2", "backwards"), ("0,0", "every layer once"), ("a", "such as"), ("3,1", "ascending")]
)
def test_a_list_of_layers_that_makes_no_sense_is_refused(text, says):
    assert Method(keep="0,2,4-6").kept == (0, 2, 4, 5, 6) and Method().kept is None
    with pytest.raises(UsageError, match=says):
        _ = Method(keep=text).kept


@pytest.mark.parametrize(
    ("method", "calibrated", "says"),
    [
        (Method(layers="influense"), False, r"'influence'"),
        (Method(layers="angular"), False, "needs sample data"),
        (Method(keep="0,1", layers="even"), False, "give one"),
        (Method(uncalibrated=True), True, "exclude each other"),
        (Method(more="grow"), False, r"\badd or split\b"),
    ],
)
def test_what_cannot_be_is_refused_before_a_source_is_opened(method, calibrated, says):
    with pytest.raises(UsageError, match=says):
        method.check(calibrated)


def test_the_listed_layers_are_kept_and_counted(saved, tmp_path):
    folder, model = saved("bert")
    steps, _ = cut(folder, tmp_path / "cut", Method(keep="1"))
    assert steps.layers == (1,) and steps.after.depth == 1
    kept, old = load(tmp_path / "cut").model.bert.encoder.layer[0], model.bert.encoder.layer[1]
    assert torch.equal(kept.output.dense.weight, old.output.dense.weight)


@pytest.mark.parametrize("family", KEEP)
def test_split_heads_do_not_change_the_function(family, saved, tmp_path):
    folder, model = saved(family)
    try:
        steps, _ = cut(folder, tmp_path / "wide", Method(more="split"), heads="2x", head_dim="keep")
    except LeanSurgeonError as error:  # channel attention, talking heads: a head does not stand alone there
        assert re.search(r"--more-heads add\b", str(error))
        return
    assert [o.name for o in steps.operators] == ["split-heads"] and steps.exactness == "exact"
    inputs = example(model)
    before, after = logits(model, inputs), logits(load(tmp_path / "wide").model, inputs)
    assert (before - after).abs().max() < 1e-5 * before.std()


def test_a_split_by_the_weights_alone_is_asked_for_and_keeps_every_other_tensor(saved, tmp_path):
    folder, model = saved("bert")
    source, wanted = open_source(str(folder)), RequestedShape(heads="2x", head_dim="split")
    with pytest.raises(UsageError, match="without sample data"):
        plan(source, wanted)
    steps = plan(source, wanted, 0, Method(uncalibrated=True))
    assert [o.name for o in steps.operators] == ["split-heads"] and steps.exactness == "near"
    carry_out(decide(steps), tmp_path / "out", check=False)
    old, new = model.state_dict(), load(tmp_path / "out").model.state_dict()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed and all(".query." in name or ".key." in name for name in changed)


def test_grown_heads_are_exact(saved, tmp_path):
    """head_dim grows, too: scores are rescaled for the library's 1/sqrt(head_dim)."""
    folder, model = saved("vit")
    size = open_source(str(folder)).shape.stages[0].head_dim
    steps, _ = cut(folder, tmp_path / "big", heads="2x", head_dim=str(2 * size))
    assert steps.exactness == "exact"
    inputs = example(model)
    before, after = logits(model, inputs), logits(load(tmp_path / "big").model, inputs)
    assert (before - after).abs().max() < 1e-5 * before.std()


def test_plans_are_values():
    """Equal wishes give equal plans, whose JSON says what they cost."""
    source = open_source("digits-vit")
    first, again, other = (plan(source, RequestedShape(heads="8", layers=n)) for n in ("3", "3", "4"))
    assert first == again and first != other
    said, of_other = (json.loads(json.dumps(steps.as_dict())) for steps in (first, other))
    assert said["layers"] == [0, 2, 5]
    assert said["parameters_after"]["total"] < of_other["parameters_after"]["total"]
    assert said["flops_after"]["total"] == first.flops_before.total - sum(first.flops_saved_by.values())


@pytest.mark.parametrize("method", [Method(), Method(layers="first"), Method(keep="0,2"), Method(heal="none")])
def test_a_plan_without_data_is_the_plan_that_never_had_any(method, saved):
    source = open_source(str(saved("vit")[0]))
    wanted = RequestedShape(layers="2", mlp_ratio="1")
    with_data = plan(source, wanted, 3, method, calibrated=True)
    assert (with_data.calibrated and "heal" in [o.name for o in with_data.operators]) or method.heal == "none"
    assert without_data(with_data) == plan(source, wanted, 3, method) != with_data


@pytest.mark.parametrize(("heal", "refitted"), [("closed", True), ("none", False)])
def test_only_healing_changes_the_output_columns_of_split_heads(heal, refitted, trained, tmp_path):
    folder, data = trained("bert")
    out, _ = cut_with_data(tmp_path, (folder, data), {"heads": "2x", "head_dim": "split"}, heal=heal)
    old, new = (load(place).model.state_dict() for place in (folder, out))
    columns = [torch.equal(old[name], new[name]) for name in new if "output.dense" in name]
    assert all(columns) is not refitted
