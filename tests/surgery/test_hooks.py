"""Hooks go when their context ends, and nobody adds one by hand."""

import pytest
import torch
from torch import nn

from leansurgeon.hooks import Hooks
from leansurgeon.surgery.probes import capture_input, change_output, closing_norm, inputs_of, outputs_of


def test_hooks_go_when_the_work_fails_and_when_adding_one_fails():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    with pytest.raises(AttributeError), Hooks() as hooks:
        hooks.before(model[0], print)
        hooks.after(None, print)

    def fail():
        return model[0](torch.ones(1, 3))  # the linear map takes two

    for context in (inputs_of(model[0]), outputs_of(model[0]), change_output(model[0], torch.relu)):
        with pytest.raises(RuntimeError), context:
            fail()
    for look in (capture_input, closing_norm):
        with pytest.raises(RuntimeError):
            look(model, fail)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
