"""Digits and Fashion-MNIST: contents, splits, augmentation, and idx files that are not what they say."""

from __future__ import annotations

import gzip
import itertools
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits

from leansurgeon.errors import UsageError
from leansurgeon.tasks.images import small
from tests.tasks.prepared import everything, prepare


def test_digits_are_scikit_learns_split_evenly(tmp_path):
    task = prepare(tmp_path, "digits")
    assert (task.size("train"), task.size("eval")) == (1437, 360)
    parts = [everything(task, split) for split in ("train", "eval")]
    images = torch.cat([part["pixel_values"] for part in parts])
    labels = torch.cat([part["labels"] for part in parts])
    data = load_digits()
    ours = zip((images[:, 0] + 1).mul(8).byte().flatten(1).tolist(), labels.tolist(), strict=True)
    theirs = zip(data.data.astype(int).tolist(), data.target.tolist(), strict=True)
    assert sorted(ours) == sorted(theirs)
    shares = parts[1]["labels"].bincount() / 360
    assert torch.allclose(shares, torch.from_numpy(np.bincount(data.target) / 1797).float(), atol=1 / 360)
    other = prepare(tmp_path, "digits", split_seed=1).batch("eval", np.arange(360), seed=0, epoch=0)
    assert not torch.equal(other["pixel_values"], parts[1]["pixel_values"])
    assert task.model_overrides() == {"num_labels": 10, "image_size": 8, "num_channels": 1}


# -- Fashion-MNIST from made-up files ------------------------------------------------------------------------


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    return bytes((0, 0, kind, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_set(folder: Path, train: int = 30, evaluation: int = 20, compress: bool = True) -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(0), {}
    folder.mkdir(exist_ok=True)
    for name, size in (("train", train), ("t10k", evaluation)):
        made[f"{name}-images-idx3-ubyte"] = rng.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        made[f"{name}-labels-idx1-ubyte"] = rng.integers(0, 10, size, dtype=np.uint8)
    for name, array in made.items():
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (folder / name).write_bytes(idx_bytes(array))
    return made


@pytest.mark.parametrize("compress", [True, False])
def test_fashion_images_come_back_from_their_files(tmp_path, compress):
    made = write_set(tmp_path / "data", compress=compress)
    task = prepare(tmp_path / "cache", "fashion-mnist", data=str(tmp_path / "data"), augment=False, eval_samples=7)
    assert (task.size("train"), task.size("eval")) == (30, 7)
    batch = task.batch("train", np.array([4, 29]), seed=0, epoch=0)
    pixels = (batch["pixel_values"] * 0.3530 + 0.2860) * 255
    assert np.allclose(pixels[:, 0], made["train-images-idx3-ubyte"][[4, 29]], atol=1e-3)
    assert batch["labels"].tolist() == made["train-labels-idx1-ubyte"][[4, 29]].tolist()


def test_augmentation_is_a_shift_by_up_to_two_pixels_and_a_flip(tmp_path):
    images = write_set(tmp_path, train=500)["train-images-idx3-ubyte"]
    augmented = small.shift_images(images, 1, 2, np.arange(500), 2)
    places = list(itertools.product(range(5), range(5), (1, -1)))
    seen = []
    for image, result in zip(images, augmented, strict=True):
        wide = np.pad(image, 2)
        variants = [wide[:, ::flip][down : down + 28, right : right + 28] for down, right, flip in places]
        (which,) = [i for i, variant in enumerate(variants) if np.array_equal(variant, result)]
        seen.append(places[which])
    for kinds, drawn in zip((5, 5, 2), zip(*seen, strict=True), strict=True):
        counts = Counter(drawn)
        assert len(counts) == kinds and stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_missing_files_name_the_package(tmp_path):
    with pytest.raises(UsageError, match=r"Fashion-MNIST\b.*nowhere\b.*\.gz\b.*apt-get install dataset-fashion-mnist"):
        prepare(tmp_path, "fashion-mnist", data=str(tmp_path / "nowhere"))


IMAGES = "train-images-idx3-ubyte.gz"
GOOD = idx_bytes(np.zeros((30, 28, 28), dtype=np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(GOOD)[:-30], "truncated"),
        (gzip.compress(GOOD[:-1]), "not an idx file of N x 28 x 28 bytes"),
        (gzip.compress(GOOD + b"x"), "not an idx file"),
        (gzip.compress(b""), "not an idx file"),
        (GOOD, r"\bgzip\b"),
        (gzip.compress(idx_bytes(np.zeros((30, 784), dtype=np.uint8))), "not an idx file"),
        (gzip.compress(idx_bytes(np.zeros((29, 28, 28), dtype=np.uint8))), "29 images and .* 30 labels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",  # gzip puts the time into the bytes
)
def test_bad_files_are_one_sentence_and_leave_no_cache(tmp_path, content, message):
    write_set(tmp_path / "data")
    (tmp_path / "data" / IMAGES).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        prepare(tmp_path / "cache", "fashion-mnist", data=str(tmp_path / "data"))
    assert IMAGES in str(caught.value) and "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.equipped
def test_the_real_fashion_mnist(tmp_path):
    task = prepare(tmp_path, "fashion-mnist", augment=False)
    assert (task.size("train"), task.size("eval")) == (60_000, 10_000)
    labels = [everything(task, split)["labels"] for split in ("train", "eval")]
    assert labels[0].bincount().tolist() == [6000] * 10 and labels[1].bincount().tolist() == [1000] * 10
    pixels = task._array("train-images") / 255.0
    assert (pixels.mean(), pixels.std()) == (pytest.approx(0.2860, abs=1e-4), pytest.approx(0.3530, abs=1e-4))
