"""The tables of `leansurgeon heads`, from a study of ten heads whose figures are all different."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from leansurgeon.report.tables.heads import ablation, curve, importance_map

IMPORTANCE = [[3.0, 1.0, 10.0, 7.0, 5.0], [2.0, 4.0, 6.0, 8.0, 9.0]]


def off(number: int) -> dict[str, float]:
    """Of the ten heads, the loss without one falls from 1.0 (the first) to 0.1."""
    change = (10 - number) / 10
    figures = {"change": change, "standard_error": change / 20, "accuracy_change": -change / 5}
    return figures | {"p": number / 1000, "p_holm": (10 + number) / 100}


@pytest.fixture
def document() -> dict[str, Any]:
    layers = [
        {"kind": "self", "stage": 0, "layer": i, "heads": 5, "importance": values}
        | {"off": [off(5 * i + h) for h in range(5)]}
        for i, values in enumerate(IMPORTANCE)
    ]

    def points(*scores: float) -> list[dict[str, float]]:
        return [{"fraction": i / 2, "loss": x, "accuracy": x / 10} for i, x in enumerate(scores)]

    orders = {"importance": points(4.0, 3.8, 2.0), "reverse": points(4.0, 1.0, 2.0)}
    able = {"importance": 0.5, "reverse": 0.0}
    return {
        "attentions": layers,
        "kinds": {"self": {"heads": 10, "share": 1.0}},
        "samples": {"ablation": 50, "curve": 40},
        "whole": {"loss": 4.0, "accuracy": 0.4},
        "judged_by": "loss of a sample",
        "text": False,
        "ablation": {
            "whole": {"loss": 4.0, "accuracy": 0.4}, "test": "paired t", "heads": 10, "worse": 6, "better": 2,
            "spearman": 0.75,
        },
        "curve": {"orders": orders, "prunable": able, "by_kind": {}},
    }  # fmt: skip


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of the first table."""
    start = next(i for i, line in enumerate(lines) if line.startswith("--")) + 1
    rows = []
    for line in lines[start:]:
        if not line or not (line[0].isdigit() or line[0] == " "):
            break
        rows.append(line.split())
    return rows


def test_a_digit_is_the_tenth_of_all_heads_and_shares_are_of_all_importance(document):
    """Ten values from 1 to 10, so that their tenths are their ranks; they add up to 55."""
    assert cells(importance_map(document)) == [
        ["1", "20964", "47.3", "%", "3", "(18.2", "%)"],
        ["2", "13578", "52.7", "%", "5", "(16.4", "%)"],
    ]


def test_single_heads_stand_by_what_is_lost_without_them_with_the_corrected_p(document):
    lines = ablation(document)
    expected = []
    for n in range(10):
        change = (10 - n) / 10
        place = [str(n // 5 + 1), str(n % 5 + 1)]
        expected.append(
            [*place, f"+{change:.4f}", f"{change / 20:.4f}", f"{(10 + n) / 100:.3f}", f"{-20 * change:+.1f}"]
        )
    assert cells(lines) == expected
    text = " ".join(lines)
    assert re.search(r"\b10 heads 6\b.*\b2\b.*\(paired t\)", text, re.S) and "importance: 0.75" in text


def test_few_of_many_heads_are_named_the_ends_of_the_order(document):
    document["attentions"] *= 2
    shown = [row[2] for row in cells([line for line in ablation(document) if "in between" not in line])]
    changes = [f"+{(10 - n) / 10:.4f}" for n in range(10) for _ in range(2)]
    assert shown == changes[:6] + changes[-6:]
    assert "... 8 heads in between ..." in ablation(document)


def test_a_curve_is_accuracy_in_percent(document):
    lines = curve(document)
    assert cells(lines) == [
        ["0", "%", "40.0", "40.0"],
        ["50", "%", "38.0", "10.0"],
        ["100", "%", "20.0", "20.0"],
    ]
    assert "least 50 %, most 0 %" in " ".join(lines)


def test_a_curve_of_text_is_a_perplexity(document):
    del document["whole"]["accuracy"]
    for points in document["curve"]["orders"].values():
        for point in points:
            for key in [key for key in point if key.startswith("accuracy")]:
                del point[key]
    rows = cells(curve(document | {"text": True}))
    e = [f"{math.exp(x):.1f}" for x in (3.8, 1.0)]
    assert rows[1] == ["50", "%", *e]
    assert cells(curve(document))[1] == ["50", "%", "3.800", "1.000"]
