"""What the tool advises works: every `Try --set ...` is tried on the case that printed it."""

from __future__ import annotations

import re

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.training import schedule
from leansurgeon.training.recipe import reading
from leansurgeon.training.recipe.schema import TrainingRecipe

BASE = {"name": "own", "task": {"name": "digits"}}
TRAIN = {"duration": "2ep", "batch": 1024, "optim": {"lr": 1e-3}}
RAMP = {"batch_ramp": {"start": 64, "until": 0.5}}


@pytest.mark.parametrize(
    ("train", "samples", "processes"),
    [
        ({}, 737, 1),
        (RAMP, 737, 1),
        ({"micro_batch": 32}, 737, 2),
        ({"mixup": 0.8}, 737, 1),
        (RAMP, 50, 1),
        ({"micro_batch": 64}, 50, 1),
        (RAMP | {"micro_batch": 16, "mixup": 0.2}, 200, 2),
        ({"batch": 30}, 1000, 4),
        ({"batch": 30, "micro_batch": 7}, 1000, 1),
        ({"duration": "9st", "schedule": {"warmup": "5ep"}}, 9_000, 1),
        ({"duration": "9st", "batch_ramp": {"start": 64, "until": "300st"}}, 9_000, 1),
    ],
    ids=str,
)
def test_what_is_advised_works(train, samples, processes):
    made = TrainingRecipe(**BASE, train=TRAIN | train)
    with pytest.raises(UsageError) as caught:
        schedule.make_plan(made.train, samples, processes)
    sets = [text.rstrip(".") for text in re.findall(r"--set (\S+)", caught.value.hint)]
    assert sets
    mended = reading.check_recipe(reading.plain(made), sets, "own")
    schedule.make_plan(mended.train, samples, processes)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr=1e-4", "train.optim.lr=1e-4"),
        ("train.lr=1e-4", "train.optim.lr=1e-4"),
        ("learning_rate=1e-4", "train.optim.lr=1e-4"),
        ("train.learning_rate=1e-4", "train.optim.lr=1e-4"),
        ("epochs=3", "train.duration=3ep"),
        ("train.num_train_epochs=3", "train.duration=3ep"),
        ("batch_size=16", "train.batch=16"),
        ("train.batch_size=16", "train.batch=16"),
        ("max_steps=20", "train.duration=20st"),
        ("train.warmup_steps=20", "train.schedule.warmup=20st"),
        ("weight_decay=0.1", "train.optim.weight_decay=0.1"),
    ],
)
def test_what_people_type_is_understood_and_what_is_advised_works(typed, meant):
    raw = BASE | {"train": TRAIN}
    with pytest.raises(UsageError, match=re.escape(f"did you mean '{meant}'?")) as caught:
        reading.check_recipe(raw, [typed], "own")
    assert caught.value.exit_code == 2
    reading.check_recipe(raw, [meant], "own")


def test_a_key_of_another_tool_in_a_file_is_understood(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("version: 1\nname: own\nkind: training\ntask: {name: digits}\ntrain: {lr: 1e-3, duration: 1ep}\n")
    with pytest.raises(UsageError, match=r"\b5\b.*train\.optim\.lr"):
        reading.load(str(file))


def test_a_key_that_is_known_is_no_mistake():
    wish = ["train.schedule.warmup=0.2", "train.optim.weight_decay=0.3", "train.schedule.warmup_lr=1e-5"]
    made = reading.check_recipe(BASE | {"train": TRAIN}, wish, "own")
    assert (made.train.schedule.warmup, made.train.optim.weight_decay) == (0.2, 0.3)
