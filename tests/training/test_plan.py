"""What a recipe comes to: steps, batches, warm-up and what comes when, worked out by hand. 1437 samples are 22 batches
of 64.
"""

from __future__ import annotations

import re

import pytest
import torch

from leansurgeon.errors import UsageError
from leansurgeon.training import schedule
from leansurgeon.training.recipe.schema import Train


def made(samples: int = 1437, processes: int = 1, micro_limit: int | None = None, cut_short=False, **changes):
    train = Train.model_validate({"duration": "3ep", "batch": 64, "optim": {"lr": 1e-3}} | changes)
    return schedule.make_plan(train, samples, processes, micro_limit=micro_limit, cut_short=cut_short)


@pytest.mark.parametrize(
    ("warmup", "steps"),
    [(0.2, 13), ("10st", 10), ("1ep", 22), ("3ep", 66), (0.0, 0)],
)
def test_a_warm_up_in_whole_steps(warmup, steps):
    found = made(schedule={"warmup": warmup, "min_lr": 1e-4, "name": "linear"})
    assert found.warmup == steps and (found.steps, found.epochs) == (66, 3)
    assert found.lr(steps) == pytest.approx(1e-3)
    if steps:
        assert found.lr(steps / 2) == pytest.approx(5e-4)
    assert found.lr(66) == pytest.approx(1e-4 if steps < 66 else 1e-3)


def test_a_warm_up_beyond_a_quick_look_ends_with_it():
    assert made(schedule={"warmup": "5ep"}, cut_short=True).warmup == 66
    with pytest.raises(UsageError, match=r"\b67 steps\b.*\b3ep 66\b"):
        made(schedule={"warmup": "67st"})


@pytest.mark.parametrize(("warmup", "ticks"), [("1m", 1e5), ("10m", 1e6), (0.25, 2.5e5)])
def test_a_training_by_the_clock_counts_a_millionth_of_its_time(warmup, ticks):
    found = made(duration="10m", schedule={"warmup": warmup, "name": "linear", "warmup_lr": 2e-4})
    assert found.timed and found.seconds == 600 and found.warmup == pytest.approx(ticks)
    assert found.lr(0) == pytest.approx(2e-4) and found.lr(ticks / 2) == pytest.approx(6e-4)
    if ticks < 1e6:
        assert found.lr((1e6 + ticks) / 2) == pytest.approx(5e-4) and found.lr(1e6) == pytest.approx(0)
    assert found.steps > 1e15  # it never ends by them
    with pytest.raises(UsageError, match=r"11m \(660 s\).*10m \(600 s\)"):
        made(duration="10m", schedule={"warmup": "11m"})


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0.1, 0.3])
def test_rate_and_momentum_of_one_cycle_are_torchs(warmup, anneal):
    """Torch takes the share as it is: the peak lies between two steps."""
    cycle = {"name": "one-cycle", "warmup": warmup, "anneal": anneal, "momentum": (0.8, 0.9)}
    found = made(schedule=cycle | {"div": 10.0, "final_div": 100.0})
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        adamw, 1e-3, total_steps=66, pct_start=warmup,
        anneal_strategy={"cosine": "cos"}.get(anneal, anneal), base_momentum=0.8, max_momentum=0.9,
        div_factor=10.0, final_div_factor=100.0,
    )  # fmt: skip
    for step in range(66):
        assert found.lr(step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        assert found.momentum(step) == pytest.approx(adamw.param_groups[0]["betas"][0], rel=1e-9)
        adamw.step()
        if step < 65:
            schedule.step()


def test_momentum_by_the_clock():
    cycle = made(duration="10m", schedule={"name": "one-cycle", "warmup": "2m", "anneal": "linear"})
    turns = [cycle.momentum(tick) for tick in (0, 1e5, 2e5, 6e5, 1e6)]
    assert turns == pytest.approx([0.95, 0.9, 0.85, 0.9, 0.95], abs=1e-5)
    assert made().momentum(3) is None


@pytest.mark.parametrize(
    ("every", "after"),
    [("1ep", [22, 44, 66]), ("2ep", [44, 66]), ("25st", [25, 50, 66]), ("33st", [33, 66]), ("15m", [66])],
)
def test_evaluations_come_every_so_often_and_at_the_end(every, after):
    found = made(eval={"every": every})
    assert [done for done in range(1, 67) if found.evaluate_after(done)] == after
    for done in range(67):
        assert found.evaluations_left(done) == sum(step > done for step in after)


def test_the_first_steps_of_a_ramp():
    assert schedule.ramp(2, 8, 6).tolist() == [2, 2, 4, 4, 6, 6] and schedule.ramp(4, 4, 3).tolist() == [4, 4, 4]
    assert schedule.ramp(2, 8, 0).tolist() == []
    found = made(20, batch=8, batch_ramp={"start": 2, "until": "6st"}, duration="9st")
    assert [found.batch_at(step) for step in range(9)] == [2, 2, 4, 4, 6, 6, 8, 8, 8]
    assert [found.position(step) for step in range(10)] == [0, 2, 4, 8, 12, 18, 24, 32, 40, 48]
    assert (found.epoch_samples, found.epochs, found.group, found.ramp_steps) == (20, 48 / 20, 2, 6)
    # Two epochs of 20 samples are 40, which the eighth step reaches; after each of 20 and 40 comes an evaluation.
    epochs = made(20, batch=8, batch_ramp={"start": 2, "until": "6st"}, duration="2ep")
    assert epochs.steps == 8 and [done for done in range(1, 9) if epochs.due("1ep", done)] == [6, 8]
    assert made(20, batch=8, batch_ramp={"start": 2, "until": "9st"}, duration="9st").ramp_steps == 9
    with pytest.raises(UsageError, match="9st 9"):
        made(20, batch=8, batch_ramp={"start": 2, "until": "10st"}, duration="9st")


def test_a_ramp_in_epochs_is_as_long_as_its_mean_batch_says():
    """An epoch of 22 * 64 samples at a mean of (32 + 64) / 2 are 29.3 steps, also of a training by the clock."""
    for duration in ("9ep", "10m", "100st"):
        assert made(duration=duration, batch_ramp={"start": 32, "until": "1ep"}).ramp_steps == 29
        assert made(duration=duration, batch_ramp={"start": 8, "until": "1ep"}).ramp_steps == 40  # 1432 / 36
    assert made(duration="10m", batch_ramp={"start": 32, "until": "7st"}).ramp_steps == 7
    assert made(64, duration="9ep", batch_ramp={"start": 32, "until": "0.1ep"}).ramp_steps == 1
    assert made(duration="10m").ramp_steps == 0
    half = made(duration="6ep", batch_ramp={"start": 32, "until": 0.5})
    assert half.ramp_steps == half.steps // 2
    assert made(duration="5st", batch_ramp={"start": 32, "until": "9st"}, cut_short=True).ramp_steps == 5


@pytest.mark.parametrize(
    ("batch", "changes", "limit", "micro"),
    [
        (64, {}, None, 64),
        (64, {}, 24, 16),
        (90, {}, 15, 15),
        (90, {"mixup": 0.2}, 15, 10),  # pairs
        (90, {"mixup": 0.2}, 90, 90),
        (90, {}, 1, 1),
        (90, {"mixup": 0.2}, 1, 90),  # there is no smaller one
        (90, {"micro_batch": 30}, 45, 30),
        (90, {"micro_batch": 30}, 29, 18),
    ],
)
def test_a_micro_batch_is_the_largest_that_divides_the_batch(batch, changes, limit, micro):
    found = made(batch=batch, micro_limit=limit, **changes)
    assert (found.micro, found.accumulation) == (micro, batch // micro)
    assert made(batch=batch, processes=2).micro == batch // 2


def test_a_ramp_is_shared_from_its_first_batch_on():
    found = made(batch_ramp={"start": 8, "until": "9st"}, processes=2)
    assert (found.micro, found.accumulation) == (4, 8)
    with pytest.raises(UsageError, match=r"8 .*\b3\b") as caught:
        made(batch_ramp={"start": 8, "until": "9st"}, processes=3)
    assert "train.batch_ramp.start=6." in caught.value.hint


@pytest.mark.parametrize(
    ("samples", "processes", "changes", "advised"),
    [
        (737, 1, {}, ["batch=737"]),
        (737, 2, {}, ["batch=736"]),
        (737, 1, {"mixup": 0.5}, ["batch=736"]),
        (738, 4, {"mixup": 0.5}, ["batch=736"]),
        (64, 1, {"batch_ramp": {"start": 64, "until": 0.5}}, ["batch=64"]),
        (600, 2, {"micro_batch": 128}, ["batch=512"]),
        (100, 1, {"micro_batch": 128}, ["batch=100", "micro_batch=null"]),
        (50, 1, {"batch_ramp": {"start": 64, "until": 0.5}}, ["batch=50", "batch_ramp=null"]),
    ],
)
def test_the_largest_batch_of_a_small_training_set_is_advised(samples, processes, changes, advised):
    with pytest.raises(UsageError, match=rf"\b{samples} samples\b.*\b1024\b") as caught:
        made(samples, processes, batch=1024, **changes)
    assert re.findall(r"--set train\.([\w=]+)", caught.value.hint) == advised


def test_a_training_set_of_one_batch_is_enough():
    assert (made(64).steps_per_epoch, made(64).steps) == (1, 3)
    with pytest.raises(UsageError, match=r"\b63 samples\b"):
        made(63)


def test_an_odd_micro_batch_has_no_pairs():
    with pytest.raises(UsageError, match=r"\b15 samples\b"):
        made(batch=30, processes=2, mixup=0.1)
    with pytest.raises(UsageError, match=r"\b24\b.*\b64\b") as caught:
        made(micro_batch=24)
    assert "train.micro_batch=16." in caught.value.hint
    with pytest.raises(UsageError, match=r"\b64\b.*\b48\b") as caught:
        made(processes=48)
    assert "train.batch=48." in caught.value.hint
    with pytest.raises(UsageError, match=r"\b64\b.*\b100\b") as caught:
        made(processes=100)
    assert "train.batch=100." in caught.value.hint


def test_a_peak_is_never_below_the_least_rate():
    optim = {"lr": 1e-3, "full_steps": 6600}
    assert made(optim=optim).peak == pytest.approx(1e-4)
    assert made(optim=optim, schedule={"min_lr": 5e-4}).peak == 5e-4
    assert made(optim={"lr": 1e-3, "full_steps": 6}).peak == 1e-3
