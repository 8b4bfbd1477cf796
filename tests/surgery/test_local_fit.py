"""Fitting one block: it lowers the error on samples that it has not seen, or leaves every bit as it was."""

import pytest
import torch
from torch import Tensor, nn

from leansurgeon.surgery import local_fit
from leansurgeon.surgery.local_fit import Example, fit_examples, relative_error


def block(norm_first: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, norm_first=norm_first, batch_first=True).eval()


@torch.no_grad()
def examples(teacher: nn.Module, count: int, seed: int) -> list[Example]:
    """Padding has absurd targets."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(8, 6, dtype=torch.bool)
    mask[0, 4:] = False
    found = []
    for _ in range(count):
        x = torch.randn(8, 6, 16, generator=generator)
        y = teacher(x, src_key_padding_mask=~mask)
        found.append(Example(x, y.masked_fill(~mask[..., None], 1e6), mask, {"mask": mask}))
    return found


def forward_of(module: nn.Module):
    def forward(hidden: Tensor, mask: Tensor) -> Tensor:
        return module(hidden, src_key_padding_mask=~mask)

    return forward


@torch.no_grad()
def disturbed(teacher: nn.Module, norm_first: bool) -> nn.Module:
    student = block(norm_first, 1)
    student.load_state_dict(teacher.state_dict())
    generator = torch.Generator().manual_seed(2)
    for p in student.parameters():
        p += 0.1 * torch.randn(p.shape, generator=generator)
    return student


@pytest.mark.parametrize(
    ("sign", "rate"), [(-1, 1e-3), (1, 1e3), (float("nan"), 1e-3)], ids=["guard disagrees", "explodes", "not finite"]
)
def test_a_fit_that_does_not_help_leaves_no_trace(sign: float, rate: float):
    teacher = block(True, 0)
    guard = examples(teacher, 2, 2)
    fit = [Example(e.hidden, sign * e.target, e.mask, e.arguments) for e in examples(teacher, 4, 1)]
    student = block(True, 0) if sign == -1 else disturbed(teacher, True)
    student.requires_grad_(False)
    saved = {name: value.clone() for name, value in student.state_dict().items()}
    done = fit_examples(forward_of(student), list(student.parameters()), fit, guard, steps=10, rate=rate)
    assert not done.kept and not done.guard_after < done.guard_before
    assert all(torch.equal(saved[name], value) for name, value in student.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in student.parameters())


def test_the_error_is_per_token():
    """One huge token counts as much as any other: against the formula written out."""
    target = torch.tensor([[[1000.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
    output = torch.tensor([[[900.0, 0.0], [1.0, 1.0], [0.0, 2.0]]])
    found = relative_error(lambda x: output, [Example(target, target, torch.tensor([[True, False, True]]))])
    assert found == pytest.approx(((0.1**2 + 0.0) / 2) ** 0.5, rel=1e-3)


def test_a_clock_is_divided_and_the_rate_rises_and_falls(monkeypatch):
    monkeypatch.setattr(local_fit, "perf_counter", lambda: 105.0)
    clock = local_fit.TimeLimit(seconds=20.0, start=100.0)
    assert (clock.gone, clock.part(0.5).seconds) == (0.25, 7.5)
    rates = [local_fit.pace(step, 100) for step in range(100)]
    assert rates[0] == 0.1 and rates[10] == 1.0 and rates[99] == pytest.approx(1 / 90)
