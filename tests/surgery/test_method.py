"""Flags to a method, and what a plan makes of it; the split of heads against the library's own forward pass."""

from __future__ import annotations

import json
import re

import pytest
import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.shape import one_of_each
from leansurgeon.surgery.method import Method, parse_layers
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out, decide
from tests.conftest import KEEP, example, output


def test_a_list_of_layers_is_read_as_people_write_it():
    assert parse_layers("0,2,4-6") == (0, 2, 4, 5, 6)
    assert parse_layers(None) is None


@pytest.mark.parametrize(
    ("text", "says"), [("4-2", "backwards"), ("0,0", "every layer once"), ("a", "such as"), ("3,1", "ascending")]
)
def test_a_list_of_layers_that_makes_no_sense_is_refused(text, says):
    with pytest.raises(UsageError, match=says):
        parse_layers(text)


def test_last_of_each_group_is_the_mirror_of_the_first():
    assert one_of_each(6, 3) == (0, 2, 4)
    assert one_of_each(6, 3, last=True) == (1, 3, 5)
    assert one_of_each(12, 10, last=True)[-1] == 11


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
    source = open_source(str(folder))
    steps = plan(source, RequestedShape(), 0, Method(keep="1"))
    assert steps.layers == (1,) and steps.after.depth == 1
    carry_out(DecidedCut(steps), tmp_path / "cut", check=False)
    kept = load(tmp_path / "cut").model
    assert torch.equal(kept.bert.encoder.layer[0].output.dense.weight, model.bert.encoder.layer[1].output.dense.weight)
    with pytest.raises(UsageError, match=r"--keep 0,9\b.*\b0 to [35]\b"):
        plan(source, RequestedShape(), 0, Method(keep="0,9"))
    with pytest.raises(UsageError, match="not 2"):
        plan(source, RequestedShape(layers="2"), 0, Method(keep="1"))


@pytest.mark.parametrize("family", KEEP)
def test_split_heads_do_not_change_the_function(family, saved, tmp_path):
    folder, model = saved(family)
    source = open_source(str(folder))
    wanted, method = RequestedShape(heads="2x", head_dim="keep"), Method(more="split")
    try:
        steps = plan(source, wanted, 3, method)
    except LeanSurgeonError as error:  # channel attention, talking heads: a head does not stand alone there
        assert re.search(r"--more-heads add\b", str(error))
        return
    assert [o.name for o in steps.operators] == ["split-heads"] and steps.exactness == "exact"
    carry_out(DecidedCut(steps), tmp_path / "wide", check=False)
    wide, inputs = load(tmp_path / "wide").model.eval(), example(model)
    with torch.no_grad():
        before, after = output(model, inputs), output(wide, inputs)
    assert (before - after).abs().max() < 1e-5 * before.std()
    # Children differ where they give their output, so they learn different things from the first step.
    loss = output(wide.train(), inputs).pow(2).sum()
    loss.backward()
    assert all(p.grad is not None for n, p in wide.named_parameters() if n.endswith("o_proj.weight"))


def test_a_split_that_needs_data_says_so(saved):
    source = open_source(str(saved("bert")[0]))
    with pytest.raises(UsageError, match="without sample data"):
        plan(source, RequestedShape(heads="2x", head_dim="split"))
    steps = plan(source, RequestedShape(heads="2x", head_dim="split"), 0, Method(uncalibrated=True))
    assert [o.name for o in steps.operators] == ["split-heads"] and steps.exactness == "near"


def test_a_split_by_the_weights_alone_keeps_every_other_tensor(saved, tmp_path):
    folder, model = saved("bert")
    source = open_source(str(folder))
    method = Method(uncalibrated=True)
    carry_out(
        decide(plan(source, RequestedShape(heads="2x", head_dim="split"), 0, method)), tmp_path / "s", check=False
    )
    old, new = model.state_dict(), load(tmp_path / "s").model.state_dict()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed and all(".query." in name or ".key." in name for name in changed)


def test_grown_heads_are_exact(saved, tmp_path):
    """head_dim grows, too: scores are rescaled for the library's 1/sqrt(head_dim)."""
    folder, model = saved("vit")
    source = open_source(str(folder))
    now = source.shape.stages[0]
    wanted = RequestedShape(heads="2x", head_dim=str(now.head_dim * 2))
    decided = decide(plan(source, wanted, 0))
    assert decided.plan.exactness == "exact"
    carry_out(decided, tmp_path / "big", check=False)
    inputs = example(model)
    with torch.no_grad():
        before, after = output(model, inputs), output(load(tmp_path / "big").model.eval(), inputs)
    assert (before - after).abs().max() < 1e-5 * before.std()


def test_plans_are_values():
    """Equal wishes give equal plans, whose JSON says what they cost."""
    source = open_source("digits-vit")
    first, again, other = (plan(source, RequestedShape(heads="8", layers=n)) for n in ("3", "3", "4"))
    assert first == again and first != other
    said = json.loads(json.dumps(first.as_dict()))
    assert said == json.loads(json.dumps(again.as_dict()))
    assert said["layers"] == [0, 2, 5]
    assert said["parameters_after"]["total"] < json.loads(json.dumps(other.as_dict()))["parameters_after"]["total"]
    assert said["flops_after"]["total"] == first.flops_before.total - sum(first.flops_saved_by.values())


def test_no_heal_leaves_the_output_columns_of_split_heads_alone(saved, tmp_path):
    folder, model = saved("bert")
    source = open_source(str(folder))
    draws = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 40, (4, 12), generator=draws) for _ in range(3)]
    batches = [[{"input_ids": x, "attention_mask": torch.ones_like(x)}] for x in ids]
    data = Calibration("noise", "noise", "-", *batches)
    columns = {}
    for heal in ("closed", "none"):
        steps = plan(source, RequestedShape(heads="2x", head_dim="split"), 0, Method(heal=heal), calibrated=True)
        decided = decide(steps, data)
        carry_out(decided, tmp_path / heal, check=False)
        new = load(tmp_path / heal).model.state_dict()
        columns[heal] = [torch.equal(model.state_dict()[name], new[name]) for name in new if "output.dense" in name]
    assert all(columns["none"]) and not all(columns["closed"])
