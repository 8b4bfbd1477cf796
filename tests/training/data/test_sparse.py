"""Sparse prediction of masked language models against the libraries' own dense forward pass and loss."""

import numpy as np
import pytest
import torch

from leansurgeon import tasks
from leansurgeon.models import crammed_bert, decoupled_bert
from leansurgeon.tasks import chance
from leansurgeon.tasks.text import language
from leansurgeon.training import objective, preview, regularize
from leansurgeon.training.objective import Objective
from leansurgeon.training.recipe.schema import Train
from tests.conftest import FAMILIES, TEXT, build
from tests.support.training_standin import StandIn

OURS = {
    "crammed-bert": (crammed_bert.CrammedBertConfig, crammed_bert.CrammedBertForMaskedLM),
    "lean-bert": (decoupled_bert.LeanBertConfig, decoupled_bert.LeanBertForMaskedLM),
    "lean-roberta": (decoupled_bert.LeanRobertaConfig, decoupled_bert.LeanRobertaForMaskedLM),
}
MASKED = [name for name, (_, cls, _) in FAMILIES.items() if cls.endswith("ForMaskedLM")]
TRAIN = {"duration": "1st", "batch": 1, "optim": {"lr": 1}}


class Loaded(StandIn):
    def forward(self, batch):
        return self.model(input_ids=batch["input_ids"]).logits


def model_of(name):
    """Without dropout, which would be drawn for other shapes."""
    torch.manual_seed(0)
    if name in FAMILIES:
        model = build(name)
    else:
        config, cls = OURS[name]
        model = cls(config(**TEXT, head_dim=16))
    regularize.set_dropout(model, 0.0, name)
    return model


def hidden_batch(share=0.2, rows=3, width=12):
    tokens = np.random.default_rng(0).integers(5, 61, (rows, width)).astype(np.uint16)
    draws = chance.words(0, 0, np.arange(rows), width)
    arrays = language.hide_tokens(tokens, draws, share, 4, np.zeros(61, dtype=bool), 61)
    return {name: torch.from_numpy(a) for name, a in arrays.items()}


def scored_of(model, **settings):
    task = tasks.make("masked-lm", {"tokenizer": "char"})
    return Objective(Loaded(model), task, Train.model_validate(TRAIN | settings)).train()


def score_with_gradients(model, batch, **settings):
    model.zero_grad()
    score = scored_of(model, **settings)(batch)
    model.eval()
    (score.loss_sum / score.loss_count).backward()
    return score, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MASKED + list(OURS))
def test_loss_and_gradients_are_those_of_all_logits(name):
    model = model_of(name)
    batch = hidden_batch()
    assert objective.predict(Loaded(model), batch).shape == (1, len(batch["_places"]), 61)
    score, gradients = score_with_gradients(model, batch)
    every, all_gradients = score_with_gradients(model, batch, sparse_prediction=False)
    own = model.eval()(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    assert (score.loss_sum / score.loss_count).item() == pytest.approx(own.item(), rel=2e-6)
    assert score.loss_sum.item() == pytest.approx(every.loss_sum.item(), rel=2e-6)
    assert score.loss_count == every.loss_count == (batch["labels"] != -100).sum()
    assert score.metric_sum == pytest.approx(float(every.metric_sum), rel=2e-6)
    assert gradients.keys() == all_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, all_gradients[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize(("rows", "width", "share"), [(2, 2, 0.9), (4, 16, 0.05), (2, 9, 0.99)])
def test_the_places_are_the_labels_and_one_more_that_is_none(rows, width, share):
    batch = hidden_batch(share, rows, width)
    labels, places = batch["labels"].flatten(), batch["_places"]
    scored = torch.nonzero(labels != -100).flatten()
    assert places[: len(scored)].tolist() == scored.tolist() and len(places) <= rows * width
    assert (labels[places[len(scored) :]] == -100).all()
    batch["labels"][0] = -100  # a sample that was taken out counts nowhere
    scores = [score_with_gradients(model_of("bert"), batch, sparse_prediction=sparse)[0] for sparse in (True, False)]
    assert scores[0].loss_sum.item() == pytest.approx(scores[1].loss_sum.item(), rel=1e-5)
    assert scores[0].loss_count == scores[1].loss_count


def test_batches_of_a_task_keep_their_length(tmp_path):
    """A compiled model is compiled once; the list holds a fifth of the tokens more than are hidden on average."""
    task = tasks.make("masked-lm", {"tokenizer": "char", "seq_len": 128, "mask_prob": 0.25})
    task.prepare(tmp_path, None, workers=1, say=lambda text: None)
    lengths = {len(task.batch("train", np.arange(128), seed=0, epoch=epoch)["_places"]) for epoch in range(30)}
    assert len(lengths) == 1 and 128 * 128 * 0.25 < lengths.pop() < 128 * 128 * 0.25 * 1.1


def test_it_compiles_without_a_break():
    model, batch = model_of("bert"), hidden_batch()
    plain, _ = score_with_gradients(model, batch)
    scored = scored_of(model)
    scored.compile(backend="eager", fullgraph=True)
    assert scored(batch).loss_sum.item() == pytest.approx(plain.loss_sum.item(), rel=1e-5)


def test_only_what_is_computed_is_counted():
    model, batch = model_of("crammed-bert"), hidden_batch(0.2, 8, 32)
    task = tasks.make("masked-lm", {"tokenizer": "char"})
    dense = preview.count_flops(Loaded(model), task, batch, sparse_prediction=False)
    few = preview.count_flops(Loaded(model), task, batch)
    left_out = 8 * 32 - len(batch["_places"])
    assert dense - few == pytest.approx(6 * 32 * 61 * left_out / 8)  # 2 FLOPs a weight, three times
