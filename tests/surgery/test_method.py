"""Flags to a method, and what a plan makes of it; the split of heads against the library's own forward pass."""

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


@pytest.mark.parametrize("family", KEEP)
def test_split_heads_do_not_change_the_function(family, saved, tmp_path):
    folder, model = saved(family)
    fits = family not in ("llama", "gemma3_text")  # libraries that refuse 12 heads; three share columns unevenly
    try:
        steps, _ = cut(folder, tmp_path / "wide", Method(more="split"), heads="3x" if fits else "2x", head_dim="keep")
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
