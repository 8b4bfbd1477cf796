"""What a recipe comes to: steps, batches, warm-up and what comes when, worked out by hand; and its learning rate,
against torch, transformers, timm and a published formula. 1437 samples are 22 batches of 64.
"""

from dataclasses import replace

import pytest
import torch
from timm.scheduler import CosineLRScheduler
from transformers import get_scheduler

from leansurgeon.errors import UsageError
from leansurgeon.training import schedule
from leansurgeon.training.recipe.schema import Train


def train_of(**changes) -> Train:
    return Train.model_validate({"duration": "3ep", "batch": 64, "optim": {"lr": 1e-3}} | changes)


def made(samples: int = 1437, processes: int = 1, micro_limit: int | None = None, cut_short=False, **changes):
    return schedule.make_plan(train_of(**changes), samples, processes, micro_limit=micro_limit, cut_short=cut_short)


def make_adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)


# -- learning rate and momentum --------------------------------------------------------------------


KNOWN = {  # transformers' name of a schedule, what it takes, and ours
    "cosine": ({}, {"name": "cosine"}),
    "linear": ({}, {"name": "linear"}),
    "constant_with_warmup": ({}, {"name": "constant"}),
    "cosine_with_min_lr": ({"scheduler_specific_kwargs": {"min_lr": 1e-4}}, {"name": "cosine", "min_lr": 1e-4}),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("total", "warmup"), [(100, 10), (37, 0), (20, 20)])
def test_a_schedule_is_that_of_transformers(name, total, warmup):
    adamw, (options, ours) = make_adamw(), KNOWN[name]
    theirs = get_scheduler(name, adamw, warmup, total, **options)
    found = made(duration=f"{total}st", schedule=ours | {"warmup": f"{warmup}st" if warmup else 0.0})
    for step in range(total):
        assert found.lr(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-18)
        adamw.step()
        theirs.step()


@pytest.mark.parametrize("name", ["one-cycle", "triangle", "constant"])
def test_a_lowest_rate_is_refused_where_there_is_none(name):
    with pytest.raises(ValueError, match=f"min_lr.*{name}"):
        train_of(schedule={"name": name, "warmup": 0.1, "min_lr": 1e-5})


def test_a_warm_up_from_a_rate_is_that_of_timm():
    found = made(duration="320st", schedule={"warmup": "20st", "warmup_lr": 1e-5})
    theirs = CosineLRScheduler(make_adamw(), t_initial=300, warmup_t=20, warmup_lr_init=1e-5, warmup_prefix=True)
    assert [found.lr(step) for step in range(21)] == pytest.approx([theirs._get_lr(step)[0] for step in range(21)])
    with pytest.raises(ValueError, match=r"schedule\.warmup_lr.*0\.01.*optim\.lr.*0\.001"):
        train_of(schedule={"warmup_lr": 1e-2})


@pytest.mark.parametrize(("anneal", "warmup"), [("cosine", 0.3), ("linear", 0.1)])
def test_rate_and_momentum_of_one_cycle_are_torchs(warmup, anneal):
    """Torch takes the share as it is: the peak lies between two steps."""
    cycle = {"name": "one-cycle", "warmup": warmup, "anneal": anneal, "momentum": (0.8, 0.9)}
    found = made(schedule=cycle | {"div": 10.0, "final_div": 100.0})
    adamw = make_adamw()
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        adamw, 1e-3, total_steps=66, pct_start=warmup, anneal_strategy="cos" if anneal == "cosine" else anneal,
        base_momentum=0.8, max_momentum=0.9, div_factor=10.0, final_div_factor=100.0,
    )  # fmt: skip
    for step in range(66):
        assert found.lr(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        assert found.momentum(step) == pytest.approx(adamw.param_groups[0]["betas"][0], rel=1e-9)
        adamw.step()
        if step < 65:
            theirs.step()


def test_the_budget_triangle_is_the_published_formula():
    """Crammed BERT's budget-triangle2: min(0.25 + x (1 - 0.25)/(1 - 0.25), 1/0.25 - x/0.25) of the rate at x of 1."""
    found = made(duration="1000st", schedule={"name": "triangle"})
    for step in range(1001):
        x = step / 1000
        assert found.lr(step) == pytest.approx(1e-3 * min(0.25 + x, (1 - x) / 0.25), abs=1e-15)


@pytest.mark.parametrize(("steps", "share"), [(1, 1 / 6), (9, 0.5), (36, 1.0), (400, 1.0)])
def test_few_steps_get_less_of_the_rate(steps, share):
    optim = {"lr": 1e-3, "full_steps": 36}
    found = made(duration=f"{steps}st", optim=optim, schedule={"name": "constant"})
    assert found.peak == pytest.approx(1e-3 * share) and found.lr(0) == found.peak
    by_the_clock = made(duration="9s", optim=optim)
    assert by_the_clock.peak == 1e-3  # nothing is foretold yet
    assert replace(by_the_clock, expected=steps).peak == pytest.approx(1e-3 * share)
    assert made(duration="1st", optim=optim, schedule={"min_lr": 5e-4}).peak == 5e-4


# -- warm-ups, ramps and what comes when -----------------------------------------------------------


@pytest.mark.parametrize(("warmup", "steps"), [(0.2, 13), ("10st", 10), ("1ep", 22), ("3ep", 66)])
def test_a_warm_up_in_whole_steps(warmup, steps):
    found = made(schedule={"warmup": warmup, "min_lr": 1e-4, "name": "linear"})
    assert found.warmup == steps and (found.steps, found.epochs) == (66, 3)
    assert found.lr(steps) == pytest.approx(1e-3) and found.lr(steps / 2) == pytest.approx(5e-4)
    assert found.lr(66) == pytest.approx(1e-4 if steps < 66 else 1e-3)


def test_a_warm_up_beyond_a_quick_look_ends_with_it():
    assert made(schedule={"warmup": "5ep"}, cut_short=True).warmup == 66
    with pytest.raises(UsageError, match=r"\b67 steps\b.*\b3ep 66\b"):
        made(schedule={"warmup": "67st"})


@pytest.mark.parametrize(("warmup", "ticks"), [("1m", 1e5), (0.25, 2.5e5)])
def test_a_training_by_the_clock_counts_a_millionth_of_its_time(warmup, ticks):
    found = made(duration="10m", schedule={"warmup": warmup, "name": "linear", "warmup_lr": 2e-4})
    assert found.timed and found.seconds == 600 and found.warmup == pytest.approx(ticks)
    assert found.lr(0) == pytest.approx(2e-4) and found.lr(ticks / 2) == pytest.approx(6e-4)
    assert found.lr((1e6 + ticks) / 2) == pytest.approx(5e-4) and found.lr(1e6) == pytest.approx(0)
    assert found.steps > 1e15  # it never ends by them
    with pytest.raises(UsageError, match=r"11m \(660 s\).*10m \(600 s\)"):
        made(duration="10m", schedule={"warmup": "11m"})


def test_between_two_looks_the_clock_is_taken_to_go_on():
    pace = schedule.Pace(made(duration="24h", schedule={"name": "triangle"}))
    pace.look(100, 6 * 3600.0)  # 216 s a step
    assert pace.plan.lr(pace.place(100)) == pytest.approx(1e-3 * 0.5)
    assert pace.fraction(110) == pytest.approx(0.275) and not pace.over(110)
    pace.look(200, 24 * 3600.0)
    assert pace.over(200)
    other = schedule.Pace(pace.plan)
    other.restore(pace.state())
    assert other.place(201) == pace.place(201)


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
    ramp = {"start": 2, "until": "6st"}
    found = made(20, batch=8, batch_ramp=ramp, duration="9st")
    assert [found.batch_at(step) for step in range(9)] == [2, 2, 4, 4, 6, 6, 8, 8, 8]
    assert [found.position(step) for step in range(10)] == [0, 2, 4, 8, 12, 18, 24, 32, 40, 48]
    assert (found.epoch_samples, found.epochs, found.group, found.ramp_steps) == (20, 48 / 20, 2, 6)
    # Two epochs of 20 samples are 40, which the eighth step reaches; after each of 20 and 40 comes an evaluation.
    epochs = made(20, batch=8, batch_ramp=ramp, duration="2ep")
    assert epochs.steps == 8 and [done for done in range(1, 9) if epochs.due("1ep", done)] == [6, 8]
    with pytest.raises(UsageError, match="9st 9"):
        made(20, batch=8, batch_ramp={"start": 2, "until": "10st"}, duration="9st")


@pytest.mark.parametrize("duration", ["9ep", "10m", "100st"])
def test_a_ramp_in_epochs_is_as_long_as_its_mean_batch_says(duration):
    """An epoch of 22 * 64 samples at a mean of (32 + 64) / 2 are 29.3 steps, also of a training by the clock."""
    for start, until, steps in ((32, "1ep", 29), (8, "1ep", 40), (32, "7st", 7)):
        assert made(duration=duration, batch_ramp={"start": start, "until": until}).ramp_steps == steps


def test_a_ramp_over_a_share_of_the_training_and_beyond_a_quick_look():
    half = made(duration="6ep", batch_ramp={"start": 32, "until": 0.5})
    assert half.ramp_steps == half.steps // 2
    assert made(duration="5st", batch_ramp={"start": 32, "until": "9st"}, cut_short=True).ramp_steps == 5


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "changes", "limit", "micro"),
    [
        (64, {}, 24, 16),
        (90, {}, 15, 15),
        (90, {"mixup": 0.2}, 15, 10),  # pairs
        (90, {"mixup": 0.2}, 1, 90),  # there is no smaller one
        (90, {"micro_batch": 30}, 29, 18),
    ],
)
def test_a_micro_batch_is_the_largest_that_divides_the_batch(batch, changes, limit, micro):
    found = made(batch=batch, micro_limit=limit, **changes)
    assert (found.micro, found.accumulation) == (micro, batch // micro)
    assert made(batch=batch, processes=2).micro == batch // 2


def test_a_training_set_of_one_batch_is_enough():
    assert (made(64).steps_per_epoch, made(64).steps) == (1, 3)
    with pytest.raises(UsageError, match=r"\b63 samples\b"):
        made(63)


LONG = {"duration": "9st", "batch": 1024}


@pytest.mark.parametrize(
    ("samples", "processes", "changes", "says"),
    [
        (737, 1, {"batch": 1024}, r"737 samples\b.*\b1024"),
        (1437, 1, {"micro_batch": 24}, r"24\b.*\b64"),
        (1437, 100, {}, r"64\b.*\b100"),
        (1437, 3, {"batch_ramp": {"start": 8, "until": "9st"}}, r"8 .*\b3"),
        (1437, 2, {"batch": 30, "mixup": 0.1}, r"pairs\b.*\bmicro batch of 15"),
        (9000, 1, LONG | {"schedule": {"warmup": "5ep"}}, r"5ep\b.*\b9st"),
        (9000, 1, LONG | {"batch_ramp": {"start": 64, "until": "300st"}}, r"300st"),
    ],
)
def test_batches_that_do_not_fit_are_one_sentence(samples, processes, changes, says):
    with pytest.raises(UsageError, match=rf"\b{says}\b"):
        schedule.make_plan(train_of(**changes), samples, processes)
