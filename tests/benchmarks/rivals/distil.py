"""Learning the source's predictions by the clock, with the blocks before the cut as they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from leansurgeon.measure.data.batches import rows_of
from leansurgeon.surgery.local_fit import products
from leansurgeon.training.distill import divergence
from leansurgeon.training.recipe.from_model import RATE
from tests.benchmarks.rivals.common import Batch, Batches, blocks, is_causal, width
from tests.benchmarks.rivals.judge import IGNORED

STEP, WARMUP = 1_024, 0.05  # tokens of a step; share of the time
SAME = 0.9  # cosine of two blocks' weights from which one stands for the other


def at_their_place(model: nn.Module, whole: nn.Module) -> int:
    """How many of the first blocks are about those of the source, the one before the cut not counted."""

    def alike(a: nn.Module, b: nn.Module) -> bool:
        pairs = list(zip(a.parameters(), b.parameters(), strict=False))
        if any(x.shape != y.shape for x, y in pairs):
            return False
        x, y = (torch.cat([p[i].detach().flatten().float() for p in pairs if p[i].ndim > 1]) for i in (0, 1))
        return float(nn.functional.cosine_similarity(x, y, dim=0)) > SAME

    same = [alike(a, b) for a, b in zip(blocks(model), blocks(whole), strict=False)]
    return max(0, (same.index(False) if False in same else len(same)) - 1)


def said(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits, and where a label asks for them."""
    causal = is_causal(model)
    given = {key: value for key, value in batch.items() if key != "labels"} | ({"use_cache": False} if causal else {})
    with products(width(model), model.device.type)():
        logits = model(**given).logits
    labels = batch["labels"]
    return (logits[:, :-1], labels[:, 1:] != IGNORED) if causal else (logits, labels != IGNORED)


def steps_of(batches: Batches, seed: int) -> Iterator[Batch]:
    """Samples of about `STEP` tokens together, in a drawn order, again and again; images in batches as they come."""
    draws = torch.Generator().manual_seed(seed)
    while True:
        for i in torch.randperm(len(batches), generator=draws).tolist():
            batch = batches[i]
            size = max(1, STEP // batch["input_ids"].shape[1]) if "input_ids" in batch else rows_of(batch)
            for first in range(0, rows_of(batch), size):
                yield {key: value[first : first + size] for key, value in batch.items()}


def healed(
    model: nn.Module, whole: nn.Module, batches: Batches, marks: Sequence[float], look: Callable[[float, int], None]
) -> None:
    """Train for `marks[-1]` seconds of processor time; `look(seconds, steps)` at every mark, before the first step
    where that is 0. Nothing is dropped at random: the source drops nothing either.
    """
    model.requires_grad_(False)
    inside = blocks(model)[at_their_place(model, whole) :].requires_grad_(True)
    learning = list(inside.parameters())
    peak = RATE * (384 / width(model)) ** 0.5
    optimizer = torch.optim.AdamW(learning, peak, betas=(0.9, 0.98), weight_decay=0.01)
    spent, left, source = 0.0, list(marks), steps_of(batches, 0)
    for number in range(1_000_000_000):
        while left and spent >= left[0]:
            look(left.pop(0), number)
        if not left:
            return
        begun, share = time.process_time(), spent / marks[-1]
        optimizer.param_groups[0]["lr"] = peak * min(share / WARMUP, 0.5 + 0.5 * math.cos(math.pi * share))
        batch = next(source)
        with torch.no_grad():
            taught, counted = said(whole, batch)
        logits, _ = said(model, batch)
        optimizer.zero_grad()
        (divergence(logits, taught, counted) / counted.sum().clamp(min=1)).backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        spent += time.process_time() - begun
