"""The verdict on a cut in plain words, and the words and rows that stand in its tables."""

from __future__ import annotations

import math
import re

import pytest

from leansurgeon.checkpoints.record import Comparison, Embeddings, PairedFigure
from leansurgeon.report.tables import cut
from leansurgeon.shape import Shape, Stage
from leansurgeon.words import WIDTH, wrap


def shape(**changes) -> Shape:
    whole = {"depth": 12, "heads": 6, "head_dim": 16, "kv_heads": 6, "mlp_dim": 384, "width": 96}
    return Shape((Stage(**whole | changes),))


def numbers(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"\d[\d,]*\.?\d*", text)]


CASES = {
    "language": (
        shape(depth=8), Comparison(loss=PairedFigure(math.log(20.0), math.log(25.0)), relative_error=0.2), True, 0.25,
        [4, 25, 25.0, 20.0, 25.0],
    ),
    "no-cost": (
        shape(depth=8), Comparison(loss=PairedFigure(math.log(20.0), math.log(19.0)), relative_error=0.2), True, 0.25,
        [4, 19.0, 20.0, 25.0],
    ),
    "catastrophe": (
        shape(depth=4), Comparison(loss=PairedFigure(3.0, 3.0 + math.log(19.0)), relative_error=0.9), True, 0.5,
        [8, 19, 381.6, 20.1, 50.0],
    ),
    "accuracy": (
        shape(heads=12, kv_heads=12),
        Comparison(accuracy=PairedFigure(0.9, 0.875), loss=PairedFigure(1, 1), relative_error=0.1),
        False, -0.1, [12, 6, 2.5, 87.5, 90.0, 10.0],
    ),
    "embeddings": (
        shape(mlp_dim=192), Comparison(embeddings=Embeddings(0.9341, 0.8, 99, 0.9, 0.64, 10), relative_error=0.3),
        False, 0.2, [192, 384, 0.934, 64, 20.0],
    ),
    "outputs": (shape(depth=11), Comparison(relative_error=0.12, data="noise"), False, 0.05, [1, 12, 5.0]),
    "exact": (shape(heads=12, kv_heads=12, head_dim=8), Comparison(relative_error=1e-6), False, 0.0, [12, 6]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_says_what_went_what_it_costs_and_what_it_saves(case):
    after, compared, language, saved, wanted = CASES[case]
    told = cut.state_verdict(shape(), after, compared, language, saved)
    assert numbers(told) == wanted, told
    assert ("save" in told, "add" in told) == (saved > 0, saved < 0)
    assert ("no " in told or "nothing" in told) == (case in ("no-cost", "exact"))
    assert (("noise" in told) == (case == "outputs") and "held-out" in told) or case in ("outputs", "exact")
    assert all(len(line) <= WIDTH for line in wrap(told))


def test_the_words_of_the_tables_are_explained_where_they_stand():
    names = ["angular", "angular, second", "angular, two blocks", "block 3-8", "influence"]
    told = cut.explain(names, cut.CRITERIA)
    assert [told.count(f"{word}:") for word in ("angular", "block", "influence")] == [1, 1, 1]
    assert cut.explain(["as listed"], cut.CRITERIA) == "" == cut.explain([], cut.EXACTNESS)
    assert cut.explain(["near", "near", "exact"], cut.EXACTNESS).count(":") == 2
