"""Pathfinder: what is drawn follows the published parameters."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from leansurgeon.tasks.long_range import pathfinder_draw
from leansurgeon.tasks.long_range.pathfinder_draw import CONTOUR_LENGTH, LENGTH, MARGIN, PAD, SEED_DISTANCE, ends
from tests.tasks.prepared import prepare

prepared = partial(prepare, name="pathfinder")


@pytest.fixture(scope="module", params=["easy", "hard"])
def drawn(request):
    length = CONTOUR_LENGTH[request.param]
    return length, pathfinder_draw.chunk(length, 0, 1, 1500 if request.param == "easy" else 6000)


def test_contours_are_as_long_as_published(drawn):
    length, found = drawn
    assert len(found.labels) > 150
    assert found.dashes.shape[1:] == (2, length, 2)
    # From end to end, dashes are a dash and its gaps apart: length + 2 margin, each position rounded to a pixel.
    steps = np.linalg.norm(np.diff(found.dashes, axis=2), axis=-1)[:, :, 1:]
    published = LENGTH + 2 * MARGIN + LENGTH + MARGIN
    assert steps.min() > 1 and steps.max() <= published + 2 and 3 < np.median(steps) < published
    assert found.dashes.min() >= 0 and found.dashes.max() < 32


def test_first_ends_are_seven_pixels_apart_around_the_middle(drawn):
    _, found = drawn
    starts = found.tips[:, :, 0]
    apart = np.linalg.norm(starts[:, 0] - starts[:, 1], axis=-1)
    assert np.abs(apart - SEED_DISTANCE).max() <= np.sqrt(0.5) and abs(apart.mean() - 7) < 0.1
    assert starts[:, 0].min() >= 14 and starts[:, 0].max() <= 17  # twice the distance from every side


def test_distractors_are_as_many_as_published(drawn):
    length, found = drawn
    distractors = {6: 10, 14: 5}[length]
    assert found.found.max() == distractors and found.found.mean() > 0.9 * distractors


def test_half_of_the_images_have_a_path(drawn):
    _, found = drawn
    assert stats.binomtest(int(found.labels.sum()), len(found.labels)).pvalue > 1e-3
    assert stats.binomtest(int(found.marked[:, 0].sum()), len(found.labels)).pvalue > 1e-3
    assert np.array_equal(found.marked[:, 0] == found.marked[:, 1], found.labels == 1)


def test_contours_turn_by_the_published_law():
    """With nothing in the way, an end at angle delta from straight is chosen in proportion to cos^2(delta)."""
    n = 4000
    mask = np.zeros((n, 32 + 2 * PAD, 32 + 2 * PAD), dtype=np.float32)
    room, pivot, _, _, kind = pathfinder_draw._extend(np.random.default_rng(0), mask, np.full((n, 2), 14), np.zeros(n))
    assert room.all() and (pivot == [14, 18]).all()
    _, angles = ends()
    law = np.maximum(np.cos(angles), 0) ** 2
    counts = np.bincount(kind, minlength=len(angles))
    assert counts[law < 1e-12].sum() == 0
    kept = law >= 1e-12
    assert stats.chisquare(counts[kept], n * law[kept] / law.sum()).pvalue > 1e-3


def test_discs_lie_on_the_marked_ends(drawn):
    _, found = drawn
    rows = np.arange(len(found.labels))
    blurred = ndimage.uniform_filter(found.images.astype(float), (0, 3, 3))
    for end in (0, 1):
        at = np.clip(found.tips[rows, found.marked[:, end], end], 1, 30)
        assert np.median(blurred[rows, at[:, 0], at[:, 1]]) > max(150, 2 * np.median(blurred))
    # Drawn with soft edges: many grey values between black and the brightest, which is 255.
    values = np.unique(found.images)
    assert len(values) > 100 and values[-1] == 255 and np.median(found.images) == 0


def test_the_images_do_not_depend_on_the_processes(tmp_path):
    alone = prepared(tmp_path / "a", difficulty="easy", samples=1010)
    several = prepared(tmp_path / "b", workers=2, difficulty="easy", samples=1010)
    for split, size in (("train", 808), ("eval", 101), ("test", 101)):
        assert alone.size(split) == size
        one, other = (task.batch(split, np.arange(size), seed=0, epoch=0) for task in (alone, several))
        assert torch.equal(one["input_ids"], other["input_ids"]) and torch.equal(one["labels"], other["labels"])


def test_black_pixels_are_hidden_as_in_the_authors_code_and_seeds_differ(tmp_path):
    options = {"difficulty": "easy", "samples": 10}
    found = [{}, {"mask_black": False}, {"seed": 1}]
    hidden, shown, other = (
        prepared(tmp_path, **options | more).batch("train", np.arange(4), seed=0, epoch=0) for more in found
    )
    assert hidden["input_ids"].shape == (4, 1024) and hidden["input_ids"].max() == 255
    assert torch.equal(hidden["attention_mask"] == 1, hidden["input_ids"] > 0)
    assert set(shown) == {"input_ids", "labels"} and torch.equal(shown["input_ids"], hidden["input_ids"])
    assert (other["input_ids"] != hidden["input_ids"]).any(dim=1).all()
