"""What sparse prediction saves in a training step of a masked language model, dense and sparse steps in turns.

A tenth-scale Crammed BERT (lean arm): ten layers, vocabulary 43 times the width, a quarter of the tokens hidden. Run
with `OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/memory/test_sparse_prediction.py`.
"""

from __future__ import annotations

import pytest
import torch

from leansurgeon import tasks
from leansurgeon.models.crammed_bert import CrammedBertConfig, CrammedBertForMaskedLM
from leansurgeon.training import data_loader, distributed, optimizer, schedule
from leansurgeon.training.objective import Objective
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe.schema import Train
from leansurgeon.training.schedule import Pace
from tests.benchmarks.pairs import compare

BLOCKS, ROWS, TOKENS, WIDTH = 16, 8, 128, 128
CLAIM = 0.9  # of the dense step's time, at most


class _Loaded:
    def __init__(self, vocab_size: int) -> None:
        torch.manual_seed(0)
        self.model = CrammedBertForMaskedLM(
            CrammedBertConfig(
                vocab_size=vocab_size,
                hidden_size=WIDTH,
                num_hidden_layers=10,
                num_attention_heads=8,
                intermediate_size=2 * WIDTH,
            )
        )

    def forward(self, batch):
        return self.model(input_ids=batch["input_ids"]).logits


def _steps(task, settings, *, sparse_prediction):
    accelerator = distributed.start_accelerator()
    scheme = schedule.make_plan(settings, task.size("train"), 1)
    loaded = _Loaded(43 * WIDTH)
    settings = settings.model_copy(update={"sparse_prediction": sparse_prediction})
    scored = Objective(loaded, task, settings).to(accelerator.device).train()
    adamw = optimizer.make_optimizer(scored, settings.optim, fused=accelerator.device.type == "cuda")
    trainer = Trainer(accelerator, scored, scored, adamw, Pace(scheme))
    for step, batches in enumerate(data_loader.train_batches(task, scheme, rank=0, device=accelerator.device)):
        trainer.step(step, batches)
        yield


@pytest.mark.benchmark
def test_predicting_at_hidden_tokens_only_saves_time(tmp_path):
    options = {"tokenizer": "wordpiece", "vocab_size": 4096, "seq_len": TOKENS, "mask_prob": 0.25}
    task = tasks.make("masked-lm", options)
    task.prepare(tmp_path, None, workers=1, say=lambda text: None)
    settings = Train.model_validate({"duration": f"{BLOCKS + 4}st", "batch": ROWS, "optim": {"lr": 1e-3}})
    device = distributed.start_accelerator().device
    few, every = (_steps(task, settings, sparse_prediction=wanted) for wanted in (True, False))
    found = compare(few, every, block=1, blocks=BLOCKS, warm_up=2, device=device)
    print(
        f"\nsparse against dense prediction on {device}: {1000 * found.first:.0f} ms against "
        f"{1000 * found.second:.0f} ms per step of {ROWS} x {TOKENS} tokens; {found}"
    )
    assert found.ratio <= CLAIM
