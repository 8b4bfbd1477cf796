"""FSDP2 on two CPU processes: what DDP gives, whole checkpoints and models, and the same after an interruption."""

import json
import os
import re
import sys

import pytest
import torch

from leansurgeon.errors import OutOfMemory
from leansurgeon.training import guards
from leansurgeon.training.optimizer import Average, Trainer
from leansurgeon.training.recipe.schema import Ema
from leansurgeon.training.runs import checkpoint
from tests.support import training_interrupted as cut
from tests.support.training_standin import StandIn, run_training, trained, word_model


class Tied(torch.nn.Module):
    """Words with one matrix for input and output, as GPT-2 and BERT have it, and blocks in between. Process 1 has no
    memory for more than `most` samples in the second one.
    """

    def __init__(self, most: int = 99, *, backward: bool = False) -> None:
        super().__init__()
        self.wte, self.head = torch.nn.Embedding(11, 17), torch.nn.Linear(17, 11)
        self.head.weight = self.wte.weight
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(17, 17) for _ in range(3))
        self.register_buffer("places", torch.arange(8), persistent=False)
        self.wpe, self.most, self.backward = torch.nn.Embedding(8, 17), most, backward

    def forward(self, ids_BT):
        x = self.wte(ids_BT) + self.wpe(self.places)  # a wrong buffer would be an index out of range
        for number, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x).roll(-1, dims=1))
            if number == 1 and self.training and os.environ.get("RANK") == "1" and len(x) > self.most:
                if self.backward:
                    x.register_hook(_run_out_of_memory)
                else:
                    _run_out_of_memory()
        return self.head(x)


def _run_out_of_memory(*_) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def tied_model(**options) -> StandIn:
    torch.manual_seed(0)
    return StandIn(Tied(**options))


def _train_words(folder, settings, tied=False, **options) -> None:
    folder.mkdir(exist_ok=True)
    try:
        run_training(folder, loaded=tied_model(**options) if tied else word_model(), **settings)
    except OutOfMemory as error:
        (folder / f"said-{os.environ['RANK']}").write_text(str(error))
        sys.exit(error.exit_code)


WAYS = {
    "accumulated": (False, {"micro_batch": 2, "clip_grad": 0.05}),
    "tied-averaged": (True, {"ema": {"decay": 0.7}, "micro_batch": 4}),
    "bf16-unclipped": (False, {"precision": "bf16", "nan": "skip", "clip_grad": 0.0}),
}


@pytest.mark.parametrize("way", WAYS)
def test_sharing_the_weights_gives_the_losses_of_ddp(way, tmp_path):
    """13 evaluation samples in batches of 4: one process has a batch more, and the other goes along."""
    tied, settings = WAYS[way]
    near = 1e-5 if way != "bf16-unclipped" else 2e-3
    folders = [tmp_path / parallel for parallel in ("ddp", "fsdp2")]
    for folder in folders:
        assert cut.processes(2, _train_words, folder, settings | {"parallel": folder.name}, tied) == [0, 0]
    one, other = map(cut.told, folders)
    assert len([row for row in one if row["type"] == "eval"]) == 3
    for a, b in zip(one, other, strict=True):
        assert a.get("lr") == b.get("lr") and a.get("samples") == b.get("samples")
        assert a["loss"] == pytest.approx(b["loss"], abs=near)
        assert a.get("grad_norm") == pytest.approx(b.get("grad_norm"), abs=near)
    for name in ("model", "last"):
        a, b = (cut.weights(folder, name) for folder in folders)
        assert a.keys() == b.keys()
        assert all(type(b[key]) is torch.Tensor and torch.allclose(a[key], b[key], atol=near) for key in a)


SHARED = {"parallel": "fsdp2", "mixup": 0.0, "cutmix": 0.0}


def _train_pictures(folder, resume) -> None:
    cut.run(folder, resume=resume, **SHARED)


def test_it_goes_on_as_if_nothing_had_been(tmp_path):
    """After a signal in the middle of an evaluation."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    assert cut.processes(2, _train_pictures, whole, "never") == [0, 0]
    assert cut.processes(2, cut.interrupted, parts, "eval", 9, cut.TERM, 1, "never", SHARED) == [75, 75]
    tensors, _ = checkpoint.read_tensors(checkpoint.newest(parts / "run"), 0)
    assert tensors["model.1.weight"].shape == (16, 16)  # whole: any number of processes could read it
    assert cut.processes(2, _train_pictures, parts, "auto") == [0, 0]
    cut.assert_same(parts, whole)


def _train_in_little_memory(folder, most, backward) -> None:
    guards.PROBED = ("cpu",)
    settings = {"parallel": "fsdp2", "eval": {"every": "8st", "batch": 4}, "ema": {"decay": 0.7}}
    _train_words(folder, settings, tied=True, most=most, backward=backward)


def test_one_process_short_of_memory_halves_the_micro_batch_of_all(tmp_path):
    """It leaves in the middle of a backward pass, between two exchanges that the other would wait in for ever."""
    sizes = {}
    for most in (99, 5):
        assert cut.processes(2, _train_in_little_memory, tmp_path / str(most), most, True) == [0, 0]
        sizes[most] = json.loads((tmp_path / str(most) / "run" / "summary.json").read_text())["micro_batch"]
    assert sizes == {99: 8, 5: 4}
    a, b = (cut.weights(tmp_path / str(most), "last") for most in sizes)
    assert all(torch.allclose(a[key], b[key], atol=1e-5) for key in a)


def test_a_model_that_never_fits_is_one_sentence(tmp_path):
    assert cut.processes(2, _train_in_little_memory, tmp_path, 0, False) == [4, 4]
    assert re.search(r"\bmemory\b.*\bmicro batch of 1\b", (tmp_path / "said-0").read_text(), re.S)
    assert not (tmp_path / "run").exists()


def _note_gradients(folder) -> None:
    """Note after every micro batch how many elements of the gradients this process holds."""
    seen, gradients = [], Trainer._gradients

    def looked(self, *arguments):
        backward = self.accelerator.backward

        def look(loss):
            backward(loss)
            held = [p.grad for p in self.parameters if p.grad is not None]
            seen.append([sum(g.to_local().numel() for g in held), sum(g.numel() for g in held)])

        self.accelerator.backward = look
        try:
            return gradients(self, *arguments)
        finally:
            self.accelerator.backward = backward

    Trainer._gradients = looked
    _train_words(folder, {"parallel": "fsdp2", "micro_batch": 2, "duration": "2st"}, tied=True)
    (folder / f"seen-{os.environ['RANK']}").write_text(json.dumps(seen))


def test_between_micro_batches_a_process_keeps_its_part_of_the_gradients_only(tmp_path):
    assert cut.processes(2, _note_gradients, tmp_path) == [0, 0]
    ours, theirs = (json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2))
    assert len(ours) == 2 * 4  # steps of four micro batches
    for (mine, whole), (other, _) in zip(ours, theirs, strict=True):
        assert mine + other == whole == ours[0][1] > 0


def test_one_process_has_nothing_to_share(tmp_path):
    said = []
    summary, _ = trained(tmp_path, say=said.append, parallel="fsdp2", duration="1st")
    assert any("changes nothing" in line for line in said) and summary["world_size"] == 1


def test_the_average_counts_a_tied_weight_once():
    """timm's own update goes by names, of which a tied weight has two, so that it would move by 1 - decay^2."""
    loaded = tied_model()
    average = Average(loaded, Ema(decay=0.9))
    before = loaded.model.wte.weight.detach().clone()
    with torch.no_grad():
        loaded.model.wte.weight += 1.0
    average.update(loaded.model, 5)
    assert torch.allclose(average.loaded.model.head.weight, before + 0.1, atol=1e-6)
