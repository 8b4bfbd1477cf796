"""What our loop adds to a training step: the same model, batches, optimizer and clipping in a bare loop, paired.

The two loops alternate within one run, block by block, so that a noisy neighbour slows both; on a CPU the time of the
process is taken, on a GPU that of the clock. The claim is the median over the blocks of (our seconds / bare seconds):
at most 1.03. Run with `OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_loop_overhead.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from leansurgeon import tasks
from leansurgeon.training import data_loader, distributed, optimizer, schedule
from leansurgeon.training.recipe.schema import Train
from tests.benchmarks.pairs import compare
from tests.benchmarks.test_against_trainer import our_steps

BLOCK, BLOCKS, WARM_UP = 5, 120, 20
CLAIM = 1.03


class _Loaded:
    def __init__(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        torch.manual_seed(0)
        size = dict(hidden_size=64, num_hidden_layers=6, num_attention_heads=4, intermediate_size=256)
        images = dict(image_size=8, patch_size=2, num_channels=1, num_labels=10)
        self.model = ViTForImageClassification(ViTConfig(**size, **images))

    def forward(self, batch):
        return self.model(pixel_values=batch["pixel_values"]).logits


def _bare(task, settings, device):
    """The same in plain PyTorch: batch, forward, loss, backward, clip, step, schedule; a look every `log_every`."""
    from transformers import get_scheduler

    loaded = _Loaded()
    model = loaded.model.to(device).train()
    groups = optimizer.parameter_groups(model, settings.optim.weight_decay)
    adamw = torch.optim.AdamW(groups, lr=settings.optim.lr, fused=device.type == "cuda" or None)
    scheme = schedule.make_plan(settings, task.size("train"), 1)
    falling = get_scheduler("cosine", adamw, scheme.warmup, scheme.steps)
    losses = []
    for step in range(scheme.steps):
        epoch, place = divmod(step * scheme.batch, scheme.epoch_samples)
        indices = data_loader.epoch_order(0, epoch, task.size("train"))[place : place + scheme.batch]
        batch = task.batch("train", indices, seed=0, epoch=epoch)
        images, labels = batch["pixel_values"].to(device), batch["labels"].to(device)
        loss = F.cross_entropy(model(pixel_values=images).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        falling.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if len(losses) == settings.log_every:
            torch.stack(losses).tolist()
            losses = []
        yield


@pytest.mark.benchmark
def test_a_step_costs_at_most_three_percent_more_than_a_bare_one(tmp_path):
    task = tasks.make("digits")
    task.prepare(tmp_path, None, workers=1, say=lambda text: None)
    steps = WARM_UP + BLOCK * BLOCKS + 1
    settings = Train.model_validate(
        {"duration": f"{steps}st", "batch": 64, "optim": {"lr": 2e-3, "weight_decay": 0.05}, "log_every": 10}
        | {"schedule": {"name": "cosine", "warmup": 0.1}}
    )
    ours = our_steps(_Loaded(), task, settings)
    device = distributed.start_accelerator().device
    bare = _bare(task, settings, device)
    found = compare(ours, bare, block=BLOCK, blocks=BLOCKS, warm_up=WARM_UP, device=device)
    print(
        f"\nloop overhead on {device}: ours {1000 * found.first:.2f} ms, bare {1000 * found.second:.2f} ms per step; "
        f"{found}, {BLOCKS} paired blocks of {BLOCK} steps"
    )
    assert found.ratio <= CLAIM
