"""Our training loop against two others with the same model, batches, optimizer and flags, in turns within one process.

`transformers.Trainer` on a small BERT (masked language model, dense prediction on both sides) and GPT-2: its `train()`
runs in a thread and is let go for a block of steps at a time. timm's training script is not in its wheel; its
loop is written anew here from timm's own loader, mixup, optimizer and scheduler, in the order of that script (data,
forward, loss, `loss.item()` for the meter, zero_grad, backward, clip, step, scheduler). The claim is throughput of at
least 0.95 of theirs. Run with

    OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_against_trainer.py
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from leansurgeon import tasks
from leansurgeon.tasks import base
from leansurgeon.training import data_loader, distributed, optimizer, schedule
from leansurgeon.training.objective import Objective
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe.schema import Train
from leansurgeon.training.schedule import Pace
from tests.benchmarks.pairs import compare

BLOCK, BLOCKS, WARM_UP = 2, 48, 4
STEPS = WARM_UP + BLOCK * BLOCKS + 1
CLAIM = 0.95  # of their throughput, at least
SETTINGS = {
    "duration": f"{STEPS}st",
    "batch": 16,
    "optim": {"name": "adamw", "lr": 5e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    "schedule": {"name": "cosine", "warmup": 0.1},
    "clip_grad": 1.0,
    "log_every": 10,
    "sparse_prediction": False,
}


class _Loaded:
    def __init__(self, model) -> None:
        self.model = model

    def forward(self, batch):
        if "pixel_values" in batch:
            return self.model(batch["pixel_values"])
        return self.model(input_ids=batch["input_ids"]).logits


def our_steps(loaded, task, settings):
    """A generator of steps of our loop, a look at the losses every `log_every` steps included."""
    accelerator = distributed.start_accelerator()
    scheme = schedule.make_plan(settings, task.size("train"), 1)
    scored = Objective(loaded, task, settings).to(accelerator.device).train()
    adamw = optimizer.make_optimizer(scored, settings.optim, fused=accelerator.device.type == "cuda")
    mixing = None
    if settings.mixes:
        from leansurgeon.training.regularize import BatchMixing

        mixing = BatchMixing(settings, task)
    trainer = Trainer(accelerator, scored, scored, adamw, Pace(scheme), mixing=mixing)
    window = []
    for step, batches in enumerate(data_loader.train_batches(task, scheme, rank=0, device=accelerator.device)):
        window.append(trainer.step(step, batches))
        if (step + 1) % settings.log_every == 0:
            torch.stack(window).tolist()
            window = []
        yield


# -- transformers.Trainer --------------------------------------------------------------------------


class _Turns:
    """A loop in a thread that waits for its turn before every step: `run(pause)` calls `pause` between its steps.

    Both sides run so: the allocator treats threads otherwise than the main one.
    """

    def __init__(self, run) -> None:
        self._go, self._done, self._error = threading.Semaphore(0), threading.Semaphore(0), None
        threading.Thread(target=self._run, args=(run,), daemon=True).start()

    def _run(self, run) -> None:
        self._go.acquire()
        try:
            run(self._pause)
        except BaseException as error:
            self._error = error
        self._done.release()

    def _pause(self) -> None:
        self._done.release()
        self._go.acquire()

    def __iter__(self):
        return self

    def __next__(self) -> None:
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error


def _trainer(model, rows, settings, folder):
    """A `transformers.Trainer` on rows of ready tensors, so that neither side pays for making data."""
    from transformers import Trainer as Theirs
    from transformers import TrainerCallback, TrainingArguments

    optim = settings.optim
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS + 8,
        per_device_train_batch_size=settings.batch,
        learning_rate=optim.lr,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=settings.clip_grad,
        lr_scheduler_type="cosine",
        warmup_steps=round(0.1 * STEPS),
        optim="adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
        logging_steps=settings.log_every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        use_cpu=not torch.cuda.is_available(),
        dataloader_num_workers=0,
    )

    def run(pause):
        class Wait(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                pause()

        Theirs(model=model, args=arguments, train_dataset=rows, callbacks=[Wait()]).train()

    return run


def _in_a_thread(loop):
    def run(pause):
        for _ in loop:
            pause()

    return _Turns(run)


def _bert(size):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=size
    )
    return BertForMaskedLM(config)


def _gpt2(size):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=size, n_positions=128))


@pytest.mark.benchmark
@pytest.mark.parametrize(
    ("name", "tokenizer", "build"), [("masked-lm", "wordpiece", _bert), ("causal-lm", "bpe", _gpt2)]
)
def test_transformers_trainer(name, tokenizer, build, tmp_path):
    task = tasks.make(name, {"tokenizer": tokenizer, "vocab_size": 2048, "seq_len": 64})
    task.prepare(tmp_path / "cache", None, workers=1, say=lambda text: None)
    settings = Train.model_validate(SETTINGS)
    batch = task.batch("train", np.arange(task.size("train")), seed=0, epoch=0)
    rows = [{key: batch[key][i] for key in ("input_ids", "labels")} for i in range(task.size("train"))]
    size = task.model_overrides()["vocab_size"]
    theirs = _Turns(_trainer(build(size), rows, settings, tmp_path / "theirs"))
    device = distributed.start_accelerator().device
    ours = _in_a_thread(our_steps(_Loaded(build(size)), task, settings))
    found = compare(ours, theirs, block=BLOCK, blocks=BLOCKS, warm_up=WARM_UP, device=device)
    _tell(f"transformers.Trainer, {name}", found, device)


# -- timm's script ---------------------------------------------------------------------------------


class _Images(base.Task):
    """Made-up images that lie in memory: what is compared is the loop."""

    name, head = "made-up", "image-classification"
    metric = base.Metric("accuracy", "top-1 accuracy", higher_is_better=True, percent=True)
    Options = base.Options
    classes = 10

    def __init__(self) -> None:
        super().__init__(base.Options())
        draw = np.random.default_rng(0)
        self.images = torch.from_numpy(draw.standard_normal((512, 3, 32, 32), dtype=np.float32))
        self.labels = torch.from_numpy(draw.integers(0, self.classes, 512))

    def prepare(self, cache, model_dir, *, workers, say):
        pass

    def size(self, split):
        return len(self.labels)

    def batch(self, split, indices, *, seed, epoch):
        rows = torch.from_numpy(np.array(indices))
        return {"pixel_values": self.images[rows], "labels": self.labels[rows]}

    def score(self, logits, batch, *, label_smoothing=0.0):
        return base.classification_score(logits, batch["labels"], label_smoothing)

    def model_overrides(self):
        return {"num_labels": self.classes}

    def describe(self):
        return {}


class _Rows:
    """The same for timm's loader, which asks for one sample at a time."""

    transform = target_transform = None

    def __init__(self, task) -> None:
        self.task = task

    def __len__(self) -> int:
        return len(self.task.labels)

    def __getitem__(self, index):
        return self.task.images[index], self.task.labels[index]


def _vit():
    import timm

    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=96, depth=6, num_heads=4, num_classes=10
    )


def _script(model, task, settings, device):
    """The loop of timm's training script, as far as these flags go through it (no prefetcher, no distribution)."""
    from timm.data import Mixup, create_loader
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter, dispatch_clip_grad

    loader = create_loader(
        _Rows(task), (3, 32, 32), settings.batch, is_training=True, use_prefetcher=False, no_aug=True, num_workers=0
    )
    mixup = Mixup(settings.mixup, settings.cutmix, label_smoothing=settings.label_smoothing, num_classes=task.classes)
    model = model.to(device)
    optim = settings.optim
    adamw = create_optimizer_v2(model, opt="adamw", lr=optim.lr, weight_decay=optim.weight_decay, betas=optim.betas)
    epochs = -(-STEPS // len(loader)) + 1
    scheduler, _ = create_scheduler_v2(
        adamw,
        sched="cosine",
        num_epochs=epochs,
        warmup_epochs=1,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    criterion, losses, times = SoftTargetCrossEntropy(), AverageMeter(), AverageMeter()
    updates = 0
    for _ in range(epochs):
        model.train()
        start = time.time()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            images, labels = mixup(images, labels)
            loss = criterion(model(images), labels)
            losses.update(loss.item(), images.size(0))
            adamw.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), value=settings.clip_grad, mode="norm")
            adamw.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            updates += 1
            times.update(time.time() - start)
            scheduler.step_update(num_updates=updates, metric=losses.avg)
            start = time.time()
            yield


@pytest.mark.benchmark
def test_timm_script():
    task, device = _Images(), distributed.start_accelerator().device
    settings = Train.model_validate(
        {**SETTINGS, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "schedule": {"warmup": 0.1}}
    )
    ours, theirs = (
        _in_a_thread(loop)
        for loop in (our_steps(_Loaded(_vit()), task, settings), _script(_vit(), task, settings, device))
    )
    found = compare(ours, theirs, block=BLOCK, blocks=BLOCKS, warm_up=WARM_UP, device=device)
    _tell("timm's script, ViT", found, device)


def _tell(what, found, device) -> None:
    print(
        f"\n{what} on {device}: ours {1000 * found.first:.1f} ms, theirs {1000 * found.second:.1f} ms per step; "
        f"throughput {1 / found.ratio:.3f} of theirs (quartiles {1 / found.high:.3f} to {1 / found.low:.3f}, "
        f"{BLOCKS} paired blocks of {BLOCK} steps)"
    )
    assert 1 / found.ratio >= CLAIM
