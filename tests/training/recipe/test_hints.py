"""What people type is understood: a key of another tool, or in another place, is told its own, which works."""

from __future__ import annotations

import re

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.training.recipe import reading

TRAIN = {"duration": "2ep", "batch": 1024, "optim": {"lr": 1e-3}}
RAW = {"name": "own", "task": {"name": "digits"}, "train": TRAIN}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr=1e-4", "train.optim.lr=1e-4"),
        ("train.lr=1e-4", "train.optim.lr=1e-4"),
        ("learning_rate=1e-4", "train.optim.lr=1e-4"),
        ("train.num_train_epochs=3", "train.duration=3ep"),
        ("batch_size=16", "train.batch=16"),
        ("max_steps=20", "train.duration=20st"),
        ("train.warmup_steps=20", "train.schedule.warmup=20st"),
        ("weight_decay=0.1", "train.optim.weight_decay=0.1"),
    ],
)
def test_what_people_type_is_understood_and_what_is_advised_works(typed, meant):
    with pytest.raises(UsageError, match=re.escape(f"did you mean '{meant}'?")) as caught:
        reading.check_recipe(RAW, [typed], "own")
    assert caught.value.exit_code == 2
    reading.check_recipe(RAW, [meant], "own")


def test_a_key_of_another_tool_in_a_file_is_understood(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("version: 1\nname: own\nkind: training\ntask: {name: digits}\ntrain: {lr: 1e-3, duration: 1ep}\n")
    with pytest.raises(UsageError, match=r"\b5\b.*train\.optim\.lr"):
        reading.load(str(file))


@pytest.mark.parametrize(("key", "value"), [("ema", "0.9"), ("optim", "adamw"), ("schedule", "linear")])
def test_a_value_in_the_place_of_keys_is_told_its_key(key, value):
    with pytest.raises(UsageError, match=rf"`train\.{key}`.*did you mean 'train\.{key}\.(\w+)'") as refused:
        reading.load("crammed-bert-glue", (f"train.{key}={value}",))
    advised = refused.value.message.split("did you mean '")[1].split("'")[0]
    assert reading.load("crammed-bert-glue", (f"{advised}={value}",))


@pytest.mark.parametrize(
    ("recipe", "sets", "blamed"),
    [
        ("crammed-bert-glue", ("task.tokenizer=foo", "task.seq_len=64"), "task.tokenizer=foo"),
        ("crammed-bert-glue", ("train.schedule.min_lr=1", "train.log_every=5"), "train.schedule.min_lr=1"),
        ("crammed-bert", ("train.batch_ramp.start=3", "train.log_every=5"), "train.batch_ramp.start=3"),
        ("crammed-bert", ("arms.lean.train={clip_grad: -1}", "seeds=[1]"), "arms.lean.train={clip_grad: -1}"),
        ("crammed-bert", ("arms.control.control_of=foo", "arms.lean.heads=12"), "arms.control.control_of=foo"),
        ("imagenet-vit-b", ("task.mean=[1]", "task.data=x"), "task.mean=[1]"),
        ("lra-text", ("task.max_length=9", "task.seq_len=8", "task.data=x"), "task.max_length=9 --set task.seq_len=8"),
    ],
)
def test_the_set_is_named_that_is_wrong(recipe, sets, blamed):
    with pytest.raises(UsageError) as refused:
        reading.load(recipe, sets)
    assert refused.value.message.startswith(f"--set {blamed}: ")
