"""Fitting one block: it lowers the error on samples that it has not seen, or leaves every bit as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leansurgeon.surgery import local_fit
from leansurgeon.surgery.local_fit import Example, fit_examples, relative_error


def block(norm_first: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, norm_first=norm_first, batch_first=True).eval()


def examples(teacher: nn.Module, count: int, seed: int) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(8, 6, 16, generator=generator)
        mask = torch.ones(8, 6, dtype=torch.bool)
        mask[0, 4:] = False
        with torch.no_grad():
            y = teacher(x, src_key_padding_mask=~mask)
        found.append(Example(x, y.masked_fill(~mask[..., None], 1e6), mask, {"mask": mask}))
    return found


def forward_of(module: nn.Module):
    def forward(hidden: Tensor, mask: Tensor) -> Tensor:
        return module(hidden, src_key_padding_mask=~mask)

    return forward


def disturbed(teacher: nn.Module, norm_first: bool) -> nn.Module:
    student = block(norm_first, 1)
    student.load_state_dict(teacher.state_dict())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in student.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return student


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_fit_comes_near_the_teacher(norm_first: bool) -> None:
    """And padding, whose targets are absurd here, has no say; the same order gives the same bits."""
    teacher = block(norm_first, 0)
    fit, guard, held = (examples(teacher, n, seed) for n, seed in ((8, 1), (3, 2), (3, 3)))
    results = []
    for _ in range(2):
        student = disturbed(teacher, norm_first)
        forward = forward_of(student)
        before = relative_error(forward, held)
        done = fit_examples(forward, list(student.parameters()), fit, guard, steps=80, rate=3e-3)
        assert done.kept and done.after < done.before
        assert relative_error(forward, held) < 0.5 * before
        assert all(p.grad is None and p.requires_grad for p in student.parameters())
        results.append(student.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("why", ["guard disagrees", "rate explodes", "not finite"])
def test_a_fit_that_does_not_help_leaves_no_trace(why: str) -> None:
    teacher = block(True, 0)
    fit, guard = examples(teacher, 4, 1), examples(teacher, 2, 2)
    if why == "guard disagrees":
        fit = [Example(e.hidden, -e.target, e.mask, e.arguments) for e in fit]
    if why == "not finite":
        fit = [Example(e.hidden, e.target * float("nan"), None, e.arguments) for e in fit]
    student = block(True, 0) if why == "guard disagrees" else disturbed(teacher, True)
    for p in student.parameters():
        p.requires_grad_(False)
    saved = {name: value.clone() for name, value in student.state_dict().items()}
    rate = 1e3 if why == "rate explodes" else 1e-3
    done = fit_examples(forward_of(student), list(student.parameters()), fit, guard, steps=10, rate=rate)
    assert not done.kept and not done.after < done.before
    assert all(torch.equal(saved[name], value) for name, value in student.state_dict().items())
    assert not any(p.requires_grad for p in student.parameters())
    assert done.as_record().kept is False


def test_the_error_is_per_token() -> None:
    """One huge token counts as much as any other: against the formula written out."""
    hidden = torch.zeros(1, 3, 2)
    target = torch.tensor([[[1000.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
    output = torch.tensor([[[900.0, 0.0], [1.0, 1.0], [0.0, 2.0]]])
    found = relative_error(lambda x: output, [Example(hidden, target, torch.tensor([[True, False, True]]))])
    assert found == pytest.approx(((0.1**2 + 0.0) / 2) ** 0.5, rel=1e-3)


def test_a_clock_is_divided_and_the_rate_rises_and_falls(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(local_fit, "perf_counter", lambda: now[0])
    clock = local_fit.TimeLimit(seconds=20.0, start=100.0)
    now[0] = 105.0
    assert clock.gone == pytest.approx(0.25) and clock.part(0.5).seconds == pytest.approx(7.5)
    now[0] = 130.0
    assert clock.gone == pytest.approx(1.5) and clock.part(0.5).seconds == 0.0
    assert local_fit.TimeLimit().gone == 0.0 and local_fit.TimeLimit().part(0.5).seconds is None
    warm, steps = local_fit.WARMUP, 40 * local_fit.WARMUP
    rates = [local_fit.pace(step, steps) for step in range(steps)]
    assert rates[:warm] == pytest.approx([(i + 1) / warm for i in range(warm)])
    assert rates[warm:] == pytest.approx([(steps - i) / (steps - warm) for i in range(warm, steps)])


def test_what_a_fit_keeps_of_itself_is_rounded() -> None:
    made = local_fit.FitResult(7, 0.123456789, 0.0123456789, True, 1.23456).as_record().as_dict()
    rounded = {"steps": 7, "guard_before": 0.123457, "guard_after": 0.012346, "kept": True, "seconds": 1.23}
    assert made == rounded


def test_a_fit_without_time_is_over_at_once_and_late_steps_are_small_ones(monkeypatch) -> None:
    """A step that comes late takes the rate of the place where the clock stands, and not its own."""
    torch.manual_seed(0)
    layer, seen = nn.Linear(4, 4), []
    examples = [Example(torch.randn(2, 3, 4), torch.randn(2, 3, 4)) for _ in range(2)]

    def pace(step: int, steps: int) -> float:
        seen.append(step)
        return 0.1

    monkeypatch.setattr(local_fit, "pace", pace)

    class Late:
        gone = 0.5

    fit_examples(layer, list(layer.parameters()), examples, examples, steps=8, rate=1e-3, clock=Late())
    assert seen == [4, 4, 4, 4, 4, 5, 6, 7]
    Late.gone = 1.0
    over = fit_examples(layer, list(layer.parameters()), examples, examples, steps=8, rate=1e-3, clock=Late())
    assert len(seen) == 8 and not over.kept
