"""Distillation: the loss and its gradient against torch, and the layer map."""

from __future__ import annotations

import pytest
import torch

from leansurgeon.training import distill


@pytest.mark.parametrize("at_once", [7, 2**19])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_divergence_and_its_gradient_are_torchs_own(at_once, kind, monkeypatch):
    """A few rows at a time or all of them; 2 x 5 places of 11 classes, of which some do not count."""
    monkeypatch.setattr(distill, "_AT_ONCE", (at_once, at_once))
    draw = torch.Generator().manual_seed(0)
    student, teacher = (4 * torch.randn(2, 5, 11, generator=draw) for _ in range(2))
    student, teacher = student.to(kind).requires_grad_(), teacher.to(kind)
    counted = torch.rand(2, 5, generator=draw) < 0.7
    made = distill.divergence(student, teacher, counted, 1.7)
    (gradient,) = torch.autograd.grad(3 * made, student)
    logs = [torch.log_softmax(logits.double() / 1.7, -1) for logits in (student, teacher)]
    wanted = 1.7**2 * (logs[1].exp() * (logs[1] - logs[0])).sum(-1)[counted].sum()
    (theirs,) = torch.autograd.grad(3 * wanted, student)
    assert made.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(gradient, theirs, rtol=1e-2 if kind == torch.bfloat16 else 1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kept", "depths", "wanted"),
    [([0, 3], [6], [2, 5]), ([0, 1, 2], [3], [0, 1, 2]), ([1, 2], [6], [1, 5]), ([0, 2, 4], [4, 2], [1, 3, 5])],
)
def test_a_layer_stands_for_those_dropped_behind_it(kept, depths, wanted):
    assert distill.last_of(kept, depths) == wanted
