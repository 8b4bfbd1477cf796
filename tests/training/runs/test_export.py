"""What a training leaves is a plain model: after DDP, FSDP2, compilation, averaging and all of them together."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch._dynamo  # once, for every forked process
from safetensors import safe_open

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.training import setup
from leansurgeon.training.loop import train
from tests import conftest
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, recipe

WAYS = {  # processes, settings
    "ddp": (2, {}),
    "compiled": (1, {"compile": True}),
    "averaged": (1, {"ema": {"decay": 0.5}}),
    "fsdp2": (2, {"parallel": "fsdp2"}),
    "everything": (2, {"parallel": "fsdp2", "compile": True, "ema": {"decay": 0.5}, "activation_checkpointing": True}),
}
MODELS = {"vit": dict(image_size=4, num_labels=3), "gpt2": {}}  # GPT-2 ties its head to its embedding


def _task(family: str):
    return cut.Pictures() if family == "vit" else Words()


def _train(source, folder, family, settings) -> None:
    setup.COMPILE_BACKEND = "eager"
    loaded, task = (
        checkpoints.load(source, "image-classification" if family == "vit" else "causal-lm", {}),
        _task(family),
    )
    options = {"loaded": loaded, "task": task, "cpu": True, "say": lambda text: None}
    train(recipe(duration="3st", eval={"every": "3st", "batch": 4}, **settings), folder, folder / "run", **options)


def _names(folder) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


CASES = [("vit", way) for way in WAYS] + [("gpt2", way) for way in ("ddp", "averaged", "fsdp2")]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_the_plain_library_reads_what_was_trained(family, way, tmp_path):
    import transformers

    built = conftest.build(family, **MODELS[family])
    built.save_pretrained(tmp_path / "source")
    count, settings = WAYS[way]
    assert cut.processes(count, _train, tmp_path / "source", tmp_path, family, settings, patience=300) == [0] * count
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for name in ("model", "last"):
        folder = tmp_path / "run" / name
        assert _names(folder) == _names(tmp_path / "source")
        kind = getattr(transformers, type(built).__name__)
        plain, found = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(found[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert plain.state_dict().keys() == built.state_dict().keys()
    # The library's own model has the loss that the training measured at its end.
    task = _task(family)
    batch = task.batch("eval", np.arange(task.size("eval")), seed=0, epoch=0)
    with torch.no_grad():
        logits = plain.eval()(batch[built.main_input_name]).logits
    score = task.score(logits, batch)
    assert float(score.loss_sum / score.loss_count) == pytest.approx(summary["final"]["loss"], rel=1e-5)
    assert summary["final"]["loss"] != pytest.approx(summary["before"]["loss"], rel=1e-4)
