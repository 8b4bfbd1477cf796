"""Which shapes a search looks at: against brute force with counts of built models; and what is asked for in words."""

from __future__ import annotations

import re
from itertools import product

import pytest

from leansurgeon.checkpoints.model import initialise
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.search.outcome import Limit, config_of, covers
from leansurgeon.search.space import Budget, Space, control, enumerate_shapes, list_values, usual_layers


def built(source, shape):
    """Parameters of the library's own model."""
    config, family = config_of(source, shape)
    return sum(p.numel() for p in initialise(config, family, 0).parameters())


def found(source, budget, **space):
    return enumerate_shapes(source, Space(**space), budget, init="fresh", calibrated=False)


def test_the_shapes_are_those_that_brute_force_finds_with_counts_of_built_models():
    source = open_source("digits-vit")
    heads, layers, mlp = (4, 6, 8, 12), (2, 3, 4, 6), (128, 256)
    searched = found(source, Budget(parameters=160_000), heads="4,6,8,12", layers="2-4,6", mlp_dim="128,256")
    brute = {}
    for depth, h, m in product(layers, heads, mlp):
        shape = source.shape.with_(depth=depth, heads=h, kv_heads=h, mlp_dim=m)
        if shape != source.shape and (count := built(source, shape)) <= 160_000:
            brute[depth, h, m] = count
    ours = {(s.depth, s.heads, s.mlp_dim): c.parameters for c in searched.candidates for s in c.shape.stages}
    assert ours == brute and len(brute) > 5
    assert searched.looked_at == 4 * 4 * 2 - 1 == len(ours) + searched.too_large  # the source itself is none


def test_a_family_that_splits_takes_only_heads_that_divide_its_width():
    source = open_source("bert-crammed")  # width 768, split
    searched = found(source, Budget(parameters=90_000_000), heads="12,16,20,24", layers="10", mlp_dim="1x")
    assert [c.shape.stages[0].heads for c in searched.candidates] == [12, 16, 24]
    assert all(s.inner == 768 for c in searched.candidates for s in c.shape.stages)
    (refused,) = searched.refused
    assert re.search(r"^768\b.*\b20 heads\b.*\b16, 24\.$", refused)
    lean = searched.candidates[-1]
    assert lean.parameters == 84_182_017  # the paper's lean Crammed BERT, counted from the authors' code


def test_stages_of_a_pyramid_change_together_and_exactly():
    source = open_source("volo-d3")  # layers 8,8,16,4
    searched = found(source, Budget(parameters=50_000_000), heads="2x", layers="1/2x", mlp_dim="1x")
    assert [c.shape.column("depth") for c in searched.candidates] == ["4,4,8,2"]
    assert searched.candidates[0].parameters == 47_454_032  # the paper's lean VOLO-d3


def test_a_control_has_the_old_heads_and_as_many_parameters_within_one_unit_a_layer():
    source = open_source("digits-vit")
    searched = found(source, Budget(parameters=200_000), heads="8,12", layers="3", mlp_dim="128")
    for lean in searched.candidates:
        other = control(source, lean, calibrated=False)
        stage = other.shape.stages[0]
        assert (stage.heads, stage.head_dim, stage.depth) == (4, 16, 3) and other.control_of == lean.name
        assert built(source, other.shape) == other.parameters
        assert abs(other.parameters - lean.parameters) <= stage.depth * (2 * stage.width + 1) / 2
    only_depth = found(source, Budget(parameters=200_000), heads="4", layers="3", mlp_dim="256").candidates[0]
    assert control(source, only_depth, calibrated=False) is None


def test_a_controls_mlp_grows_alike_in_every_stage():
    source = open_source("volo-d3")  # MLPs of 768 and three times 1536; heads 8, 16, 16, 16
    (lean,) = found(source, Budget(10**9), heads="16", layers="1x", mlp_dim="900").candidates
    assert lean.more_heads  # in the first stage
    first, *others = control(source, lean, calibrated=False).shape.stages
    assert first.mlp_dim != 768 and all(abs(stage.mlp_dim - 2 * first.mlp_dim) <= 1 for stage in others)


def test_a_shape_of_just_the_budget_keeps_it():
    source = open_source("digits-vit")
    one = dict(heads="8", layers="3", mlp_dim="128")
    assert found(source, Budget(152_394), **one).candidates[0].parameters == 152_394
    with pytest.raises(UsageError, match=r"\b152,393\b"):
        found(source, Budget(152_393), **one)


def test_why_no_shape_is_left():
    digits = open_source("digits-vit")
    for source, space, says in (
        (digits, dict(heads="4", layers="6", mlp_dim="256"), "that of the source"),
        (open_source("bert-crammed"), dict(heads="20", layers="10", mlp_dim="1x"), r"\b768\b.*\b16, 24\b"),
        (digits, dict(heads="1/3x"), "^--heads .*digits-vit"),
        (digits, dict(mlp_dim="0x"), "^--mlp-dim "),
        (digits, dict(layers="1/5x,7/5x"), "^--layers "),
        (digits, dict(heads="1-50", layers="1-50", mlp_dim="1-50"), "100,000 shapes"),
    ):
        with pytest.raises(UsageError, match=says):
            found(source, Budget(), **space)


@pytest.mark.parametrize(
    ("text", "old", "expected"),
    [
        ("12", [4], ["12"]),
        ("12, 16", [4], ["12", "16"]),
        ("0x,1x", [4], ["4"]),
        ("6-8,12", [4], ["6", "7", "8", "12"]),
        ("1x,4/3x,3/2x,2x", [4], ["4", "6", "8"]),
        ("1.5x", [4, 8], ["6,12"]),
        ("16,16", [4, 8], ["16,16"]),
        ("1/3x", [4, 6], []),
    ],
    ids=["number", "space", "no-factor", "range", "factors", "stages", "twice", "none-whole"],
)
def test_lists_of_numbers(text, old, expected):
    assert list_values(text, "--heads", old) == expected


def test_the_usual_layers():
    assert usual_layers([6]) == ["6", "5", "4", "3", "2"]
    assert usual_layers([3]) == ["3", "2", "1"] and usual_layers([1]) == ["1"]
    assert usual_layers([20])[-1] == "5"  # a quarter
    assert usual_layers([2, 4]) == ["2,4", "2,3", "1,2", "1,1"]
    assert usual_layers([8, 8, 16, 4])[0] == "8,8,16,4" and "4,4,8,2" in usual_layers([8, 8, 16, 4])


@pytest.mark.parametrize("text", ["x", "0", "6-", "8-6", "0-3", "1-100001", "-3", "1/0x", "1e3", "", "2x3"])
def test_lists_that_are_none(text):
    with pytest.raises(UsageError, match="--layers"):
        list_values(text, "--layers", [6])


def test_budgets_in_words():
    for params, memory, latency, expected in (
        ("60M", "16GB", "5ms", Budget(60_000_000, 16_000_000_000, 5.0)),
        ("152,394", "1.5GiB", "0.01s", Budget(152_394, 1_610_612_736, 10.0)),
        ("7K", "3B", "2s", Budget(7_000, 3, 2000.0)),
        ("3G", "2TiB", "1 MS", Budget(3 * 10**9, 2 * 1024**4, 1.0)),
        ("70%", None, None, Budget(700)),
        ("-30%", None, None, Budget(700)),
    ):
        assert repr(Budget.parse(params, memory, latency, 1000)) == repr(expected)  # whole numbers, too
    wrong = {
        "--params": ("60X", "+10%", "100%", "0"),
        "--memory": ("16IB", "0.0GB", "16", "60M"),
        "--latency": ("1", "-1ms"),
    }
    for place, (flag, texts) in enumerate(wrong.items()):
        for text in texts:
            asked = [None, None, None]
            asked[place] = text
            with pytest.raises(UsageError, match=rf"^{flag}\b"):
                Budget.parse(*asked, 100)
    with pytest.raises(UsageError, match="needs a budget"):
        Budget.parse(None, None, None, 100)


def test_a_limit_measures_no_shape_that_covers_one_that_was_too_much():
    source = open_source("digits-vit")
    candidates = found(source, Budget(parameters=10**9), heads="4,8", layers="2-4", mlp_dim="128,256").candidates
    asked = []

    def cost(candidate):
        asked.append(candidate)
        return candidate.parameters

    limit = Limit(110_000, cost)
    by_size = sorted(candidates, key=lambda c: c.parameters)
    assert [limit.fits(c) for c in by_size] == [c.parameters <= 110_000 for c in by_size]
    assert len(asked) < len(candidates)
    assert covers(by_size[-1].shape, by_size[0].shape) and not covers(by_size[0].shape, by_size[-1].shape)
