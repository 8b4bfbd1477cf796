"""Hooks go when their context ends."""

import pytest
import torch

from leansurgeon.hooks import Hooks


def test_hooks_go_when_the_work_fails():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError), Hooks() as hooks:
        hooks.before(model, lambda *_: None)
        hooks.after(model, lambda *_: None)
        model(torch.ones(1, 3))  # it takes two
    assert not model._forward_hooks and not model._forward_pre_hooks
