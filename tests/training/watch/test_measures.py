"""Measuring on the way: rows when they are due, no trace in the training, and the same rows after a resume."""

import json

import pytest
import torch
from safetensors.torch import load_file

from leansurgeon import tasks
from leansurgeon.checkpoints.model import load
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.batches import inner
from leansurgeon.measure.heads.importance import importance
from leansurgeon.measure.heads.judge import HeadScorer, Labelled
from leansurgeon.measure.heads.sites import sites
from leansurgeon.measure.kappa import blocks as kappa
from leansurgeon.training.loop import train
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe import reading
from leansurgeon.training.recipe.schema import TrainingRecipe
from tests import conftest

KAPPA = {"kappa": {"samples": 8, "every": "3st", "probes": 4}}
HEADS = {"heads": {"samples": 8, "every": "4st", "steps": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    conftest.build("vit", num_hidden_layers=2, hidden_dropout_prob=0.2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    task = tasks.make("digits", {})
    task.prepare(tmp_path_factory.mktemp("cache"), None, workers=1, say=lambda _: None)
    return task


def recipe(measure: dict, **settings) -> TrainingRecipe:
    train = {"duration": "8st", "batch": 16, "optim": {"lr": 1e-2}, "eval": {"every": "4st"}, "log_every": 1}
    return TrainingRecipe(name="tiny", task={"name": "digits"}, train=train | settings, measure=measure)


def run(folder, model, digits, measure, resume="never", **settings):
    """The summary, and the rows without what a clock says."""
    options = {"task": digits, "cpu": True, "resume": resume, "say": lambda _: None}
    summary = train(recipe(measure, **settings), model, folder, **options).as_dict()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("step_ms", "data_wait")
    return summary, [{key: value for key, value in row.items() if key not in clock} for row in rows]


def of(rows, *kinds):
    return [row for row in rows if row["type"] in kinds]


@pytest.fixture(scope="module")
def measured(model, digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured") / "run"
    return *run(folder, model, digits, KAPPA | HEADS), folder


def test_a_training_is_the_same_to_the_last_bit_with_and_without(measured, model, digits, tmp_path):
    summary, rows, folder = measured
    plain, told = run(tmp_path / "run", model, digits, {"kappa": None})
    assert of(rows, "train", "eval") == told
    assert (summary["final"], summary["best"]) == (plain["final"], plain["best"])
    one, other = (load_file(path / "last" / "model.safetensors") for path in (folder, tmp_path / "run"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_rows_come_at_the_start_when_due_and_at_the_end(measured):
    summary, rows, _ = measured
    kappas, heads = of(rows, "kappa"), of(rows, "heads")
    assert [row["step"] for row in kappas] == [0, 3, 6, 8]
    assert [row["step"] for row in heads] == [0, 4, 8]
    assert kappas[-1]["layers"] == summary["kappa"]["layers"] and heads[-1]["curve"] == summary["heads"]["curve"]
    assert kappas[-1]["epoch"] == pytest.approx(8 * 16 / 1424, abs=1e-4)
    for row in kappas:
        assert row["samples"] == 8 and len(row["layers"]) == 2
        assert {"median", "output", "weights", "jacobian"} <= row["layers"][0].keys()
    assert len({row["layers"][0]["median"] for row in kappas}) == 4  # training moves it


def test_rows_are_what_measuring_the_saved_models_gives(measured, model, digits):
    """The first row against the model that the training began with, the last against the one that it left."""
    _, rows, folder = measured
    batch = digits.batch("eval", inner(360, 8), seed=0, epoch=0)  # spread over the split
    for row, saved in ((of(rows, "kappa")[0], model), (of(rows, "kappa")[-1], folder / "last")):
        found = kappa.measure_blocks(load(saved), [batch], digits.token_mask, 8)
        medians = [[layer["median"] for layer in one["layers"]] for one in (row, found)]
        assert medians[0] == pytest.approx(medians[1], rel=1e-5)


def test_heads_are_ranked_on_training_samples_and_scored_on_others(measured, model, digits):
    loaded = load(model)
    judge, places = Labelled(loaded, digits), sites(loaded)
    fit, judged = (digits.batch(split, inner(digits.size(split), 8), seed=0, epoch=0) for split in ("train", "eval"))
    values, first = importance(judge, places, [fit]), of(measured[1], "heads")[0]
    shares = [value for layer in first["importance"]["share"] for value in layer]
    assert shares == pytest.approx((values / values.sum()).tolist(), rel=1e-4)
    assert first["curve"][0]["loss"] == pytest.approx(HeadScorer(judge, places, [judged]).whole.loss, rel=1e-4)


@pytest.mark.parametrize("batches", [5, 7], ids=["before-a-row", "after-a-row"])
def test_a_resumed_training_has_the_same_rows(batches, measured, model, digits, tmp_path, monkeypatch):
    """Interrupted behind step 5 or 7; the checkpoint is that of step 3 or 6, the rows of which stand already."""
    every, real = {"checkpoint": {"every": "3st"}}, Trainer.step

    def step(self, at, given):
        if at == batches:
            raise ZeroDivisionError
        return real(self, at, given)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Trainer, "step", step)
        run(tmp_path / "run", model, digits, KAPPA, **every)
    assert not (tmp_path / "run" / "summary.json").exists()
    summary, rows = run(tmp_path / "run", model, digits, KAPPA, resume="auto", **every)
    assert rows == of(measured[1], "train", "eval", "kappa")
    assert summary["resumed_after"] == [3 * (batches // 3)]
    assert summary["kappa"] == measured[0]["kappa"]


def test_what_is_measured_survives_writing_and_reading_and_comes_by_epochs_or_steps(tmp_path):
    path = tmp_path / "r.yaml"
    for measure in ({"kappa": None} | HEADS, KAPPA):
        path.write_text(reading.dump(recipe(measure)))
        assert reading.load(path).measure == recipe(measure).measure
    for every in ("30m", "3", "0ep"):
        with pytest.raises(UsageError, match=r"measure\.kappa\.every"):
            reading.load(path, [f"measure.kappa.every={every}"])
