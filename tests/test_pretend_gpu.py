"""What only runs where there is a GPU, on one that is none (`pretend_gpu`): devices, words and calls of torch.cuda.

The same numbers as on the CPU must come out, since a pretended GPU computes there.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.cli.main import app
from leansurgeon.errors import OutOfMemory
from leansurgeon.measure.costs import precision, speed
from leansurgeon.measure.costs.memory import Setting
from leansurgeon.measure.heads import importance, judge, sites
from leansurgeon.measure.kappa import study
from leansurgeon.tasks import chance
from leansurgeon.training import data_loader, distributed, schedule
from leansurgeon.training import loop as loop
from leansurgeon.training.recipe.schema import Train
from tests.conftest import architecture, build, example
from tests.support.pretend_gpu import CUDA, Mixed, plugged_in
from tests.support.training_standin import Dots, Words, dot_model, recipe, word_model


@pytest.fixture
def gpu(monkeypatch):
    with plugged_in(monkeypatch) as found:
        yield found


def test_the_pretence_holds(gpu):
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    assert (here.device.type, (2 * there).device, there.to(here).device) == ("cpu", CUDA, here.device)
    for mixed in (lambda: here + there, lambda: here[there.long()], lambda: there + torch.ones(3, device="cuda:1")):
        with pytest.raises(Mixed):
            mixed()
    with pytest.raises(TypeError, match="cuda:0"):
        there.numpy()
    assert (there + 1.5 * here.sum())[torch.tensor([0])].tolist() == [5.5] and gpu.waits["tolist"] == 1


# -- measuring ------------------------------------------------------------------------------------


def measured(family: str, device: str) -> list[np.ndarray]:
    """Kappa raw and invariant, importance of heads and the loss without some of them, of a tiny model."""
    model = build(family)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    loaded = Loaded(model.to(device), architecture(family), config, None, None)
    batch = example(model)
    if "attention_mask" in batch:
        batch["attention_mask"][1:, 8:] = 0
    seen = SimpleNamespace(
        model=model,
        architecture=loaded.architecture,
        config=config,
        projections=loaded.projections,
        forward=lambda batch: model(**batch),
    )

    def mask(batch):
        real = batch.get("attention_mask")
        return None if real is None else real.bool()

    kappa = study.measure_invariants(seen, [batch], mask, 3, probes=2)
    places = sites.sites(loaded)
    watched = judge.OutputScorer(loaded)
    keep = np.arange(sum(site.heads for site in places)) % 3 > 0
    return [
        np.array([layer["median"] or layer["median_lower_bound"] for layer in kappa["layers"]]),
        np.array([layer["centred_median"] or layer["centred_lower_bound"] for layer in kappa["layers"]]),
        np.array([layer["jacobian"]["at_least"] for layer in kappa["layers"]]),
        importance.importance(watched, places, [batch]),
        judge.HeadScorer(watched, places, [batch]).scores(keep).losses,
    ]


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_kappa_and_heads_are_those_of_the_cpu(family, monkeypatch):
    wanted = measured(family, "cpu")
    with plugged_in(monkeypatch) as gpu:
        found = measured(family, "cuda")
    assert gpu.waits["to the cpu"]
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4)


def test_no_tf32_while_measuring_nor_in_training():
    """torch's own default rounds what convolutions read to ten bits on a GPU: pixels and patch embeddings."""
    before = precision.forbid_tf32()
    precision.allow("medium", True)
    try:
        for quiet in (precision.at_rest(torch.nn.Linear(1, 1), torch.device("cpu")), precision.full_fp32()):
            with quiet:
                assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("medium", True)
        distributed.start_accelerator(cpu=True)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    finally:
        precision.allow(*before)


# -- bench ----------------------------------------------------------------------------------------


def test_bench_measures_one_model_at_a_time(gpu, monkeypatch):
    """A peak is counted anew after a first step, when of all contenders only one has anything on the GPU."""
    benches, there = [], []
    made = speed.TimedModel.__init__

    def init(bench, *args):
        benches.append(bench)
        made(bench, *args)

    def reset(device):
        tensors = {id(b): [*b.model.parameters(), *b.large.values(), *b.single.values()] for b in benches}
        there.append([sum(map(gpu.has, held)) / len(held) for held in tensors.values()])

    monkeypatch.setattr(speed.TimedModel, "__init__", init)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    asked = ["bench", "digits-vit", "--sweep-heads", "2", "--rounds", "2", "--batch", "4", "--backends", "math,cudnn"]
    document = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert (document["device"], document["load"]["precision"]) == ("NVIDIA H200", "bf16")
    assert document["peak_memory_kind"] == "cuda allocator peak"
    assert any("cudnn" in text for text in document["skipped"])
    assert len(there) == len(document["rows"]) == 4  # two backends of the first one, and two sweeps
    # The second backend shares model with the first and holds inputs of its own.
    assert [held.count(1.0) for held in there[2:]] == [1, 1] and all(held[0] == 0 for held in there[2:])
    assert all(held[1:] == [0, 0] for held in there[:2])
    # The clock waits for the device before and after each of three works of four rows, in warm-ups and rounds.
    assert gpu.calls["synchronize"] >= 2 * 3 * 4 * (2 + speed.WARM_UP)


def test_a_backend_that_fails_in_its_own_words_is_left_out():
    def failing(words: str, backend: str) -> SimpleNamespace:
        def step():
            raise RuntimeError(words)

        optimizer = SimpleNamespace(zero_grad=lambda set_to_none: None)
        load = Setting(8, 1, "fp32")
        return SimpleNamespace(backend=backend, step=step, optimizer=optimizer, load=load, single=None)

    known = {
        "No available kernel. Aborting execution.": "no such kernel",
        "cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.\nmore": "No valid execution",
    }
    for words, told in known.items():
        problem = speed.runs(failing(words, "cudnn"))
        assert told in problem and "\n" not in problem
        with pytest.raises(RuntimeError, match=words[:20]):  # nobody forced it: there is nothing to leave out
            speed.runs(failing(words, "auto"))
    with pytest.raises(OutOfMemory):
        speed.runs(failing("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "flash"))


# -- training -------------------------------------------------------------------------------------

TRAININGS = {
    "bf16-ema": {"precision": "bf16", "ema": {"decay": 0.9}},
    "fp16-accumulated": {"precision": "fp16", "micro_batch": 4},
    "lamb-skip": {"optim": {"name": "lamb", "lr": 1e-2}, "nan": "skip"},
}


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
def test_a_training_is_that_of_the_cpu(train, tmp_path, monkeypatch):
    def run(place: str):
        options = {"loaded": word_model(), "task": Words(), "say": print}
        return loop.train(recipe(**train), tmp_path, tmp_path / place, **options).as_dict()

    told = {"cpu": run("cpu")}
    with plugged_in(monkeypatch):
        told["cuda"] = run("cuda")
    assert told["cuda"]["device"] == "NVIDIA H200" and told["cuda"]["memory"]["kind"] == "cuda allocator peak"
    assert told["cuda"]["final"]["loss"] == pytest.approx(told["cpu"]["final"]["loss"], rel=1e-4)


def test_a_checkpoint_moves_between_devices(tmp_path, monkeypatch):
    """Begun on a GPU and gone on with on a CPU, and the other way round: the optimizer takes one kernel on both."""
    fused = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: fused.append(self.param_groups[0]["fused"]) or step(self)
    )

    def run(place: str, folder, task, resume: str):
        settings = recipe(checkpoint={"every": "2st"}, ema={"decay": 0.9})
        with plugged_in(monkeypatch) if place == "cuda" else nullcontext():
            options = {"loaded": word_model(), "task": task, "say": print, "resume": resume}
            return loop.train(settings, tmp_path, folder, **options).as_dict()

    losses = []
    for first, second in (("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu")):
        folder = tmp_path / f"{first}-{second}"
        fused.clear()
        with pytest.raises(KeyboardInterrupt):
            run(first, folder, Interrupted(), "never")
        told = run(second, folder, Words(), "auto")
        assert told["resumed_after"]
        assert all(fused)
        losses.append(told["final"]["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


class Interrupted(Words):
    """Ctrl-C at the sixth batch."""

    seen = 0

    def batch(self, split, indices, *, seed, epoch):
        self.seen += split == "train"
        if self.seen == 6:
            raise KeyboardInterrupt
        return super().batch(split, indices, seed=seed, epoch=epoch)


def test_mixing_has_the_places_of_the_images(gpu, tmp_path):
    class Pictures(Dots):
        def batch(self, split, indices, **rest):
            found = super().batch(split, indices, **rest)
            return found | {"pixel_values": found["pixel_values"].view(-1, 1, 4, 4)}

        def model_overrides(self):
            return {"num_labels": 3}

    model = dot_model()
    model.model = torch.nn.Sequential(torch.nn.Flatten(), *model.model)
    wanted = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "micro_batch": 8}
    told = loop.train(recipe(**wanted), tmp_path, tmp_path / "run", loaded=model, task=Pictures(), say=print).as_dict()
    assert told["device"] == "NVIDIA H200"


class Augmented(Words):
    """Draws from the generators of the whole process, as augmentation of images does, and takes its time."""

    draws_globally = True
    threads: ClassVar[Counter] = Counter()

    def batch(self, split, indices, *, seed, epoch):
        self.threads[threading.current_thread().name] += 1
        rows = []
        for _ in chance.seed_each(seed, epoch, indices):
            time.sleep(0.0005)
            rows.append([*np.random.rand(4), *torch.rand(4).tolist()])
        return {"input_ids": torch.tensor(rows)}


@pytest.mark.parametrize("apart", [False, True], ids=["global", "of-its-own"])
def test_samples_do_not_follow_from_who_draws_first(apart, gpu):
    """Steps seed the generators of the process. A thread ahead of the GPU may only make what does not need them."""
    settings = Train.model_validate({"duration": "6st", "batch": 16, "optim": {"lr": 1e-3}})
    task, scheme, device = Augmented(), schedule.make_plan(settings, 64, 1), torch.device("cuda")
    task.draws_globally, task.threads = not apart, Counter()
    found = []
    for number, (batch,) in enumerate(data_loader.train_batches(task, scheme, rank=0, device=device)):
        found.append(batch["input_ids"].cpu())
        for _ in range(20):  # a step, with dropout and mixup
            distributed.seed_generators(device, number)
            np.random.seed(number)
            time.sleep(0.0005)
    wanted = [b["input_ids"] for (b,) in data_loader.train_batches(task, scheme, rank=0, device=torch.device("cpu"))]
    assert ("leansurgeon-data_0" in task.threads) == apart
    assert apart or all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_is_not_fitting_at_evaluation_is_said_so(tmp_path):
    class Large(Words):
        def score(self, logits, batch, **rest):
            if not torch.is_grad_enabled():
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
            return super().score(logits, batch, **rest)

    with pytest.raises(OutOfMemory, match="evaluate 4 samples") as caught:
        loop.train(recipe(), tmp_path, tmp_path / "run", loaded=word_model(), task=Large(), say=print, cpu=True)
    assert "train.eval.batch=2" in caught.value.hint


def test_a_micro_batch_is_halved_until_it_fits(gpu, tmp_path):
    class Small(torch.nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def forward(self, ids):
            if len(ids) > 4 and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return self.inside(ids)

    model, said = word_model(), []
    model.model = Small(model.model)
    told = loop.train(recipe(), tmp_path, tmp_path / "run", loaded=model, task=Words(), say=said.append).as_dict()
    assert told["micro_batch"] == 4 and sum("does not fit" in line for line in said) == 2
    assert gpu.calls["empty_cache"] >= 3
