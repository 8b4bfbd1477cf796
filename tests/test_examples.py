"""Every example runs and says what is true: what it prints is held to numbers that it did not make."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 (once for every forked example)
import transformers  # noqa: F401

from tests.support.processes.forks import forked, trainings_forked

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", line.replace(",", ""))]


def shrunk(out: str) -> None:
    """Three of six layers of a Llama of width 64 with 8 heads of 16, counted by hand: q, o; k, v; MLP; norms."""
    layer = 2 * 64 * 128 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert f"{2 * 256 * 64 + 3 * layer + 64:,} parameters" in out


def theorem(out: str) -> None:
    """kappa of a Gaussian block is near (1 + r) / (1 - r), with r the root of the smaller over the larger side."""
    rows = [numbers(line) for line in out.splitlines() if len(numbers(line)) == 5 and "peak" not in line]
    assert len(rows) == 14  # and one whose sides are equal, where the formula is infinite
    for tokens, heads, ratio, kappa, _ in rows:
        assert ratio == pytest.approx(heads * 64 / tokens, abs=0.006)
        r = min(ratio, 1 / ratio) ** 0.5
        if r < 0.9:
            assert kappa == pytest.approx((1 + r) / (1 - r), rel=0.2)


def kappas(out: str) -> None:
    """The paper: kappa falls with heads. One row for every number of heads, six layers in each."""
    rows = [line.split(")")[-1].split() for line in out.splitlines() if "heads of 16" in line]
    assert [len(row) for row in rows] == [6] * 4
    first = [float(row[0]) for row in rows]
    assert first == sorted(first, reverse=True)


def retrieval(out: str) -> None:
    """D = 2 needs two heads: one leaves an error that is many times larger."""
    d, one, two = numbers(out.splitlines()[-1])
    assert d == 2 and 0 <= two < one / 5


def usage(out: str) -> None:
    assert "python examples/sentiment_data.py" in out


SAYS = {
    "shrink_a_checkpoint": shrunk,
    "theorem_3_2": theorem,
    "kappa_of_a_model": kappas,
    "d_retrieval": retrieval,
    "sentiment_data": usage,
}


def test_every_example_is_held_to_something():
    assert set(SAYS) == {path.stem for path in EXAMPLES}


def run(path: Path) -> None:
    """`python PATH`, without arguments; processes that it starts are forks of it."""
    sys.argv = [str(path)]
    with trainings_forked():
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs_and_is_right(path, tmp_path):
    assert len(path.read_text().splitlines()) < 60
    done = forked(lambda: run(path), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    SAYS[path.stem](done.stdout.strip())
