"""`leansurgeon bench` on tiny models: rows, backends, verdicts, and what is kept in a run folder."""

from __future__ import annotations

import re

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.costs import bench
from leansurgeon.measure.costs.flops import closed_form
from leansurgeon.measure.costs.speed import Timing
from tests.cli.answers import document, read, stderr_of, typed, works
from tests.support.models.strangers import halved

TIMED = ("step", "forward_1", "forward")


def test_a_sweep_has_both_kinds_of_heads_and_every_backend_that_runs():
    found = document("bench digits-vit --sweep-heads 2,8 --rounds 2 --batch 4 --cpu")
    shapes = [(r["shape"]["stages"][0]["heads"], r["shape"]["stages"][0]["head_dim"]) for r in found["rows"]]
    assert shapes[0] == (4, 16)
    assert shapes[-4:] == [(2, 16), (2, 32), (8, 16), (8, 8)]
    backends = [r["backend"] for r in found["rows"]]
    assert {"auto", "math", "flash", "eager"} <= set(backends)
    assert any("cudnn" in text for text in found["skipped"])  # no such kernel on a CPU
    # At the same width heads have no parameters; at the same head_dim they do.
    count = {shape: r["parameters"] for shape, r in zip(shapes, found["rows"], strict=True)}
    assert count[8, 8] == count[4, 16] == count[2, 32] < count[8, 16]
    for row in found["rows"]:
        seconds = row["seconds"]["step"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
        assert row["training_per_second"] == pytest.approx(4 / seconds["median"])
        assert row["seconds"]["forward_1"]["median"] > 0 and row["seconds"]["forward"]["median"] > 0
        assert row["peak_memory"] > 4 * row["parameters"] * 3  # weights and two moments at least


def test_unfused_attention_takes_the_memory_of_its_scores():
    """fashion-vit: one matrix of weights for every head and layer stays for the backward pass."""
    source = open_source("fashion-vit")
    found = document("bench fashion-vit --backends math,flash --rounds 2 --batch 32 --cpu")
    peaks = {row["backend"]: row["peak_memory"] for row in found["rows"]}
    stage = source.shape.stages[0]
    tokens = closed_form(source.specs, source.shape, source.config, source.architecture).tokens
    scores = 32 * stage.depth * stage.heads * tokens * tokens * 4
    assert 0.9 * scores < peaks["math"] - peaks["flash"] < 2.5 * scores
    assert peaks["auto"] == peaks["flash"]


def test_table_fits_and_a_run_folder_keeps_the_result(tmp_path, saved):
    """Of a cut, which is held against its shape before surgery."""
    folder, _ = saved("bert")
    home = tmp_path / ("a-name-that-is-wider-than-a-terminal-" * 3) / "run"
    halved(home / "model", folder)
    (home / "recipe.yaml").write_text("version: 1\n")
    found = works(f"bench {home} --rounds 2 --batch 2 --tokens 16 --backends none --cpu")
    assert max(map(len, found.stdout.splitlines())) <= 80
    kept = read(home / "bench.json")
    assert kept["load"] == {"batch": 2, "tokens": 16, "precision": "fp32", "rounds": 2}
    own, before = kept["rows"]
    assert before["name"] == "before surgery" and before["shape"]["stages"][0]["depth"] == 4
    assert kept["unit"] == "tokens" and own["training_per_second"] == 2 * 16 / own["seconds"]["step"]["median"]


def timing(*seconds: float) -> dict[str, Timing]:
    return dict.fromkeys(TIMED, Timing.of(list(seconds)))


def row(name: str, ratios: list[float], head_dim: int = 64, parameters: int = 10) -> bench.BenchRow:
    shape = open_source("digits-vit").shape.with_(head_dim=head_dim)
    contender = bench.Contender(name, {}, None, shape)
    return bench.BenchRow(contender, parameters, timing(*ratios), 0, 1, Timing.of(ratios))


def test_verdicts_need_the_middle_half_of_the_rounds():
    assert row("a", [0.8, 0.9, 0.95, 0.99]).verdict == "faster"
    assert row("a", [0.8, 0.9, 1.05, 1.1]).verdict == "same"
    assert row("a", [1.05, 1.1, 1.2]).verdict == "slower"


def test_remarks_name_cuts_that_are_not_faster():
    rows = [row("own", [1, 1]), row("less", [1.1, 1.15, 1.2], 20, 5), row("before surgery", [0.9, 1.0, 1.1], 32)]
    first, second = bench.remarks(rows)
    assert re.search(r"^less will not .*faster", first, re.S) and "with fewer parameters" in first
    assert re.search(r"not shown.*faster.*before surgery", second, re.S)
    # The first row is the cut, and the step of the other one stands in the ratio.
    for ratios, words in (([1.2, 1.3, 1.4], "is faster than"), ([0.7, 0.8, 0.9], "is slower than")):
        (told, *_) = bench.remarks([rows[0], row("before surgery", ratios)])
        assert told.startswith(f"This cut {words} ")


def test_heads_that_do_not_divide_are_named_and_left_out(saved):
    shared = open_source(str(saved("llama")[0]))  # 4 heads share 2 keys
    assert "3 heads cannot share 2" in bench.contenders(shared, [3])[1][0]
    found, skipped = bench.contenders(open_source("digits-vit"), [3])
    assert [c.shape.stages[0].heads for c in found] == [4, 3]  # at the same head_dim only
    assert re.search(r"\b64\b.*\b3\b", skipped[0], re.S)


@pytest.mark.parametrize(
    ("words", "says"),
    [("--sweep-heads a,8", "such as 8,12,24"), ("--sweep-heads=-3", "such as 8,12,24"), ("--backends triton", "math")],
)
def test_what_cannot_be_timed_is_refused(words, says):
    done = typed(f"bench digits-vit {words} --cpu")
    assert done.returncode == 2 and says in stderr_of(done), done.stderr
