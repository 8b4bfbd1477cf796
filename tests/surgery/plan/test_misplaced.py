"""Layers that would lose something at their new place: they are named, and so is a choice that keeps everything."""

import pytest
from transformers import ModernBertConfig, ModernBertForMaskedLM

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from tests.conftest import FAMILIES


def test_a_layer_that_becomes_the_first(tmp_path):
    """ModernBERT's first layer has no norm before its attention."""
    _, _, numbers = FAMILIES["modernbert"]
    ModernBertForMaskedLM(ModernBertConfig(**numbers)).save_pretrained(tmp_path)
    opened = open_source(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        plan(opened, Wanted(), method=Method(keep="1,3"))
    assert "layers.1.attn_norm." in caught.value.message
    keep = caught.value.hint.rpartition("--keep ")[2].rstrip(".")
    assert plan(opened, Wanted(), method=Method(keep=keep)).layers == (0, 3)
    assert plan(opened, Wanted(init="fresh"), method=Method(keep="1,3")).after.depth == 2  # nothing is lost then
