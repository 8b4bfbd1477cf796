"""Distillation: the loss against closed forms, the layer map, and a lean model that learns from its source."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from leansurgeon.errors import UsageError
from leansurgeon.training import distill
from leansurgeon.training.recipe.schema import Distill, TrainingRecipe
from tests.support.training_standin import Dots, dot_model


def test_divergence_is_the_closed_form():
    """Two classes: KL of Bernoulli distributions, with logits (a, 0)."""
    a, b, temperature = torch.tensor([1.5, -0.5, 3.0]), torch.tensor([0.2, 0.7, 9.0]), 2.0
    student, teacher = (torch.stack([x, torch.zeros(3)], dim=1) for x in (a, b))
    counted = torch.tensor([True, True, False])
    wanted = 0.0
    for x, y in zip(a[:2].tolist(), b[:2].tolist(), strict=True):
        p, q = 1 / (1 + math.exp(-x / temperature)), 1 / (1 + math.exp(-y / temperature))
        wanted += temperature**2 * (q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))
    assert distill.divergence(student, teacher, counted, temperature).item() == pytest.approx(wanted, rel=1e-5)
    assert distill.divergence(teacher, teacher, counted).item() == pytest.approx(0, abs=1e-7)
    plain = torch.nn.functional.kl_div(student[:2].log_softmax(-1), teacher[:2].softmax(-1), reduction="sum")
    assert distill.divergence(student, teacher, counted).item() == pytest.approx(plain.item(), rel=1e-5)


@pytest.mark.parametrize("at_once", [7, 2**19])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_divergence_and_its_gradient_are_torchs_own(at_once, kind, monkeypatch):
    """A few rows at a time or all of them; 2 x 5 places of 11 classes, of which some do not count."""
    monkeypatch.setattr(distill, "_AT_ONCE", (at_once, at_once))
    draw = torch.Generator().manual_seed(0)
    student, teacher = (4 * torch.randn(2, 5, 11, generator=draw) for _ in range(2))
    student, teacher = student.to(kind).requires_grad_(), teacher.to(kind)
    counted = torch.rand(2, 5, generator=draw) < 0.7
    made = distill.divergence(student, teacher, counted, 1.7)
    (gradient,) = torch.autograd.grad(3 * made, student)
    logs = [torch.log_softmax(logits.double() / 1.7, -1) for logits in (student, teacher)]
    wanted = 1.7**2 * (logs[1].exp() * (logs[1] - logs[0])).sum(-1)[counted].sum()
    (theirs,) = torch.autograd.grad(3 * wanted, student)
    assert made.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(gradient, theirs, rtol=1e-2 if kind == torch.bfloat16 else 1e-4, atol=1e-5)


def test_the_recipes_temperature_and_share_are_those_of_the_loss():
    """Hinton's loss by hand, from the outputs of two models on five samples."""
    task, student, teacher = Dots(), dot_model(0), dot_model(1)
    batch = task.batch("train", np.arange(5), seed=0, epoch=0)
    made = object.__new__(distill.Distillation)
    made.settings, made.task, made.teacher = Distill(logits=0.5, temperature=3.0), task, teacher
    made._seen, made._outputs = lambda batch: batch, None
    logits = student.forward(batch)
    score = task.score(logits, batch)
    p, q = (torch.softmax(model.forward(batch) / 3.0, dim=-1) for model in (student, teacher))
    wanted = 0.5 * 9.0 * (q * (q.log() - p.log())).sum()
    assert (made.add_to_score(score, logits, batch).loss_sum - score.loss_sum).item() == pytest.approx(
        wanted.item(), rel=1e-4
    )


def test_state_errors_count_real_tokens():
    state, target = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    target[0, 2] = 5.0  # padding
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert distill.state_error(state, target, mask).tolist() == [1.0, 1.0]
    assert distill.state_error(state, target, None).tolist() == [pytest.approx(9.0), 1.0]
    with pytest.raises(UsageError, match=r"\(2, 3, 4\).*\bteacher\b.*\(2, 2, 4\)"):
        distill.state_error(state, target[:, :2], None)


@pytest.mark.parametrize(
    ("kept", "depths", "wanted"),
    [([0, 3], [6], [2, 5]), ([0, 1, 2], [3], [0, 1, 2]), ([1, 2], [6], [1, 5]), ([0, 2, 4], [4, 2], [1, 3, 5])],
)
def test_a_layer_stands_for_those_dropped_behind_it(kept, depths, wanted):
    assert distill.last_of(kept, depths) == wanted


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A trained digits ViT and a lean model cut from it, through the real command's own functions."""
    import os

    from typer.testing import CliRunner

    from leansurgeon.cli.main import app
    from leansurgeon.training.loop import train

    folder = tmp_path_factory.mktemp("digits")
    os.environ["LEANSURGEON_CACHE"] = str(folder / "cache")
    run = CliRunner().invoke
    assert run(app, ["shrink", "digits-vit", "--layers", "4", "-o", str(folder / "start")]).exit_code == 0
    train(_recipe(), folder / "start", folder / "teacher", cpu=True, say=lambda text: None)
    source = str(folder / "teacher" / "last")
    done = run(app, ["shrink", source, "--layers", "2", "-o", str(folder / "lean")])
    assert done.exit_code == 0, done.output
    yield folder
    del os.environ["LEANSURGEON_CACHE"]


def _recipe(**train) -> TrainingRecipe:
    settings = {"duration": "4st", "batch": 64, "optim": {"lr": 1e-3}, "eval": {"batch": 360}, "log_every": 1}
    return TrainingRecipe(name="digits", task={"name": "digits"}, train=settings | train, measure=None)


@pytest.mark.slow
def test_a_lean_model_learns_from_its_source(digits):
    from leansurgeon.checkpoints import model as checkpoints
    from leansurgeon.training.loop import train
    from leansurgeon.training.setup import prepare_task

    settings = {"logits": 0.5, "hidden": 2.0, "temperature": 3.0}
    train(_recipe(distill=settings), digits / "lean", digits / "run", cpu=True, say=lambda text: None)
    rows = [json.loads(line) for line in (digits / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(row["loss"] for row in rows if row["type"] == "train")
    # The loss of the first step by hand, from the library's own outputs.
    from leansurgeon.training import data_loader

    task = prepare_task(_recipe(), digits / "lean", lambda text: None)
    batch = task.batch("train", data_loader.list_groups(0, 0, 64, 1437, 64)[0][1], seed=0, epoch=0)
    student, teacher = (checkpoints.load(p).model.eval() for p in (digits / "lean", digits / "teacher" / "last"))
    with torch.no_grad():
        a, b = (m(batch["pixel_values"], output_hidden_states=True) for m in (student, teacher))
    kept = json.loads((digits / "lean" / "surgery.json").read_text())["plan"]["layers"]
    ends = [kept[1] - 1, 3]
    # hidden_states[0] are the embeddings; the last of transformers' tuple stands before the final norm in a ViT
    pairs = [(a.hidden_states[j + 1], b.hidden_states[end + 1]) for j, end in enumerate(ends)]
    hidden = torch.stack([(x - y).pow(2).mean() for x, y in pairs]).mean()
    p, q = (torch.log_softmax(out.logits / 3.0, -1) for out in (a, b))
    kl = (q.exp() * (q - p)).sum(-1).mean() * 9.0
    plain = torch.nn.functional.cross_entropy(a.logits, batch["labels"])
    assert first == pytest.approx((plain + 0.5 * kl + 2.0 * hidden).item(), rel=1e-4)
    summary = json.loads((digits / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert checkpoints.load(digits / "run" / "model").model.state_dict().keys() == student.state_dict().keys()


@pytest.mark.slow
def test_teachers_that_cannot_teach_are_refused(digits):
    from leansurgeon.training.loop import train

    def attempt(name, **settings):
        train(_recipe(distill=settings), digits / name, digits / "none", cpu=True, say=lambda text: None)

    with pytest.raises(UsageError, match="has learned nothing"):
        attempt("start")  # cut from a preset
    with pytest.raises(UsageError, match="have 2 and 6"):
        from typer.testing import CliRunner

        from leansurgeon.cli.main import app

        CliRunner().invoke(app, ["shrink", "digits-vit", "-o", str(digits / "six"), "--heads", "8"])
        record = json.loads((digits / "six" / "surgery.json").read_text())
        (digits / "six" / "surgery.json").write_text(json.dumps(record | {"initialised": "trained"}))
        lean = json.loads((digits / "lean" / "surgery.json").read_text())
        lean["plan"]["layers"] = [0]
        (digits / "lean" / "surgery.json").write_text(json.dumps(lean))
        attempt("lean", teacher=str(digits / "six"), hidden=1.0)
    assert not (digits / "none").exists()
