"""`run MODEL --data DATA`: from somebody's model and data to a comparison of original, lean and control."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import yaml

import leansurgeon
from leansurgeon.checkpoints.record import Comparison, PairedFigure
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.experiment import side_by_side, trials
from leansurgeon.experiment.trials import make_experiment, parse_variants
from leansurgeon.report import paired
from leansurgeon.report.rows import make_row
from leansurgeon.report.runs import read_run
from leansurgeon.training.runs.summary import Summary
from tests.support import command_line
from tests.support.models import strangers, word_models
from tests.support.processes.forks import trainings_forked
from tests.support.report.report_fixtures import summary

SHORT = ("--set", "train.duration=8st", "--set", "arms.lean.heal=closed")
MINE = ("mine", "--data", "reviews.csv")
REFUSED = (
    (MINE, "--heads 2x, --layers 4"),
    ((*MINE, "--variant", "a:head_dim=wide"), "a: head_dim wide: give auto, keep, split"),
    ((*MINE, "--variant", "a:heads=many"), "a: --heads many"),
    ((*MINE, "--layers", "9"), "lean: --layers 9 is more than the 4 layers"),
    ((*MINE, "--layers", "2", "--variant", "a:layers=2"), "--variant"),
    ((*MINE, "--layers", "2", "--time", "1s"), "too short"),
    ((*MINE, "--layers", "2", "--debug"), "--time 2m"),
    # Data and experiments are told apart.
    (("digits-vit", "--layers", "2"), "--data"),
    (("digits-vit", "--data", "reviews.csv", "--layers", "2"), "trained model"),
)


def timm_vit(folder):
    strangers.timm_vit(folder, 2)


def masked(folder):
    word_models.words(strangers.model(folder, "bert"), mask="<extra_id_7>")


def generative(folder):
    strangers.model(folder, "llama")


# Kind of sample: a name, how the model and its data are made, and the metric.
KINDS = {
    "classes": ("vit", timm_vit, strangers.pictures, "accuracy"),
    "neighbours": ("encoder", strangers.encoder, strangers.texts, "cosine"),
    "texts": ("llama", generative, strangers.texts, "per"),
    "masks": ("bert", masked, strangers.texts, "per"),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder in which a classifier was compared over two seeds, and what was printed."""
    folder = tmp_path_factory.mktemp("compared")
    strangers.classifier(folder / "mine", ("bad", "good"))
    strangers.reviews(folder / "reviews.csv", rows=240)
    words = ["run", "mine", "--data", "reviews.csv", "--heads", "8", "--layers", "2", "--seeds", "0,1", *SHORT]
    with trainings_forked():
        done = command_line.leansurgeon(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, words, done


def test_one_command_compares_original_lean_and_control(compared):
    folder, _, done = compared
    experiment = folder / "runs/mine-reviews"
    recipe = yaml.safe_load((experiment / "experiment.yaml").read_text())
    assert set(recipe["arms"]) == {"original", "lean", "control"} and recipe["cut_from"] == "source"
    for name, arm in recipe["arms"].items():  # each has the rate of the three that did best in its trials
        tried = {float(path.name.rpartition("-")[2]): path for path in experiment.glob(f"starts/{name}-rate-*")}
        scores = {rate: document_of(path)["final"] for rate, path in tried.items()}
        best = max(scores, key=lambda rate: (scores[rate]["metric"], -scores[rate]["loss"]))
        assert len(tried) == 3 and arm["train"]["optim"]["lr"] == best
    made = {(arm, seed): document_of(experiment / f"{arm}-s{seed}") for arm in recipe["arms"] for seed in (0, 1)}
    assert {one["steps"] for one in made.values()} == {8}
    ours, theirs = (made[arm, 0]["model"]["parameters"] for arm in ("lean", "control"))
    assert abs(ours / theirs - 1) < 0.01 and made["control", 0]["model"]["shape"]["stages"][0]["heads"] == 4
    starts = {made["lean", seed]["model"]["start"]["files"]["model.safetensors"] for seed in (0, 1)}
    assert len(starts) == 1  # cut once
    assert not list(experiment.glob("starts/*/model"))  # trials leave figures alone
    assert "3 arms (original, lean, control) x 2 seeds = 6 trainings of 8 steps" in " ".join(done.stderr.split())
    for words in ("size", "memory", "latency", "kappa", "95 %"):
        assert words in done.stdout
    said = " ".join(done.stdout.split())
    assert "held-out samples" in said and "in model/, the best of all evaluations" in said
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_same_command_goes_on(compared):
    """One arm is lost: it alone is trained again, and everything else is as it was."""
    folder, words, _ = compared
    run = folder / "runs/mine-reviews/lean-s1"
    before = document_of(run)
    shutil.rmtree(run)
    with trainings_forked():
        again = command_line.leansurgeon(*words, cwd=folder)
    assert again.returncode == 0 and "Resuming" in again.stderr and "5 trainings" in again.stderr
    assert "Trying" not in again.stderr and "cutting" not in again.stderr
    assert document_of(run)["test"] == before["test"]


def test_trials_by_other_settings_do_not_stand_in_the_way(compared, tmp_path):
    """A comparison that was left after its trials, and begins again with another batch: they are tried anew."""
    folder, words, _ = compared
    for name in ("mine", "reviews.csv"):
        (tmp_path / name).symlink_to(folder / name)
    shutil.copytree(folder / "runs/mine-reviews/starts", tmp_path / "runs/mine-reviews/starts")
    with trainings_forked():
        done = command_line.leansurgeon(*words, "--set", "train.batch=16", "--arms", "original", cwd=tmp_path)
    assert done.returncode == 0 and "Trying 3 learning rates" in done.stderr and "cutting" not in done.stderr


def test_the_page_shows_samples_that_changed(compared):
    folder, _, _ = compared
    experiment = folder / "runs/mine-reviews"
    document = document_of(experiment, "changes.json")
    assert document["kind"] == "classes" and document["classes"] == ["bad", "good"]
    for name, counts in document["confusion"].items():
        test = document_of(experiment / f"{name}-s0")["test"]
        right = np.trace(np.array(counts)) / np.sum(counts)
        assert np.sum(counts) == test["samples"] and right == pytest.approx(test["best"]["metric"])
    report = ["report", experiment, "--json", "--html", "page.html"]
    done = command_line.leansurgeon(*report, cwd=folder)
    rows = json.loads(done.stdout)["sections"][0]["rows"]
    assert [row["name"] for row in rows] == ["original", "lean", "control"] and all(row["latency"] for row in rows)
    page = (folder / "page.html").read_text()
    assert "What changed for real samples" in page and len(page) < 3_000_000
    assert "against ms for one sample" in page
    for one in document["shown"][:1]:
        assert one["text"] in page and len(set(one["answers"].values())) > 1
    # A damaged file shows what it can.
    for odd in ('{"kind": "classes", "classes": 3, "confusion": [1]}', "["):
        (experiment / "changes.json").write_text(odd)
        assert command_line.leansurgeon(*report, cwd=folder).returncode == 0, odd


def test_models_that_nobody_trained_here_are_compared(compared):
    folder, _, _ = compared
    names = ["mine", "runs/mine-reviews/lean-s0", "runs/mine-reviews/control-s0"]
    words = ["report", *names, "--measure", "--data", "reviews.csv", "--json"]
    done = command_line.leansurgeon(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    section = json.loads(done.stdout)["sections"][0]
    assert section["kind"] == "comparison" and [row["role"] for row in section["rows"]] == ["original", "lean", "lean"]
    assert all(row["metric"] and row["latency"] and row["kappa"] for row in section["rows"])
    test = document_of(folder / names[1])["test"]
    assert section["rows"][1]["metric"]["mean"] == pytest.approx(test["best"]["metric"])  # the same held-out samples
    found = leansurgeon.compare(folder / "mine", folder / names[1], data=str(folder / "reviews.csv"), progress=False)
    assert "lean-s0" in str(found) and "|" in found._repr_markdown_()
    # Where the time was over before anything was judged.
    bare = [
        replace(section, task=None, rows=tuple(replace(row, metric=None) for row in section.rows))
        for section in found.sections
    ]
    bare = replace(found, sections=tuple(bare))
    assert all("lean-s0" in bare.text(form) for form in ("table", "markdown", "csv", "latex", "json"))
    bare.html(folder / "bare.html")
    assert "lean-s0" in (folder / "bare.html").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_images_and_texts_without_labels_are_compared(kind, tmp_path):
    model, make_model, make_data, metric = KINDS[kind]
    make_model(tmp_path / model)
    make_data(tmp_path / "data")
    words = ["run", model, "--data", "data", "--layers", "2", "--seeds", "0", "--set", "train.optim.lr=1e-3", *SHORT]
    words += ["--arms", "original,lean"]
    with trainings_forked():
        done = command_line.leansurgeon(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert metric in done.stdout and "held-out samples)" in " ".join(done.stdout.split()), done.stdout
    experiment = tmp_path / f"runs/{model}-data"
    document = document_of(experiment, "changes.json")
    assert document["kind"] == kind
    if kind == "masks":  # a word for every hidden one
        for one in document["shown"]:
            counts = {said.count("|") + 1 for said in (one["truth"], *one["answers"].values())}
            assert counts == {one["text"].count("<extra_id_7>")} and len(set(one["answers"].values())) > 1
    if kind == "neighbours":
        test = document_of(experiment / "original-s0")["test"]
        assert test["best"]["metric"] == pytest.approx(1.0)  # it learns nothing from itself


def test_what_cannot_be_compared_is_refused_before_any_training(tmp_path):
    strangers.classifier(tmp_path / "mine", ("bad", "good"))
    strangers.reviews(tmp_path / "reviews.csv", rows=240)
    for words, says in REFUSED:
        done = command_line.leansurgeon("run", *words, "--workspace", "runs", cwd=tmp_path)
        assert done.returncode == 2 and says in " ".join(done.stderr.split()), (words, done.stderr)
        assert not list(tmp_path.glob("runs/*/*/summary.json")), words


def test_variants():
    assert parse_variants(["a:heads=16,32,layers=4", "b:mlp_dim=64"]) == {
        "a": {"heads": "16,32", "layers": "4"},
        "b": {"mlp_dim": "64"},
    }
    for text in ("a", "a:", "a:heads", "a:depth=3", "original:layers=2", "a b:layers=2"):
        with pytest.raises(UsageError, match="--variant"):
            parse_variants([text])
    with pytest.raises(UsageError, match="taken"):
        parse_variants(["a:layers=2", "a:layers=3"])


def rows_of(ours, theirs):
    """Rows of two arms whose runs, one for each row of the arrays, were right on these samples."""
    made = []
    for arm, values in (("original", theirs), ("lean", ours)):
        runs = []
        for seed, right in enumerate(values.astype(float)):
            test = {"samples": len(right), "last": None, "best": {"loss": 0.1, "metric": right.mean()}}
            test |= {"sums": right.tolist(), "counts": [1.0] * len(right)}
            runs.append(read_run(Path(), Summary.from_dict(summary(arm, seed, test=test)), 0.0))
        made.append(make_row(arm, arm, runs))
    return made


def test_differences_are_those_of_the_paired_t_test():
    rng = np.random.default_rng(0)
    theirs = rng.random((1, 200)) < 0.8
    ours = theirs ^ (rng.random((1, 200)) < 0.1)
    original, lean = rows_of(ours, theirs)
    found = paired.compare(lean, original)
    expected = scipy.stats.ttest_rel(ours[0].astype(float), theirs[0].astype(float)).confidence_interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.value == pytest.approx(ours.mean() - theirs.mean()) and found.samples == 200
    # Seeds that differ widen the bounds.
    original, lean = rows_of(np.stack([ours[0], ~ours[0]]), np.stack([theirs[0], theirs[0]]))
    several = paired.compare(lean, original)
    assert several.high - several.low > found.high - found.low


def test_steps_and_seeds_fit_into_the_time(monkeypatch, tmp_path):
    """A step of a second: 400 s hold few steps of one seed; the trainings that follow are those that were said."""
    strangers.classifier(tmp_path / "mine", ("bad", "good"))
    strangers.reviews(tmp_path / "reviews.csv", rows=240)
    monkeypatch.setattr(trials, "time_steps", lambda *given: (1.0, 1.0, 10**9))
    seen = []

    def stop(recipe, *given, **how):
        seen.append(recipe)
        raise UsageError("enough")

    monkeypatch.setattr("leansurgeon.experiment.run", stop)
    monkeypatch.setattr(side_by_side, "CLOSED", 0.1)
    words = ["run", "mine", "--data", "reviews.csv", "--heads", "8", "--layers", "2", "--parallel", 1]
    done = command_line.leansurgeon(*words, "--time", "400s", cwd=tmp_path)
    (recipe,) = seen
    steps = int(recipe.train.duration.removesuffix("st"))
    judging, (judged, tested) = 1 / (3 * recipe.train.batch), (recipe.train.eval.samples, 40)
    work = 3 * len(recipe.seeds) * (steps + 1 + judging * (3 * judged + tested)) + 9 * (
        max(8, steps / 8) + 1 + judging * judged
    )
    assert 200 < work < 400 and len(recipe.seeds) < 3 and "has room for" in " ".join(done.stderr.split())
    # Cuts have 40 % of the time: part of it for the local fit, and fewer samples if a pass is slow.
    lean = json.loads((tmp_path / "runs/mine-reviews/starts/lean/surgery.json").read_text())
    assert lean["decided"]["calibration"]["samples"]["fit"] == int(0.1 * 80 / (4 * judging) / 1.25) == 76
    again = command_line.leansurgeon(*words, "--time", "300s", "--force", cwd=tmp_path)
    assert "cutting" not in again.stderr  # what had more time is kept
    short = command_line.leansurgeon(*words, "--time", "60s", "--force", cwd=tmp_path)
    assert short.returncode == 2 and "1m00s is too short" in " ".join(short.stderr.split()) and len(seen) == 2


@pytest.mark.parametrize(
    ("spent", "rates", "steps", "said"),
    [(265, 3, range(16, 31), "1 seed"), (310, 0, range(16, 31), "no room to try"), (390, 0, [16], "take about 7m")],
)
def test_slow_cuts_cost_trials_and_then_steps(monkeypatch, tmp_path, spent, rates, steps, said):
    """A step of a second, 400 s for all of it, of which the cuts take so many."""
    strangers.classifier(tmp_path / "mine", ("bad", "good"))
    strangers.reviews(tmp_path / "reviews.csv", rows=240)
    opened = open_source(str(tmp_path / "mine"))
    shape = {"lean": {"layers": "2", "heads": "8"}}
    recipe = make_experiment(opened, str(tmp_path / "reviews.csv"), shape, (0, 1), 400.0, 1, None, (), print)
    monkeypatch.setattr(trials, "time_steps", lambda *given: (1.0, 1.0, 10**9))
    monkeypatch.setattr(trials, "make_starts", lambda *given, **how: None)
    lines = []
    began = time.perf_counter() - spent
    made = trials.plan_steps(recipe, tmp_path / "runs", opened, 1, lines.append, seconds=400.0, began=began)
    assert len(made.rates) == rates and len(made.seeds) == 1 and said in " ".join(lines)
    assert int(made.train.duration.removesuffix("st")) in steps


def test_figures_of_another_metric_are_no_difference_of_this_one():
    """Loss says nothing about a correlation, and equal batches of unequal models are a difference."""
    judged = Comparison(loss=PairedFigure(0.5, 0.7, 0.1, 0.3), accuracy=PairedFigure(0.9, 0.8, -0.2, 0.0), scored=40)
    assert paired.of_comparison(judged, "spearman") is None
    assert paired.of_comparison(judged, "accuracy").value == pytest.approx(-0.1)
    found = paired.of_comparison(judged, "perplexity")
    original, lean = rows_of(np.zeros((1, 20)), np.ones((1, 20)))
    task = original.runs[0].task
    assert found.value == pytest.approx(np.exp(0.2)) and found.sign == 1
    assert found.text(task).endswith("40 held-out tokens")
    found = paired.compare(lean, original)
    assert found.value == -1 and "no difference" not in found.text(task)


def document_of(folder, name="summary.json"):
    return json.loads((folder / name).read_text())
