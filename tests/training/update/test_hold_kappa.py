"""Kappa held by a penalty: distances against closed forms and numpy, gradients against differences, and trainings in
which kappa goes where it is wanted.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leansurgeon import checkpoints
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Diverged, UsageError
from leansurgeon.measure.kappa import attentions
from leansurgeon.tasks import Score
from leansurgeon.training.recipe.schema import Train, TrainingRecipe
from leansurgeon.training.recipe.settings import HoldKappa
from leansurgeon.training.train import train
from leansurgeon.training.update import hold_kappa

F64 = torch.float64


def prescribed(*sigma: float, n: int = 6, m: int = 5) -> torch.Tensor:
    """One block (1, n, m) with these singular values and any vectors."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(size, len(sigma), dtype=F64, generator=generator))[0] for size in (n, m))
    return (u * torch.tensor(sigma, dtype=F64) @ v.T)[None]


def test_what_falls_short_of_the_largest_over_the_bound_counts():
    """With bound 10 and sigma_1 = 4 no singular value should be under 0.4: 0.2 lacks a half, 0.1 three quarters."""
    found = hold_kappa.above(*hold_kappa.singular_values(prescribed(4, 2, 0.5, 0.2, 0.1)), 10.0)
    assert found.item() == pytest.approx(0.5**2 + 0.75**2)
    assert hold_kappa.above(*hold_kappa.singular_values(prescribed(4, 2, 1, 0.5, 0.41)), 10.0).item() == 0


def test_what_kappa_lacks_counts_in_nats():
    block = prescribed(4, 2, 1, 0.5, 0.4)
    assert hold_kappa.below(*hold_kappa.singular_values(block), 100.0).item() == pytest.approx(math.log(10) ** 2)
    assert hold_kappa.below(*hold_kappa.singular_values(block), 9.9).item() == 0


@pytest.mark.parametrize(("distance", "bound"), [(hold_kappa.above, 1.1), (hold_kappa.below, 50.0)])
def test_padded_tokens_are_as_if_they_were_not_there(distance, bound):
    """Whatever stands at them; the three samples have more real tokens than width, fewer, and none."""
    generator = torch.Generator().manual_seed(1)
    block = torch.randn(3, 7, 4, dtype=F64, generator=generator)
    mask = torch.tensor([[True] * 5 + [False] * 2, [False, True, True] + [False] * 4, [False] * 7])
    block[0, 5], block[1, 0] = math.nan, math.inf
    held = distance(*hold_kappa.singular_values(block, mask), bound)
    for i in range(2):
        alone = distance(*hold_kappa.singular_values(block[i, mask[i]][None]), bound)
        assert held[i].item() == pytest.approx(alone.item(), rel=1e-12) and alone > 0
    assert held[2] == 0


@pytest.mark.parametrize("distance", [hold_kappa.above, hold_kappa.below])
def test_gradients_are_those_of_differences(distance):
    generator = torch.Generator().manual_seed(2)
    block = torch.randn(2, 6, 4, dtype=F64, generator=generator, requires_grad=True)
    bound = 2.0 if distance is hold_kappa.above else 50.0
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    assert (distance(*hold_kappa.singular_values(block, mask), bound) > 0).all()
    assert torch.autograd.gradcheck(lambda x: distance(*hold_kappa.singular_values(x, mask), bound), (block,))


def test_blocks_of_zeros_have_a_gradient_of_zero():
    block = torch.zeros(1, 3, 2, requires_grad=True)
    for distance in (hold_kappa.above, hold_kappa.below):
        found = distance(*hold_kappa.singular_values(block), 3.0)
        (gradient,) = torch.autograd.grad(found.sum(), block)
        assert found.item() == 0 and (gradient == 0).all()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held") / "start"
    source = open_source("digits-vit")
    made = checkpoints.model.initialise(source.config, source.architecture, 0)
    checkpoints.model.save_model(made, source.architecture, source.config, folder)
    return folder


def trained(folder, start, steps=30, **more):
    recipe = TrainingRecipe(
        name="x",
        task={"name": "digits"},
        train={"duration": f"{steps}st", "batch": 16, "optim": {"lr": 1e-3}, "log_every": 1} | more,
        measure={"kappa": {"samples": 16, "every": f"{steps}st"}},
    )
    train(recipe, start, folder, say=lambda _: None, cpu=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {kind: [row for row in rows if row["type"] == kind] for kind in ("kappa", "train", "eval")}


def medians(rows):
    return np.array([layer["median"] for layer in rows["kappa"][-1]["layers"]])


def test_a_training_holds_kappa_at_its_bound_and_is_judged_by_its_task_alone(tmp_path, start):
    plain = trained(tmp_path / "plain", start)
    low = trained(tmp_path / "low", start, hold_kappa={"kind": "most", "bound": 100})
    high = trained(tmp_path / "high", start, hold_kappa={"kind": "least", "bound": 1000})
    assert np.median(medians(plain)) > 200 and medians(plain).min() < 100
    assert (medians(low) < 110).all() and (medians(high) > 500).all()
    first = [rows["eval"][0]["loss"] for rows in (plain, low, high)]  # of the model that all begin with
    assert first[0] == first[1] == first[2]
    assert plain["train"][0]["loss"] < min(low["train"][0]["loss"], high["train"][0]["loss"])


def test_micro_batches_weigh_what_the_whole_batch_does(tmp_path, start):
    held = {"kind": "most", "bound": 2.0, "samples": 16}
    whole = trained(tmp_path / "whole", start, steps=3, hold_kappa=held)
    parts = trained(tmp_path / "parts", start, steps=3, hold_kappa=held, micro_batch=4)
    for a, b in zip(whole["train"], parts["train"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-3
        )


@pytest.mark.parametrize("nan", ["stop", "skip", "rollback"])
def test_a_training_that_diverges_says_so(tmp_path, start, nan):
    with pytest.raises(Diverged):
        trained(
            tmp_path / nan,
            start,
            steps=12,
            hold_kappa={"kind": "most", "bound": 9},
            optim={"name": "sgd", "lr": 1e30},
            clip_grad=0,
            nan=nan,
        )


def settings(**more):
    given = {"duration": "1st", "batch": 2, "optim": {"lr": 1e-3}, "hold_kappa": {"kind": "most", "bound": 9}}
    return Train(**given | more)


def test_a_forward_that_fails_leaves_nothing_behind(start):
    loaded = checkpoints.load(start)
    penalty = hold_kappa.Penalty(settings().hold_kappa, loaded, SimpleNamespace(token_mask=lambda batch: None))
    batch = {"pixel_values": torch.randn(3, 1, 8, 8), "labels": torch.zeros(3, dtype=torch.long)}
    with pytest.raises(MemoryError), penalty.listening() as blocks:
        loaded.forward(batch)
        raise MemoryError
    assert len(blocks) == len(loaded.projections)
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())
    with penalty.listening() as blocks:
        loaded.forward(batch)
    score = Score(torch.tensor(1.0), torch.tensor(3.0), torch.tensor(0.0), torch.tensor(0.0))
    more = penalty.added(score, batch, blocks).loss_sum - 1
    expected = [hold_kappa.above(*hold_kappa.singular_values(block), 9.0).mean() for block in blocks.values()]
    assert more.item() == pytest.approx(3 * float(sum(expected)) / len(expected), rel=1e-5) and more > 0
    with pytest.raises(UsageError, match="nothing"):
        penalty.added(score, batch, {})
    with pytest.raises(UsageError, match="one token"):
        penalty.added(score, batch, {layer: block[:, :1] for layer, block in blocks.items()})


@pytest.mark.parametrize(("at", "fine"), [(6, True), (2, False)])
def test_what_is_not_finite_counts_at_real_tokens_alone(start, at, fine):
    loaded = checkpoints.load(start)
    mask = torch.tensor([[True] * 5 + [False] * 2] * 2)
    penalty = hold_kappa.Penalty(settings().hold_kappa, loaded, SimpleNamespace(token_mask=lambda batch: mask))
    block = torch.randn(2, 7, 4, requires_grad=True) + 0
    with torch.no_grad():
        block[0, at] = math.nan
    score = Score(*torch.ones(4))
    blocks = dict.fromkeys(range(len(loaded.projections)), block)
    found = penalty.added(score, {"labels": torch.zeros(2)}, blocks).loss_sum
    assert bool(found.isfinite()) == fine


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"ema": {}}, "train.ema"),
        ({"lora": {"rank": 2}}, "train.lora"),
        ({"compile": True}, "train.compile"),
        ({"activation_checkpointing": True}, "train.activation_checkpointing"),
        ({"precision": "bf16", "hold_kappa": {"kind": "least", "bound": 1700}}, "bf16"),
    ],
)
def test_what_cannot_be_held_is_refused(start, more, named, monkeypatch):
    loaded = checkpoints.load(start)
    with pytest.raises(UsageError, match=named):
        hold_kappa.check(settings(**more), loaded, sharing=False)
    with pytest.raises(UsageError, match="fsdp2"):
        hold_kappa.check(settings(), loaded, sharing=True)
    hold_kappa.check(settings(precision="bf16"), loaded, sharing=False)
    monkeypatch.setattr(attentions, "of", lambda loaded: [None for _ in loaded.projections])
    with pytest.raises(UsageError, match="not every block"):
        hold_kappa.check(settings(), loaded, sharing=False)


@pytest.mark.parametrize("wrong", [{"bound": 0.5}, {"kind": "about"}, {"weight": 0}, {"samples": 0}], ids=str)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        HoldKappa(**{"kind": "most", "bound": 9, **wrong})
