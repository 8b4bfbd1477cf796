"""What a training leaves is a plain model: after DDP, FSDP2, compilation, averaging and all of them together."""

import json

import numpy as np
import pytest
import torch
import torch._dynamo  # once, for every forked process
import transformers
from safetensors import safe_open

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.training import setup
from tests import conftest
from tests.support import training_interrupted as cut
from tests.support.training_standin import Words, run_training

EVERYTHING = {"parallel": "fsdp2", "compile": True, "ema": {"decay": 0.5}, "activation_checkpointing": True}
CASES = [("gpt2", {"ema": {"decay": 0.5}}), ("gpt2", {"parallel": "fsdp2"}), ("vit", EVERYTHING)]
# GPT-2 ties its head to its embedding.
MODELS = {"vit": dict(image_size=4, num_labels=3, num_hidden_layers=2), "gpt2": dict(n_layer=2)}


def task_of(family: str):
    return cut.Pictures() if family == "vit" else Words()


def _train(source, folder, family, settings) -> None:
    setup.COMPILE_BACKEND = "eager"
    loaded = checkpoints.load(source, "image-classification" if family == "vit" else "causal-lm", {})
    evaluation = {"every": "3st", "batch": 4}
    run_training(folder, loaded=loaded, task=task_of(family), duration="3st", eval=evaluation, **settings)


def names_in(folder) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(("family", "settings"), CASES, ids=["ddp-averaged", "fsdp2", "everything"])
def test_the_plain_library_reads_what_was_trained(family, settings, tmp_path):
    built = conftest.build(family, **MODELS[family])
    built.save_pretrained(tmp_path / "source")
    assert cut.processes(2, _train, tmp_path / "source", tmp_path, family, settings, patience=300) == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for name in ("model", "last"):
        folder = tmp_path / "run" / name
        assert names_in(folder) == names_in(tmp_path / "source")
        kind = getattr(transformers, type(built).__name__)
        plain, found = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(found[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert plain.state_dict().keys() == built.state_dict().keys()
    # The library's own model has the loss that the training measured at its end.
    task = task_of(family)
    batch = task.batch("eval", np.arange(task.size("eval")), seed=0, epoch=0)
    with torch.no_grad():
        logits = plain.eval()(batch[built.main_input_name]).logits
    score = task.score(logits, batch)
    assert float(score.loss_sum / score.loss_count) == pytest.approx(summary["final"]["loss"], rel=1e-5)
    assert summary["final"]["loss"] != pytest.approx(summary["before"]["loss"], rel=1e-4)
