"""Sparse prediction of masked language models against the libraries' own dense forward pass and loss."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leansurgeon import tasks
from leansurgeon.models import crammed_bert, decoupled_bert
from leansurgeon.training import flops, objective, regularize
from leansurgeon.training.objective import Objective
from leansurgeon.training.recipe.schema import Train
from tests.conftest import FAMILIES, build

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
OURS = {
    "crammed-bert": (crammed_bert.CrammedBertConfig, crammed_bert.CrammedBertForMaskedLM),
    "lean-bert": (decoupled_bert.LeanBertConfig, decoupled_bert.LeanBertForMaskedLM),
    "lean-roberta": (decoupled_bert.LeanRobertaConfig, decoupled_bert.LeanRobertaForMaskedLM),
}
MASKED = [name for name, (_, cls, _) in FAMILIES.items() if cls.endswith("ForMaskedLM")]


class Loaded:
    """What training uses of `checkpoints.Loaded`."""

    def __init__(self, model):
        self.model = model

    def forward(self, batch):
        return self.model(input_ids=batch["input_ids"]).logits


def model_of(name):
    """Without dropout, which would be drawn for other shapes."""
    torch.manual_seed(0)
    if name in FAMILIES:
        model = build(name)
    else:
        config, cls = OURS[name]
        model = cls(config(**TINY, head_dim=16, max_position_embeddings=40))
    regularize.set_dropout(model, 0.0, name)
    return model


def hidden_batch(share=0.2, rows=3, width=12):
    from leansurgeon.tasks import chance
    from leansurgeon.tasks.text import language

    tokens = np.random.default_rng(0).integers(5, 61, (rows, width)).astype(np.uint16)
    draws = chance.words(0, 0, np.arange(rows), width)
    arrays = language.hide_tokens(tokens, draws, share, 4, np.zeros(61, dtype=bool), 61)
    return {name: torch.from_numpy(a) for name, a in arrays.items()}


def train_of(**settings):
    return Train.model_validate({"duration": "1st", "batch": 1, "optim": {"lr": 1}, **settings})


def scored_of(model, **settings):
    task = tasks.make("masked-lm", {"tokenizer": "char"})
    return Objective(Loaded(model), task, train_of(**settings)).train()


def loss_and_gradients(model, batch, **settings):
    model.zero_grad()
    score = scored_of(model, **settings)(batch)
    model.eval()
    (score.loss_sum / score.loss_count).backward()
    score = score._replace(loss_sum=score.loss_sum.detach())
    return score, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MASKED + list(OURS))
def test_loss_and_gradients_are_those_of_all_logits(name):
    model = model_of(name)
    batch = hidden_batch()
    assert objective.head_of(model) is not None
    assert objective.predict(Loaded(model), batch).shape == (1, len(batch["_places"]), 61)
    score, gradients = loss_and_gradients(model, batch)
    every, all_gradients = loss_and_gradients(model, batch, sparse_prediction=False)
    own = model.eval()(input_ids=batch["input_ids"], labels=batch["labels"]).loss.detach()
    assert float(score.loss_sum / score.loss_count) == pytest.approx(float(own), rel=2e-6)
    assert float(score.loss_sum) == pytest.approx(float(every.loss_sum), rel=2e-6)
    assert score.loss_count == every.loss_count == (batch["labels"] != -100).sum()
    assert score.metric_sum == pytest.approx(float(every.metric_sum), rel=2e-6)
    assert gradients.keys() == all_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, all_gradients[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize(("rows", "width", "share"), [(1, 8, 0.5), (1, 2, 0.9), (4, 16, 0.05), (2, 9, 0.99)])
def test_the_places_are_the_labels_and_one_more_that_is_none(rows, width, share):
    batch = hidden_batch(share, rows, width)
    labels, places = batch["labels"].flatten(), batch["_places"]
    scored = torch.nonzero(labels != -100).flatten()
    assert places[: len(scored)].tolist() == scored.tolist() and len(places) <= rows * width
    assert (labels[places[len(scored) :]] == -100).all()
    model = model_of("bert")
    score, _ = loss_and_gradients(model, batch)
    every, _ = loss_and_gradients(model, batch, sparse_prediction=False)
    assert float(score.loss_sum) == pytest.approx(float(every.loss_sum), rel=1e-5)


def test_batches_of_a_task_keep_their_length(tmp_path):
    """A compiled model is compiled once; the list holds a fifth of the tokens more than are hidden on average."""
    task = tasks.make("masked-lm", {"tokenizer": "char", "seq_len": 128, "mask_prob": 0.25})
    task.prepare(tmp_path, None, workers=1, say=lambda text: None)
    lengths = {len(task.batch("train", np.arange(128), seed=0, epoch=epoch)["_places"]) for epoch in range(100)}
    assert len(lengths) == 1 and 128 * 128 * 0.25 < lengths.pop() < 128 * 128 * 0.25 * 1.1


def test_a_sample_that_was_taken_out_counts_nowhere():
    batch = hidden_batch(0.5)
    batch["labels"][1] = -100
    model = model_of("roberta")
    score, _ = loss_and_gradients(model, batch)
    own = model.eval()(input_ids=batch["input_ids"], labels=batch["labels"]).loss.detach()
    assert float(score.loss_sum / score.loss_count) == pytest.approx(float(own), rel=1e-5)


def test_it_compiles_without_a_break():
    model, batch = model_of("crammed-bert"), hidden_batch()
    plain, _ = loss_and_gradients(model, batch)
    scored = scored_of(model)
    scored.compile(backend="aot_eager", fullgraph=True)
    assert float(scored(batch).loss_sum.detach()) == pytest.approx(float(plain.loss_sum), rel=1e-5)


def test_only_what_is_computed_is_counted():
    model, batch = model_of("crammed-bert"), hidden_batch(0.2, 8, 32)
    task = tasks.make("masked-lm", {"tokenizer": "char"})
    dense = flops.of_training(Loaded(model), task, batch, sparse_prediction=False)
    few = flops.of_training(Loaded(model), task, batch)
    left_out = 8 * 32 - len(batch["_places"])
    assert dense - few == pytest.approx(6 * 32 * 61 * left_out / 8)  # 2 FLOPs a weight, three times


def test_other_models_and_other_tasks_stay_as_they_are():
    model = build("gpt2")
    assert objective.head_of(model) is None
    batch = hidden_batch()
    scored = Objective(Loaded(model), SimpleNamespace(score=None, head="masked-lm"), train_of())
    assert "_places" not in scored.as_model_takes(batch) and scored.as_model_takes(batch).keys() == {
        "input_ids",
        "labels",
    }
    assert Train.model_validate({"duration": "1st", "batch": 1, "optim": {"lr": 1}}).sparse_prediction is True
