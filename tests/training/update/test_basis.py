"""Another basis of heads on the way: outputs stay, condition numbers are those that are asked for, and training goes
on; W + lambda I is what numpy adds.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from leansurgeon import checkpoints
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure.kappa import attentions
from leansurgeon.measure.kappa.basis import skew
from leansurgeon.training.recipe.schema import Train, TrainingRecipe
from leansurgeon.training.recipe.settings import Basis
from leansurgeon.training.train import train
from leansurgeon.training.update import basis
from tests import conftest

FAMILIES = ["vit", "gpt2", "llama", "bert"]  # Linear and Conv1D, grouped and fused, with biases or none


@pytest.fixture
def loaded(tmp_path):
    def make(family: str):
        model = conftest.build(family)
        with torch.no_grad():  # biases are zero in a new model
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.1)
        model.save_pretrained(tmp_path / family)
        found = checkpoints.load(tmp_path / family)
        found.model.double().eval()
        batch = conftest.example(found.model)
        return found, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}

    return make


def copied(loaded, attention) -> dict[str, np.ndarray]:
    """The matrices of an attention, apart from the weights of a model in float64."""
    return {name: matrix.copy() for name, matrix in attentions.matrices(loaded, attention).items()}


def heads_of(loaded) -> list[tuple[np.ndarray, np.ndarray]]:
    """W_v (head_dim, width) and W_o (width, head_dim) of every head of every layer."""
    pairs = []
    for attention in attentions.of(loaded):
        m = copied(loaded, attention)
        each = m["o"].shape[1] // m["v"].shape[0]
        pairs += [(m["v"][h // each], m["o"][:, h]) for h in range(m["o"].shape[1])]
    return pairs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wanted", [Basis(kind="balance"), Basis(kind="skew", kappa=50)], ids=lambda b: b.kind)
def test_outputs_stay_and_condition_numbers_move(loaded, family, wanted):
    model, batch = loaded(family)
    with torch.no_grad():
        before, old = model.forward(batch), heads_of(model)
        basis.change(model, wanted)
        after, new = model.forward(batch), heads_of(model)
    assert (after - before).abs().max() < 1e-9 * before.std()
    assert not all(np.allclose(v, v_before) for (v_before, _), (v, _) in zip(old, new, strict=True))
    for (v_before, o_before), (v, o) in zip(old, new, strict=True):
        if wanted.kind == "skew":
            assert np.linalg.cond(v) == pytest.approx(50, rel=1e-6)
            assert np.prod(np.linalg.svd(v)[1]) == pytest.approx(np.prod(np.linalg.svd(v_before)[1]), rel=1e-6)
        elif family != "llama":  # whose heads share their values
            values = np.linalg.svd(o_before @ v_before)[1][: len(v)]
            root = np.sqrt(values[0] / values[-1])
            assert np.linalg.cond(v) == pytest.approx(root, rel=0.02) == pytest.approx(np.linalg.cond(o), rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_identity_is_added_to_values_and_outputs_alone(loaded, family):
    model, _ = loaded(family)
    state = {name: value.clone() for name, value in model.model.state_dict().items()}
    old = [copied(model, attention) for attention in attentions.of(model)]
    basis.add_identity(model, 0.25)
    for before, attention in zip(old, attentions.of(model), strict=True):
        after = attentions.matrices(model, attention)
        v, o = (after[name] - before[name] for name in "vo")
        assert v.reshape(-1, v.shape[2]) == pytest.approx(0.25 * np.eye(v.shape[0] * v.shape[1], v.shape[2]))
        assert o.reshape(len(o), -1) == pytest.approx(0.25 * np.eye(len(o), o.shape[1] * o.shape[2]))
        assert all((after[name] == before[name]).all() for name in "qk")
    touched = {name for attention in attentions.of(model) for name in attention.tensors}
    assert all(torch.equal(value, state[n]) for n, value in model.model.state_dict().items() if n not in touched)


@pytest.mark.parametrize("family", FAMILIES)
def test_sharper_attention_is_queries_times_a_factor(loaded, family):
    """Every score is three times what it was, so a smaller scale of the scores gives the old outputs again."""
    model, batch = loaded(family)
    state = {name: value.clone() for name, value in model.model.state_dict().items()}
    old = [copied(model, attention) for attention in attentions.of(model)]
    with torch.no_grad():
        before = model.forward(batch)
        basis.sharpen(model, 3.0)
        other = model.forward(batch)
        for module in model.model.modules():
            for name in ("scaling", "scale_attn_by"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, getattr(module, name) / 3)
        again = model.forward(batch)
    assert (other - before).abs().max() > 0.01 and (again - before).abs().max() < 1e-9 * before.std()
    for matrices, attention in zip(old, attentions.of(model), strict=True):
        after = attentions.matrices(model, attention)
        assert after["q"] == pytest.approx(3 * matrices["q"])
        assert all((after[name] == matrices[name]).all() for name in "kvo")
    touched = {name.rpartition(".")[0] for attention in attentions.of(model) for name in attention.tensors}
    left = {name: value for name, value in model.model.state_dict().items() if name.rpartition(".")[0] not in touched}
    assert all(torch.equal(value, state[name]) for name, value in left.items())


def test_queries_that_are_normalised_cannot_be_sharpened(tmp_path):
    conftest.build("qwen3").save_pretrained(tmp_path)
    given = {"duration": "1st", "batch": 1, "optim": {"lr": 1e-3}, "sharpen": 2.0}
    train = TrainingRecipe(name="x", task={"name": "digits"}, train=given).train
    with pytest.raises(UsageError, match=r"train\.sharpen"):
        basis.check(train, checkpoints.load(tmp_path), sharing=False)


def test_a_head_without_full_rank_keeps_its_basis():
    left, right = np.ones((5, 2)), np.outer([1.0, 2.0], np.arange(4.0))
    pair = skew(left, right, 10)
    assert pair.basis is None and (pair.left == left).all() and (pair.right == right).all()
    with pytest.raises(ValueError, match=r"0\.5"):
        skew(left, right, 0.5)


def trained(tmp_path, start, name, **more):
    recipe = TrainingRecipe(
        name=name,
        task={"name": "digits"},
        train={"duration": "6st", "batch": 16, "optim": {"lr": 1e-3}, "eval": {"every": "6st"}, **more},
        measure=None,
    )
    run = tmp_path / name
    train(recipe, start, run, say=lambda _: None, cpu=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return checkpoints.load(run / "last"), [row for row in rows if row["type"] == "eval"]


def test_a_training_takes_another_basis_every_so_often(tmp_path):
    """Changed after the last step it is the same model as the plain one; changed before, it learns something else."""
    start = tmp_path / "start"
    source = open_source("digits-vit")
    checkpoints.model.save_model(
        checkpoints.model.initialise(source.config, source.architecture, 0), source.architecture, source.config, start
    )
    plain, rows = trained(tmp_path, start, "plain")
    skewed, late = trained(tmp_path, start, "late", basis={"kind": "skew", "every": "6st", "kappa": 30})
    other, early = trained(tmp_path, start, "early", basis={"kind": "skew", "every": "5st", "kappa": 30})
    assert late[-1]["loss"] == pytest.approx(rows[-1]["loss"], abs=1e-5)
    assert early[-1]["loss"] != pytest.approx(rows[-1]["loss"], abs=1e-5)
    for model, wanted in ((skewed, True), (plain, False)):
        assert all(np.linalg.cond(v) == pytest.approx(30, rel=1e-3) for v, _ in heads_of(model)) == wanted
    assert min(np.linalg.cond(v) for v, _ in heads_of(other)) > 2 * np.median(
        [np.linalg.cond(v) for v, _ in heads_of(plain)]
    )
    images = torch.randn(8, 1, 8, 8)
    with torch.no_grad():
        a, b = (m.model.eval()(images).logits for m in (plain, skewed))
    assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"basis": {"kind": "balance"}, "ema": {}}, {"train.basis", "train.ema"}),
        ({"identity": 0.1, "lora": {"rank": 2}}, {"train.identity", "train.lora"}),
        ({"sharpen": 2.0, "lora": {"rank": 2}}, {"train.sharpen", "train.lora"}),
    ],
)
def test_what_holds_the_weights_in_another_form_is_refused(loaded, more, named):
    model, _ = loaded("vit")
    settings = Train(duration="1st", batch=2, optim={"lr": 1e-3}, **more)
    with pytest.raises(UsageError) as error:
        basis.check(settings, model, sharing=False)
    assert all(name in str(error.value) for name in named)


@pytest.mark.parametrize(
    "wrong", [{"kind": "skew"}, {"kind": "balance", "kappa": 3}, {"kind": "balance", "every": "3m"}], ids=str
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        Basis(**wrong)
