"""Cuts in one call, and tiny models that are trained a little, with sample data of their own."""

from dataclasses import replace
from pathlib import Path

import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.data.pairs import Seq2Seq, batch_of
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out
from leansurgeon.surgery.transfer import apply
from tests.conftest import build, output
from tests.support.methods import with_method

PAIRED = ("t5", "bart")  # families that read one text and write another


def cut(folder, out, method=None, *, seed=3, check=False, **wanted):
    """Cut a model folder without data; the plan and the record."""
    steps = plan(open_source(str(folder)), RequestedShape(**wanted), seed, method)
    return steps, carry_out(DecidedCut(steps), out, check=check)


def logits(model, inputs):
    with torch.no_grad():
        return output(model.eval(), inputs)


def text_batches(count, seed, family):
    """Sequences with a rule: each token is the one before plus a step that the first two tokens give."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start, step = (torch.randint(0, n, (8, 1), generator=generator) for n in (50, 7))
        ids = 5 + (start + step * torch.arange(16)) % 50
        mask = torch.ones_like(ids)
        if family == "bert":
            mask[::3, 12:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
    return found


def image_batches(count, seed, family):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        labels = torch.randint(0, 10, (8,), generator=generator)
        images = 0.3 * torch.randn(8, 1, 8, 8, generator=generator)
        images[:, 0] += torch.nn.functional.one_hot(labels % 8, 8)[:, None] * (1.0 + (labels > 7))[:, None, None]
        found.append({"pixel_values": images, "labels": labels})
    return found


def pairs(count, seed, family):
    """A rule to go on with: the input has its beginning, the answer what follows; of several lengths."""
    found = []
    for i, batch in enumerate(text_batches(count, seed, family)):
        long = 8 + i % 3
        rows = [(ids[:long].tolist(), ids[long : 14 + k % 3].tolist()) for k, ids in enumerate(batch["input_ids"])]
        found.append(batch_of(rows, pad=0, start=0))
    return found


def batches_of(family):
    return pairs if family in PAIRED else image_batches if family == "vit" else text_batches


def samples(family, fit=12, guard=4, heldout=4, seed=2):
    """Sample data that follow the family's rule."""
    batches = batches_of(family)
    sizes = {"fit": (fit, seed), "guard": (guard, seed + 1), "heldout": (heldout, seed + 2)}
    parts = {name: batches(*numbers, family) for name, numbers in sizes.items()}
    return Calibration("tiny", "tiny", "-", **parts, task=Seq2Seq() if family in PAIRED else None)


def few_samples(family):
    """Enough to fit and to guard, for cuts that are compared with each other alone."""
    return samples(family, 4, 2, 1)


def train(family, folder, steps=40, seed=1, **changes) -> Path:
    """Save a tiny model of a family in `folder` after a few steps of Adam."""
    model = build(family, initializer_range=0.1, **changes)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for batch in batches_of(family)(steps, seed, family):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    return folder


def cut_with_data(tmp_path, trained, wanted, name="out", **options):
    """Calibrate a cut and write it; its folder and what was decided."""
    folder, data = trained
    steps = plan(open_source(str(folder)), RequestedShape(**wanted), calibrated=True)
    outcome = calibrate(with_method(steps, **options), data)
    out = tmp_path / name
    out.mkdir()
    apply(replace(steps, layers=outcome.record.layers), out, outcome.edits)
    return out, outcome


@torch.no_grad()
def error(folder, source, data):
    """Relative error of the logits on samples that nothing was fitted to or chosen by."""
    a, b = (load(f).model.eval() for f in (source, folder))
    off = size = 0.0
    for batch in data.heldout:
        x, y = a(**batch).logits, b(**batch).logits
        mask = batch["labels"].ne(-100) if "decoder_input_ids" in batch else batch.get("attention_mask")
        if mask is not None:
            x, y = x[mask.bool()], y[mask.bool()]
        off, size = off + float((x - y).square().sum()), size + float(x.square().sum())
    return (off / size) ** 0.5
