"""Layers that would lose something at their new place: they are named, and so is a choice that keeps everything."""

from types import SimpleNamespace

import pytest
from transformers import ModernBertConfig, ModernBertForMaskedLM

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.drop_layers import explain_tied_start, without_data
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.conftest import FAMILIES

STAGES = Shape((Stage(4, 4, 8, 4, 48, 32), Stage(6, 4, 8, 4, 48, 32)))


@pytest.mark.parametrize(
    ("kept", "gone"), [((0, 4, 5, 9), None), ((0, 4, 6), 5), ((1, 2, 4, 5), 0), ((0, 5), 4), ((0, 1, 2, 3, 4, 5), None)]
)
def test_the_first_layers_of_a_stage_stay_where_others_speak_to_them(kept, gone):
    source = SimpleNamespace(shape=STAGES, architecture=SimpleNamespace(stay=(1, 2), stay_last=(), name="model"))
    said = explain_tied_start(source, kept)
    assert said is None if gone is None else said.startswith(f"Layer {gone} ")


def test_layers_that_alternate_are_named_in_whole_groups():
    after = Shape((Stage(2, 4, 8, 4, 48, 32), Stage(4, 4, 8, 4, 48, 32)))
    named = without_data(STAGES, after, Method(keep="0-1,4-7"), period=2)
    assert named.kept == (0, 1, 4, 5, 6, 7)
    for keep in ("0-1,4-6", "0,4-5", "1-2,4-5"):
        with pytest.raises(UsageError):
            without_data(STAGES, STAGES, Method(keep=keep), period=2)


def test_a_layer_that_becomes_the_first(tmp_path):
    """ModernBERT's first layer has no norm before its attention."""
    _, _, numbers = FAMILIES["modernbert"]
    ModernBertForMaskedLM(ModernBertConfig(**numbers)).save_pretrained(tmp_path)
    opened = open_source(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        plan(opened, RequestedShape(), method=Method(keep="1,3"))
    assert "layers.1.attn_norm." in caught.value.message
    keep = caught.value.hint.rpartition("--keep ")[2].rstrip(".")
    assert plan(opened, RequestedShape(), method=Method(keep=keep)).layers == (0, 3)
    assert (
        plan(opened, RequestedShape(init="fresh"), method=Method(keep="1,3")).after.depth == 2
    )  # nothing is lost then
