"""Hooks go when their context ends, and nobody adds one by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import leansurgeon
from leansurgeon.hooks import Hooks
from leansurgeon.surgery.probes import capture_input, change_output, closing_norm, inputs_of, outputs_of

PACKAGE = Path(leansurgeon.__file__).parent


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_see_and_change_what_passes():
    model, seen = nn.Linear(2, 2), []
    with Hooks() as hooks:
        hooks.before(model, lambda _, args: seen.append(args[0]) or (args[0] * 2,))
        hooks.after(model, lambda _m, _a, out: out - model.bias)
        doubled = model(torch.ones(1, 2))
    assert torch.allclose(doubled, model.weight.sum(1) * 2) and torch.equal(seen[0], torch.ones(1, 2))
    assert hooks_on(model) == 0


def test_a_gradient_is_seen_until_the_end():
    weight, seen = nn.Parameter(torch.ones(2)), []
    for _ in range(2):
        with Hooks() as hooks:
            hooks.gradient(weight, lambda p: seen.append(p.grad.clone()))
            (weight * 3).sum().backward()
        weight.sum().backward()
    assert [g.tolist() for g in seen] == [[3, 3], [7, 7]]  # the gradients add up, and every other pass is not seen


def test_hooks_go_when_the_work_fails_and_when_adding_one_fails():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    with pytest.raises(AttributeError), Hooks() as hooks:
        hooks.before(model[0], print)
        hooks.after(None, print)
    assert hooks_on(model) == 0
    wrong = torch.ones(1, 3)  # the linear map takes two
    for context in (inputs_of(model[0]), outputs_of(model[0]), change_output(model[0], torch.relu)):
        with pytest.raises(RuntimeError), context:
            model(wrong)
        assert hooks_on(model) == 0
    for look in (capture_input, closing_norm):
        with pytest.raises(RuntimeError):
            look(model, lambda: model[0](wrong))
        assert hooks_on(model) == 0
    assert torch.equal(capture_input(model[1], lambda: model(wrong[:, :2])), model[0](wrong[:, :2]))
    assert closing_norm(model, lambda: model(wrong[:, :2])) is model[1]
    assert hooks_on(model) == 0


def test_no_hook_is_added_by_hand():
    by_hand = re.compile(r"\bregister_\w*hook\w*\(")  # of modules, of tensors, and of all modules
    files = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if by_hand.search(p.read_text())}
    assert files == {"hooks.py", "training/distill.py"}  # the taps of distillation live as long as the student
