"""`leansurgeon search` on tiny models: by heals, by trainings, ended and gone on with."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from leansurgeon.checkpoints.source import open_source
from leansurgeon.cli.main import app
from leansurgeon.errors import UsageError
from leansurgeon.measure.costs.memory import Setting
from leansurgeon.search import cheap, outcome
from leansurgeon.search.outcome import who_is_tried
from leansurgeon.search.space import Budget, Space, enumerate_shapes
from leansurgeon.search.trainings import forget_weights
from leansurgeon.surgery import shrink
from tests.support.processes.forks import trainings_forked

# About a tenth of a second for each heal.
DATA = ["--data", "task:digits", "--samples", "64"]


def call(*arguments, capsys):
    """The command in this process; its one JSON document."""
    app([str(a) for a in arguments], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in; memory is the number of parameters, and nothing is reloaded for a proof."""
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outcome, "training_memory", lambda source, shape, setting: shape.depth * 1000)
    monkeypatch.setattr(shrink, "prove_result", lambda *_: None)
    return tmp_path


def test_a_search_by_heals_finds_writes_and_says_what_shrink_does(here, saved, capsys):
    source, _ = saved("vit")  # 4 layers x 4 heads of 8, width 32, MLP 48
    asked = ["search", source, "--params", "30k", "--tries", "3", *DATA]
    found = call(*asked, "--json", "-o", here / "winner", capsys=capsys)
    rows = {row["name"]: row for row in found["candidates"]}
    assert [r["candidates"] for r in found["rungs"]] == [3, 2] and [r["share"] for r in found["rungs"]] == ["1/2", "1"]
    winner = rows[found["winner"]]
    assert winner["cheap"]["parameters"] <= 30_000 and found["source_row"] == "h4-l4-m48"
    tried = [row for row in rows.values() if "1/2" in row["scores"]]
    assert len(tried) == 3 and any(row["shape"]["stages"][0]["heads"] == 4 for row in tried)  # depth alone is tried
    assert all(row["cheap"]["influence"] and row["cheap"]["kappa"] and row["cheap"]["memory"] for row in tried)
    final = [row for row in rows.values() if row["scores"].get("1") and row["name"] != "h4-l4-m48"]
    assert all(row["control_of"] or row in tried for row in final)
    assert winner["scores"]["1"]["value"] == max(row["scores"]["1"]["value"] for row in final)
    assert set(found["untouched"]) >= {found["winner"], "h4-l4-m48"}
    # What is written is what the printed command makes.
    app([*shlex.split(found["command"])[1:], "-o", str(here / "again"), "--no-proof"], standalone_mode=False)
    capsys.readouterr()
    ours, theirs = (load_file(f"{folder}/model.safetensors") for folder in (found["written"], here / "again"))
    assert ours.keys() == theirs.keys() and all((ours[k] == theirs[k]).all() for k in ours)
    # The same call takes everything over, and text fits a terminal.
    files = {path: path.stat().st_mtime_ns for path in here.glob("runs/search/*/heals/*")}
    app([str(a) for a in asked], standalone_mode=False)
    text = capsys.readouterr()
    assert re.search(r"search.*--force\b", text.err, re.S)
    assert {path: path.stat().st_mtime_ns for path in here.glob("runs/search/*/heals/*")} == files
    lines = [line for line in text.out.splitlines() if not line.startswith(("  leansurgeon", "The search"))]
    assert max(map(len, lines)) <= 80 and "Kendall's tau" in text.out and "\n  leansurgeon shrink " in text.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["kill", "term", "int"]
)
def test_a_search_that_was_ended_goes_on_to_the_same_end(number, code, here, saved, capsys):
    source, _ = saved("vit")
    asked = ["search", source, "--params", "30k", "--tries", "2", *DATA, "--json", "--workspace"]
    command = [sys.executable, "-m", "leansurgeon", *map(str, asked), "killed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)
    end = time.monotonic() + 300
    while not (done := sorted(here.glob("killed/search/*/heals/h*.json"))) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == code and "Traceback" not in said
    assert code < 0 or re.search(r"\bsame command\b", said, re.S)
    assert not list(here.glob("killed/search/*/search.json"))
    before = {path: path.stat().st_mtime_ns for path in done}
    resumed = call(*asked, "killed", capsys=capsys)
    assert before and all(path.stat().st_mtime_ns == time for path, time in before.items())
    whole = call(*asked, "whole", capsys=capsys)
    assert {k: v for k, v in resumed.items() if k != "folder"} == {k: v for k, v in whole.items() if k != "folder"}


def test_a_search_by_trainings_trains_controls_and_source_on_the_last_rung(here, capsys):
    short = ["--set", "train.duration=4st", "--set", "train.log_every=1", "--heads", "4,8"]
    asked = ["search", "digits-vit", "--params", "160k", "--layers", "2", "--mlp-dim", "128", "--tries", "2"]
    with trainings_forked():
        found = call(*asked, *short, "--json", capsys=capsys)
    rows = {row["name"]: row for row in found["candidates"]}
    assert found["mode"] == "training" and found["rungs"] == [{"share": "1", "candidates": 2}]
    (control,) = [name for name, row in rows.items() if row["control_of"] == "h8-l2-m128"]
    assert set(rows) == {"h8-l2-m128", "h4-l2-m128", control, "h4-l6-m256"}
    for name, row in rows.items():
        (path,) = here.glob(f"runs/search/*/rung1/{name}-s0/summary.json")
        run = json.loads(path.read_text())
        assert run["steps"] == 1  # a quarter of four
        assert run["model"]["parameters"] == row["cheap"]["parameters"]
        assert run["final"]["metric"] == row["scores"]["1"]["value"]
    assert found["command"].startswith("leansurgeon shrink digits-vit --heads")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "needs a budget"),
        (["--params", "160k", "--data", "x.txt"], r"\brecipe\b.*--data\b"),
        (["--params", "1k"], "has 302,154 parameters"),
        (["--params", "160k", "--heads", "5x5"], "--heads 5x5"),
        (["--params", "160k", "--recipe", "digits-vitt"], "no recipe 'digits-vitt'"),
        (["--params", "160k", "--out", "/dev/null/winner"], "/dev/null is a file"),  # before anything is trained
    ],
    ids=["budget", "data", "too-small", "heads", "recipe", "out"],
)
def test_bad_questions_get_one_sentence(flags, says, here):
    with pytest.raises(UsageError, match=says):
        app(["search", "digits-vit", *flags], standalone_mode=False)


def tried(budget, folder, monkeypatch):
    """Who is tried of the digits ViT's shapes, the latency being the number of layers in milliseconds; and the shapes
    whose latency was asked for.
    """
    asked = []
    monkeypatch.setattr(outcome, "latency", lambda _, shape, tokens=None: asked.append(shape) or float(shape.depth))
    source = open_source("digits-vit")
    found = enumerate_shapes(source, Space(), budget, init="fresh", calibrated=False)
    numbers = cheap.scores(source, found.candidates, None)
    ranked = cheap.order(found.candidates, numbers)
    picked, _ = who_is_tried(source, ranked, numbers, budget, folder, Setting(), 4, lambda _: None)
    return picked, asked


def test_limits_hold_and_are_measured_once(here, monkeypatch):
    budget = Budget(10**6, 4500, 3.0)
    picked, asked = tried(budget, here, monkeypatch)
    assert len(picked) == 4 and all(c.shape.depth <= 3 for c in picked)
    assert asked and not any(shape.depth > 4 for shape in asked)  # memory had refused them
    again, asked = tried(budget, here, monkeypatch)  # a search that goes on tries the same
    assert [c.name for c in again] == [c.name for c in picked] and not asked


def test_limits_that_nothing_keeps_are_said_with_both_numbers(here, monkeypatch):
    with pytest.raises(UsageError, match=r"--memory.*\b06\b.*GB.*\b06\b.*GB"):
        tried(Budget(None, 1000, None), here, monkeypatch)
    with pytest.raises(UsageError, match=r"--latency.*\b1\b.*\b2\b"):
        tried(Budget(None, None, 1.0), here, monkeypatch)


def test_a_dry_run_lists_what_fits(here, capsys):
    found = call("search", "vit-b", "--params", "60M", "--dry-run", "--json", capsys=capsys)
    assert all(row["parameters"] <= 60e6 for row in found["candidates"]) and len(found["candidates"]) > 20


def test_models_of_an_early_rung_are_not_kept(tmp_path):
    job = SimpleNamespace(start=tmp_path / "starts" / "a", run=tmp_path / "a")
    for folder in (job.start, job.run / "model", job.run / "last"):
        folder.mkdir(parents=True)
    (job.run / "summary.json").write_text("{}")
    forget_weights(job)
    assert [p.name for p in job.run.iterdir()] == ["summary.json"] and not job.start.exists()
