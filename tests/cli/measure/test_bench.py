"""`leansurgeon bench` on tiny models: rows, backends, verdicts, and what is kept in a run folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.checkpoints.source import open_source
from leansurgeon.cli.main import app
from leansurgeon.errors import UsageError
from leansurgeon.measure.costs import bench, speed
from leansurgeon.measure.costs.flops import closed_form
from leansurgeon.measure.costs.memory import Setting
from leansurgeon.measure.costs.speed import Timing

TIMED = ("step", "forward_1", "forward")


def run(*arguments: str):
    found = CliRunner().invoke(app, ["bench", *arguments])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def test_a_sweep_has_both_kinds_of_heads_and_every_backend_that_runs():
    found = run("digits-vit", "--sweep-heads", "2,8", "--rounds", "2", "--batch", "4", "--cpu", "--json")
    document = json.loads(found.stdout)
    shapes = [(r["shape"]["stages"][0]["heads"], r["shape"]["stages"][0]["head_dim"]) for r in document["rows"]]
    assert shapes[0] == (4, 16)
    assert shapes[-4:] == [(2, 16), (2, 32), (8, 16), (8, 8)]
    backends = [r["backend"] for r in document["rows"]]
    assert {"auto", "math", "flash", "eager"} <= set(backends)
    assert any("cudnn" in text for text in document["skipped"])  # no such kernel on a CPU
    # At the same width heads have no parameters; at the same head_dim they do.
    count = {shape: r["parameters"] for shape, r in zip(shapes, document["rows"], strict=True)}
    assert count[8, 8] == count[4, 16] == count[2, 32] < count[8, 16]
    for row in document["rows"]:
        seconds = row["seconds"]["step"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
        assert row["training_per_second"] == pytest.approx(4 / seconds["median"])
        assert row["peak_memory"] > 4 * row["parameters"] * 3  # weights and two moments at least


def test_unfused_attention_takes_the_memory_of_its_scores():
    """fashion-vit: one matrix of weights for every head and layer stays for the backward pass."""
    source = open_source("fashion-vit")
    found = run("fashion-vit", "--backends", "math,flash", "--rounds", "2", "--batch", "32", "--cpu", "--json")
    peaks = {row["backend"]: row["peak_memory"] for row in json.loads(found.stdout)["rows"]}
    stage = source.shape.stages[0]
    tokens = closed_form(source.specs, source.shape, source.config, source.architecture).tokens
    scores = 32 * stage.depth * stage.heads * tokens * tokens * 4
    assert 0.9 * scores < peaks["math"] - peaks["flash"] < 2.5 * scores
    assert peaks["auto"] == peaks["flash"]


def test_table_fits_and_a_run_folder_keeps_the_result(tmp_path, saved):
    folder, _ = saved("bert")
    home = tmp_path / ("a-name-that-is-wider-than-a-terminal-" * 3) / "run"
    (home / "model").mkdir(parents=True)
    for file in folder.iterdir():
        (home / "model" / file.name).write_bytes(file.read_bytes())
    (home / "recipe.yaml").write_text("version: 1\n")
    found = run(str(home), "--rounds", "2", "--batch", "2", "--tokens", "16", "--backends", "none", "--cpu")
    assert max(map(len, found.stdout.splitlines())) <= 80
    kept = json.loads((home / "bench.json").read_text())
    assert kept["load"] == {"batch": 2, "tokens": 16, "precision": "fp32", "rounds": 2}
    assert kept["unit"] == "tokens"


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
    unclear = bench.remarks([rows[0], row("other", [0.9, 1.1, 1.2])])
    assert re.search(r"^other is not .*faster.*\b1\.10 x", unclear[0], re.S)
    said = bench.remarks(rows)
    assert re.search(r"^less will not .*faster", said[0], re.S) and "with fewer parameters" in said[0]
    assert re.search(r"not shown.*faster.*before surgery", said[1], re.S)
    assert len(said) == 2
    # The first row is the cut, and the step of the other one stands in the ratio.
    for ratios, words in (([1.2, 1.3, 1.4], "is faster than"), ([0.7, 0.8, 0.9], "is slower than")):
        (said, *_) = bench.remarks([rows[0], row("before surgery", ratios)])
        assert said.startswith(f"This cut {words} ")


def test_the_same_width_is_the_inner_one():
    shape = open_source("digits-vit").shape.with_(head_dim=32)  # 4 heads: 128 in all, and the model is 64 wide
    assert bench.same_width(shape, 8).stages[0].head_dim == 16
    assert bench.same_head_dim(shape, 8).stages[0].head_dim == 32


def test_shared_key_value_heads_stay_where_they_can_be_shared():
    shape = open_source("digits-vit").shape.with_(heads=4, kv_heads=2)
    assert bench.same_head_dim(shape, 8).stages[0].kv_heads == 2
    with pytest.raises(UsageError, match="3 heads cannot share 2"):
        bench.same_head_dim(shape, 3)
    full = bench.same_head_dim(open_source("digits-vit").shape, 8)
    assert full.stages[0].kv_heads == 8


def test_a_step_that_is_timed_trains():
    source = open_source("digits-vit")
    made = speed.TimedModel(source.config, source.architecture, Setting(2, 1, "fp32"), "auto", torch.device("cpu"))
    before = [p.detach().clone() for p in made.model.parameters()]
    made.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert all(p.grad is None for p in made.model.parameters())


def test_quartiles_are_numpys():
    seconds = [5.0, 1.0, 2.0, 9.0, 4.0]
    found = Timing.of(seconds)
    assert [found.low, found.median, found.high] == np.percentile(seconds, [25, 50, 75]).tolist()


def test_what_is_timed_under_which_name():
    calls = []
    model = SimpleNamespace(
        device=torch.device("cpu"),
        single="one",
        large="many",
        step=lambda: calls.append("step"),
        forward=calls.append,
    )
    (times,) = speed.time_benches([model], 3)
    assert calls == ["step", "one", "many"] * (3 + speed.WARM_UP)
    assert list(times) == ["step", "forward_1", "forward"] and all(len(t.seconds) == 3 for t in times.values())


@pytest.mark.parametrize(("inputs", "units"), [("input_ids", 8 * 16), ("pixel_values", 8)])
def test_ratios_are_those_of_the_first_row_and_text_is_counted_in_tokens(monkeypatch, inputs, units):
    """The second model takes half of the first one's step in every round, however noisy the rounds are."""
    source = open_source("digits-vit")
    (own,), _ = bench.contenders(source, [])
    rounds = [1.0, 3.0, 2.0]
    monkeypatch.setattr(
        speed, "TimedModel", lambda *_: SimpleNamespace(model=torch.nn.Linear(3, 1), large={inputs: None})
    )
    monkeypatch.setattr(speed, "runs", lambda _: None)
    monkeypatch.setattr(
        speed,
        "time_benches",
        lambda *_: [dict.fromkeys(TIMED, Timing.of([s * t for t in rounds])) for s in (1.0, 0.5)],
    )
    monkeypatch.setattr(speed, "peaks", lambda *_: [7, 5])
    first, second = bench.time_contenders([own, own], Setting(8, 16, "fp32"), [], 3, "cpu", lambda _: None)[0]
    assert first.against_first.seconds == (1, 1, 1) and second.against_first.seconds == (0.5, 0.5, 0.5)
    assert (second.verdict, second.parameters, second.peak) == ("faster", 4, 5)
    assert second.as_dict()["training_per_second"] == units / 1.0


def test_the_shape_before_surgery_takes_part():
    source = open_source("digits-vit")
    before = source.shape.with_(depth=7)
    record = SurgeryRecord.from_dict({"source": {"name": "x"}, "plan": {"before": before.as_dict()}})
    cut = replace(source, record=record)
    found, _ = bench.contenders(cut, [])
    assert [c.name for c in found][1:] == ["before surgery"]
    assert found[1].architecture.shape(found[1].config) == before


def test_heads_that_do_not_divide_are_named_and_left_out():
    found, skipped = bench.contenders(open_source("digits-vit"), [3])
    assert [c.shape.stages[0].heads for c in found] == [4, 3]  # at the same head_dim only
    assert re.search(r"\b64\b.*\b3\b", skipped[0], re.S)


@pytest.mark.parametrize("text", ["0", "a,8", "8,,12", "-3"])
def test_bad_sweeps_are_refused(text):
    with pytest.raises(UsageError, match="such as 8,12,24"):
        bench.parse_sweep(text)


def test_unknown_backends_are_refused():
    with pytest.raises(UsageError, match="known are math"):
        run("digits-vit", "--backends", "triton", "--cpu")
