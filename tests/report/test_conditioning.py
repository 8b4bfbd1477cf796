"""Kappa of an arm from two seeds, every figure another number: means, bounds and columns by hand."""

from __future__ import annotations

import re
from typing import Any

from leansurgeon.report.kappa import MATRICES, PRODUCTS, Bound, kappa_of
from leansurgeon.report.tables.kappa import tables

WEIGHTS = {"q": 21.0, "k": 22.0, "v": 23.0, "o": 24.0, "vo": 25.0, "qk": 26.0}


def layer(number: int, times: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A layer whose figures are all different; `times` tells seeds apart and `number` layers."""
    scale = times * number
    figures = {"mean": 11.0, "median": 12.0, "worst": 13.0, "centred_median": 14.0}
    figures |= {"stable_rank": 15.0, "effective_rank": 16.0, "aspect": 17.0}
    return (
        {key: scale * value for key, value in figures.items()}
        | {"layer": number, "median_lower_bound": None, "lower_bound": None, "centred_lower_bound": None}
        | {"rank": 9, "k": 9, "deficient": 0, "output": {"median": scale * 18.0, "median_lower_bound": None}}
        | {"jacobian": {"at_least": scale * 19.0, "exact": True, "probes": 4, "columns": 4, "samples": 2}}
        | {"weights": {key: {"value": scale * value, "lower_bound": None} for key, value in WEIGHTS.items()}}
        | changes
    )


def seed(layers: list[dict], **model: Any) -> dict[str, Any]:
    figures = {"mean": 31.0, "median": 32.0, "worst": 33.0, "centred_median": 34.0, "deficient": 0}
    figures |= {"lower_bound": None, "median_lower_bound": None}
    return {"samples": 8, "forward_dtype": "float32", "layers": layers, "model": figures | model}


def test_every_figure_is_the_mean_of_its_seeds():
    found = kappa_of([seed([layer(1), layer(2)]), seed([layer(1, 3.0), layer(2, 3.0)])])
    first, second = found.layers
    for one, scale in ((first, 2), (second, 4)):
        assert (one.mean, one.median, one.worst, one.centred) == tuple(Bound(scale * x) for x in (11, 12, 13, 14))
        assert (one.stable_rank, one.effective_rank, one.aspect) == (scale * 15, scale * 16, scale * 17)
        assert (one.output, one.jacobian) == (Bound(scale * 18), Bound(scale * 19))
        assert one.weights == {key: Bound(scale * value) for key, value in WEIGHTS.items()}
    assert (found.mean, found.median, found.worst, found.centred) == tuple(map(Bound, (31, 32, 33, 34)))


def test_what_one_seed_only_bounds_is_a_bound_with_its_own_figure_in_it():
    lost = {"median": None, "median_lower_bound": 1e6, "worst": None, "lower_bound": 2e6}
    lost |= {"centred_median": None, "centred_lower_bound": 4e6, "deficient": 1, "rank": 7}
    broken = layer(1, **lost, output={"median": None, "median_lower_bound": 8e6})
    broken["jacobian"] |= {"exact": False}
    broken["weights"] |= {"vo": {"value": None, "lower_bound": 9e6}}
    found = kappa_of(
        [seed([layer(1)]), seed([broken], median=None, worst=None, median_lower_bound=3e6, lower_bound=5e6)]
    )
    one = found.layers[0]
    assert one.median == Bound((12 + 1e6) / 2, False) and one.worst == Bound((13 + 2e6) / 2, False)
    assert one.centred == Bound((14 + 4e6) / 2, False) and one.output == Bound((18 + 8e6) / 2, False)
    assert one.jacobian == Bound(19.0, False) and one.mean == Bound(11.0, False)
    assert (one.rank, one.k) == (7, 9)
    assert one.weights["vo"] == Bound((25 + 9e6) / 2, False) and one.weights["qk"] == Bound(26.0)
    assert found.median == Bound((32 + 3e6) / 2, False) and found.worst == Bound((33 + 5e6) / 2, False)


def test_a_figure_that_a_seed_lacks_is_none_and_not_that_of_the_others():
    missing = layer(1, output=None, weights=None, jacobian=None, median=None, rank=None)
    one = kappa_of([seed([layer(1)]), seed([missing])]).layers[0]
    assert one.output is one.jacobian is one.median is one.weights["vo"] is None and one.worst == Bound(13.0)
    assert (one.rank, one.k) == (9, 9)
    second = kappa_of([seed([layer(1), layer(2)]), seed([layer(1)])]).layers[1]
    assert (second.layer, second.median, second.deficient) == (2, None, 0)


def test_the_model_is_the_median_of_its_layers():
    bounded = {"jacobian": layer(2)["jacobian"] | {"exact": False}}
    found = kappa_of([seed([layer(1), layer(2, **bounded), layer(9)])])
    assert (found.output, found.jacobian) == (Bound(36.0), Bound(38.0, False))  # and not the mean, 72 and 76


def test_every_column_holds_what_its_head_says():
    intervals = [{"median_interval": interval} for interval in ([11.5, 12.5], [23.0, 25.0])]
    document = seed([layer(n, **interval) for n, interval in enumerate(intervals, 1)])
    heads, _, *rows = tables(document)
    assert heads.split() == ["layer", "kappa", "95", "%", "worst", "centred", "rank", "lost", "stable", "eff.", "h*d/N"]
    assert rows[0].split() == ["1", "12", "12-12", "13", "14", "9/9", "0", "15.0", "16.0", "17.0"]
    assert rows[1].split() == ["2", "24", "23-25", "26", "28", "9/9", "0", "30.0", "32.0", "34.0"]
    document = seed([layer(1, kind="encoder"), layer(2, kind="cross")])
    heads, _, *rows = "\n".join(tables(document)).split("\n\n")[1].splitlines()
    assert heads.split("  ")[-1].strip() == "W_q' W_k" and heads.index("W_o W_v") < heads.index("W_q' W_k")
    names = ["A", *(f"W_{key}" for key in MATRICES), "A W_o", "Jacobian", "W_o W_v"]
    assert [heads.index(f" {name} ") for name in names] == sorted(heads.index(f" {name} ") for name in names)
    expected = [12, *(WEIGHTS[key] for key in MATRICES), 18, 19, *(WEIGHTS[key] for key in PRODUCTS)]
    assert rows[0].split() == ["encoder", "1", *(f"{x:.0f}" for x in expected)]
    assert rows[1].split() == ["cross", "1", *(f"{2 * x:.0f}" for x in expected)]


def test_notes_say_what_is_exact_and_where_kappa_peaks():
    def said(**changes: Any) -> str:
        document = seed([layer(1, **changes)])
        return " ".join(tables(document))

    few = layer(1)["jacobian"] | {"exact": False}
    assert re.search(r"\bexact\b", said(), re.S) and "a lower bound" in said(jacobian=few)
    near = "(Theorem 3.2)"
    assert [near in said(aspect=x) for x in (0.5, 0.9, 1.1, 2.0)] == [False, True, True, False]
