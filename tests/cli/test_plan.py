"""`leansurgeon plan`: what it prints, what it refuses, and how it divides a saving."""

from __future__ import annotations

import re

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.costs.gpus import GPUS
from leansurgeon.measure.costs.memory import Rehearsal, Setting
from leansurgeon.surgery.costs import costs
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.cli.answers import document, stderr_of, stdout_of, typed, works


def test_counts_are_those_of_shrink():
    found = document("plan vit-b --heads 16 --layers 7")
    steps = document("shrink vit-b --heads 16 --layers 7 --dry-run")["plan"]
    assert found["after"]["parameters"] == steps["parameters_after"]
    assert found["before"]["flops"] == steps["flops_before"]
    assert found["saved_by"]["flops"] == steps["flops_saved_by"]
    assert found["before"]["memory"] is None and found["gpu"] is None


def test_the_saving_is_divided_in_the_order_that_is_told():
    """digits-vit: every step is the difference of two predictions that are made apart from it."""
    found = costs(open_source("digits-vit"), RequestedShape(heads="8", layers="3", mlp_ratio="1"), Setting(batch=64))
    source = open_source("digits-vit")
    start = Rehearsal(source.config, source.architecture, Setting(64, precision="fp32", attention="eager")).peak()
    now = Rehearsal(source.config, source.architecture, Setting(64)).peak()
    less = source.architecture.with_shape(source.config, source.shape.with_(depth=3))
    cut = Rehearsal(less, source.architecture, Setting(64)).peak()
    assert found.start == start.total
    assert found.saved["memory"]["precision and attention"] == start.total - now.total
    assert found.saved["memory"]["depth"] == now.total - cut.total
    assert sum(found.saved["memory"].values()) == start.total - found.after.memory.total
    assert found.saved["memory"]["heads"] < 0  # heads at the same head_dim cost


def test_table_fits_80_columns_and_says_what_fits():
    found = works("plan digits-vit --layers 3 --batch 16 --gpu a6000")
    assert max(map(len, found.stdout.splitlines())) <= 80
    for words in ("memory, peak", "largest micro batch", "RTX A6000 48 GB", "both fit", "last three are surgery"):
        assert words in stdout_of(found)


def test_every_card_has_the_memory_that_its_data_sheet_names():
    for card in GPUS.values():
        sizes = {int(size) for size in re.findall(r"(\d+) GB", f"{card.title} {card.source}")}
        assert {card.memory} == {size * 10**9 for size in sizes}
    assert {name: card.memory // 10**9 for name, card in GPUS.items()}["a6000"] == 48


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("digits-vit --gpu h1000", "did you mean 'h100'"),
        ("digits-vit --gpu a100", r"\ba100-40 or a100-80\b"),
        ("digits-vit --precision bf8", r"bf8.*bf16, fp16, fp32"),
        ("digits-vit --batch 0", r"--batch 0.*\b1\b"),
        ("digits-vit --attention flash", "flash.*sdpa, eager"),
        ("digits-vit --optimizer lion", "lion.*adamw, adamw-foreach, adam, sgd"),
        ("digits-vit --layers 99", "99 is more than"),
        ("bert-crammed --tokens 4096", "at most 128"),
    ],
)
def test_bad_input_is_one_sentence(arguments, says):
    done = typed(f"plan {arguments}")
    assert done.returncode == 2 and re.search(says, stderr_of(done)), done.stderr


def test_models_without_a_closed_form_are_counted_by_torch():
    found = document("plan lra/listops --layers 1")
    assert found["before"]["flops"] is None
    assert found["before"]["flops_counted"] > found["after"]["flops_counted"] > 0
