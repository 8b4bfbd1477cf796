"""What published tasks read from tiny files in their published forms, batch by batch, is what it always was."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from leansurgeon import tasks
from tests.tasks import test_glue, test_image_folder, test_images, test_lra
from tests.tasks.prepared import prepare

IMAGES = {"image_size": 16, "hold_out": False, "auto_augment": "rand-m9-mstd0.5"}
GLUE = {"tokenizer": "byte"}
CASES = {
    "digits": ("digits", {}, None),
    "fashion": ("fashion-mnist", {}, test_images.write_set),
    "cifar": ("cifar10", {}, test_lra.write_cifar),
    "lra-text": ("lra-text", {"max_length": 200}, test_lra.write_reviews),
    "lra-retrieval": ("lra-retrieval", {}, lambda folder: test_lra.write_pairs(folder)[0]),
    "lra-image": ("lra-image", {}, test_lra.write_cifar),
    "listops": ("listops", {"train": 8, "eval": 4, "test": 4, "min_length": 20, "max_length": 60}, None),
    "pathfinder": ("pathfinder", {"samples": 20, "difficulty": "easy"}, None),
    "imagenet": ("imagenet", IMAGES, lambda folder: test_image_folder.write(folder, "folder")),
    "glue-stsb": ("glue", GLUE | {"task": "stsb"}, lambda folder: test_glue.write_hub(folder, "stsb")),
    "glue-mnli": ("glue", GLUE | {"task": "mnli"}, lambda folder: test_glue.write_hub(folder, "mnli")),
    "austen": ("masked-lm", {"tokenizer": "char", "seq_len": 32}, None),
}
# Of the first batches: of whole numbers a digest, of pixels mean and deviation, which libraries may round otherwise.
FROZEN = {
    "digits": "19e344eb7724b2dd -0.40 0.75",
    "fashion": "84f8330eb1f7c312 0.54 0.86",
    "cifar": "460ecbca3db969d2 -0.03 1.23",
    "lra-text": "3aef9279373870ef 0.00 0.00",
    "lra-retrieval": "637ddc4dff6dca79 0.00 0.00",
    "lra-image": "932e43da88ad74eb 0.00 0.00",
    "listops": "9dac2e7ff23da73f 0.00 0.00",
    "pathfinder": "2dbcad2af7f9d54a 0.00 0.00",
    "imagenet": "6b0c134537bbd885 0.22 1.00",
    "glue-stsb": "cea1e0f8d3307ea7 0.00 0.00",
    "glue-mnli": "2b975f522ee410cd 0.00 0.00",
    "austen": "55075ffb51b68d04 0.00 0.00",
}


def batches(task: tasks.Task) -> list[tuple[str, torch.Tensor]]:
    """The first eight samples of every split by name, as two epochs show them."""
    return [
        (f"{split} {name}", tensor)
        for split in task.splits
        for epoch in (0, 1)
        for name, tensor in task.batch(split, np.arange(min(8, task.size(split))), seed=3, epoch=epoch).items()
    ]


def made(case: str, folder) -> tasks.Task:
    name, options, write = CASES[case]
    written = write(folder / "data") if write else None
    given = {"data": written if isinstance(written, str) else str(folder / "data")} if write else {}
    return prepare(folder / "cache", name, **options | given)


def told(named: list[tuple[str, torch.Tensor]]) -> str:
    whole = hashlib.sha256()
    pixels = []
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.dim() > 1:
            pixels.append(tensor.flatten())
        else:
            whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + tensor.numpy().tobytes())
    shown = torch.cat(pixels) if pixels else torch.zeros(2)
    return f"{whole.hexdigest()[:16]} {shown.mean():.2f} {shown.std():.2f}"


@pytest.mark.parametrize("case", CASES)
def test_batches_are_what_they_were(tmp_path, case):
    assert told(batches(made(case, tmp_path))) == FROZEN[case]
