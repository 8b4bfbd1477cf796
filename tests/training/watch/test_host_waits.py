"""Between two looks at the loss the host never waits for the device: operators that would make it wait are counted.

On a CPU nobody waits, but the same operators run: `.item()`, `bool(tensor)` and shapes that depend on data all show in
the dispatcher. AdamW runs fused, as on a GPU (its other form keeps counters on the CPU and reads them there). Where
there is a GPU, torch itself is asked to raise at every wait.

One wait is not ours: an eager transformers model that is given an attention mask looks once per forward whether it is
all ones (`padding_mask.all()` in its masking_utils); compiled it does not.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from leansurgeon import tasks
from leansurgeon.models.crammed_bert import CrammedBertConfig, CrammedBertForMaskedLM
from leansurgeon.training import data_loader, distributed, optimizer, schedule
from leansurgeon.training.objective import Objective
from leansurgeon.training.optimizer import Average, Trainer
from leansurgeon.training.recipe.schema import Ema, Train
from leansurgeon.training.schedule import Pace
from tests.support.training_standin import StandIn, run_training

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.repeat_interleave,
}
READS = ("tolist", "numpy", "cpu", "item", "__bool__", "__float__", "__int__")


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: operators, and methods that read a tensor without one."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.found = Counter()
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def _counted(self, name, method):
        def counting(tensor, *args, **kwargs):
            self.found[name] += 1
            return method(tensor, *args, **kwargs)

        return counting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func.overloadpacket in WAITS or by_mask:
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Loaded(StandIn):
    def forward(self, batch):
        return super().forward(batch).logits


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


def crammed(size):
    return Loaded(CrammedBertForMaskedLM(CrammedBertConfig(**SMALL, **size)))


def gpt2(size):
    return Loaded(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, **size)))


def vit(size):
    config = ViTConfig(**SMALL, image_size=8, patch_size=2, num_channels=1, num_labels=10)
    return Loaded(ViTForImageClassification(config), "pixel_values")


CASES = {
    "masked-lm": ("masked-lm", {"tokenizer": "char", "seq_len": 32}, crammed),
    "causal-lm": ("causal-lm", {"tokenizer": "char", "seq_len": 32}, gpt2),
    "images": ("digits", {}, vit),
}


def trainer_of(case, cache, **train):
    """A trainer that has made its first step, which makes the optimizer's state; and the batches of the second."""
    name, options, build = CASES[case]
    task = tasks.make(name, options)
    task.prepare(cache, None, workers=1, say=lambda text: None)
    settings = Train.model_validate({"duration": "9st", "batch": 8, "optim": {"lr": 1e-3}, **train})
    accelerator = distributed.start_accelerator()
    torch.manual_seed(0)
    loaded = build({key: value for key, value in task.model_overrides().items() if key == "vocab_size"})
    loaded.model.to(accelerator.device)
    average = Average(loaded, Ema()) if settings.ema else None
    scored = Objective(loaded, task, settings).to(accelerator.device).train()
    adamw = optimizer.make_optimizer(scored, settings.optim, fused=True)
    scheme = schedule.make_plan(settings, task.size("train"), 1)
    trainer = Trainer(accelerator, scored, scored, adamw, Pace(scheme), average=average)
    batches = data_loader.train_batches(task, scheme, rank=0, device=accelerator.device)
    trainer.step(0, next(batches))
    return trainer, next(batches)


MORE = {"micro_batch": 4, "clip_grad": 0, "ema": {}}


@pytest.mark.parametrize(("case", "train"), [("masked-lm", MORE), ("causal-lm", {}), ("images", MORE)], ids=str)
def test_a_step_reads_nothing(case, train, tmp_path, monkeypatch):
    trainer, batches = trainer_of(case, tmp_path, **train)
    with monkeypatch.context() as patched, Waits(patched) as waits:
        result = trainer.step(1, batches)
    assert not waits.found
    with monkeypatch.context() as patched, Waits(patched) as waits:
        result.tolist(), bool(result[0] > 0), result[result > 0]
    assert set(waits.found) == {"tolist", "__bool__", "aten._local_scalar_dense.default", "aten.index.Tensor"}


def test_the_loop_reads_once_per_look(tmp_path, monkeypatch):
    """Twice the steps and as many looks: not one wait more."""
    made = optimizer.make_optimizer
    monkeypatch.setattr(optimizer, "make_optimizer", lambda module, settings, fused: made(module, settings, fused=True))
    counts = []
    for steps in (4, 8):
        settings = {"duration": f"{steps}st", "log_every": steps, "eval": {"every": f"{steps}st", "batch": 13}}
        with monkeypatch.context() as patched, Waits(patched) as waits:
            run_training(tmp_path / str(steps), **settings)
        counts.append(waits.found)
    assert counts[0]["tolist"] > 0 and counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_torch_sees_no_wait_on_a_gpu(case, tmp_path):
    trainer, batches = trainer_of(case, tmp_path)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(1, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
