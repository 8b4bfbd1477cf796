"""What `shrink` shows of its choices, from records written by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.report.tables.cut import decided_table
from leansurgeon.words import ranges


def candidate(kept, criterion, score, *, attention=False, later=False) -> dict:
    found = {"kept": kept, "criterion": criterion, "attention": attention, "later": later}
    return found | {"guard_error": 2 * score, "guard_divergence": score, "judged_by": score}


REFIT = {"down": {"kept": True}, "o": {"kept": False}}
FAR = list(range(0, 60, 2))  # a list that no column holds
RECORD = {
    "candidates": [
        candidate([0, 1, 2, 5], "angular, two blocks", 0.25),
        candidate(FAR, "influence", 0.5),
        candidate([0, 1, 2, 5], "angular, two blocks", 0.125, attention=True, later=True),
        candidate([0, 1, 2, 5], "angular, two blocks", 0.1875),
    ],
    "layers": [0, 1, 2, 5],
    "healing": {"attention": True, "later": True},
    "decisions": [
        {"layer": 2, "from": 2, "until": 4, "heads": {"kept": [0, 1, 3]}, "refit": REFIT, "error_after": 0.0625},
        {"layer": 3, "from": 5, "until": 5, "mlp": {}, "refit": "no linear way to the output", "fit": {"kept": True}},
    ],
    "kept_heads": {"2": [0, 1, 3]},
}


def test_every_choice_stands_there_with_its_numbers():
    lines = decided_table(Decisions.from_dict(RECORD)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    taken = [line.split() for line in lines if line.startswith("*")]
    assert taken == [["*", "0-2,", "5", "angular,", "two", "blocks", "attention,", "later", "all", "0.1250"]]
    assert sum(line.strip().startswith("0-2, 5") for line in lines) == 2 and "0.5000" in "".join(lines)
    layer = next(line.split() for line in lines if line.startswith("2 "))
    assert layer == ["2", "2-4", "heads", "0-1,", "3", "down", "0.0625"]
    assert any(line.split() == ["3", "5", "MLP", "trimmed"] for line in lines)
    assert "source layer" not in "".join(lines)  # the heads stand with their layers


@pytest.mark.parametrize("record", [{}, {"calibration": {}}, {"candidates": RECORD["candidates"][:1]}])
def test_where_nothing_was_left_open_nothing_is_said(record):
    assert decided_table(Decisions.from_dict(record)) == ""


def test_every_set_of_numbers_is_written_as_runs_that_do_not_touch():
    for chosen in range(2**7):
        numbers = [i for i in range(7) if chosen >> i & 1]
        runs = [[int(end) for end in run.split("-")] for run in ranges(numbers).split(", ") if run]
        assert [i for run in runs for i in range(run[0], run[-1] + 1)] == numbers
        assert all(first[-1] + 1 < second[0] for first, second in pairwise(runs))
