"""Draw Pathfinder images: two dashed contours, shorter ones as distractors, and a disc on two of the ends.

Rules and numbers are those of the published generator (Linsley et al., 2018; github.com/drewlinsley/pathfinder,
`snakes2.py`) with the settings of the Long Range Arena (`lra_benchmarks/data/pathfinder.py`). The code is ours and
draws thousands of images in parallel, at a millisecond per image. The images cannot equal the published ones bit by bit
(those depend on a Python 2 random state and on `scipy.misc.imresize`), but their statistics can.

A contour is a chain of dashes ("paddles"). The next dash ends at a point about `length + margin` from the pivot, chosen
by cos^2 of the turn and by what is free. Positions are rounded up along a direction and down on the circle of ends, as
published. Two differences: the last dash of the first contour counts as occupied for the distractors too, and a
distractor is retried only from its beginning.

Shape letters: N images, S size (32), P patch (9), E possible displacements of a dash's end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from numpy.random import Generator

CONTOUR_LENGTH = {"easy": 6, "intermediate": 9, "hard": 14}  # dashes
SIZE, PADDING, SEED_DISTANCE = 32, 1, 7  # pixels
LENGTH, MARGIN, THICKNESS, MARKER_RADIUS = 2, 1, 0.5, 1.5  # of a dash, its gaps, both, a disc
ANTIALIAS = 2
TARGET_CONTRAST, DISTRACTOR_CONTRAST = 1.5, 2.0  # the first is 0.75 of the dash times 2 of the contour
SEGMENT_TRIALS, CONTOUR_TRIALS = 3, 5
ATTEMPTS = 2048  # pairs of contours started per chunk; most end in a dead end
PAD = 5  # around the images, so that patches at the border need no special case


class Drawn(NamedTuple):
    """Images of one chunk and their content.

    `tips` (N, 2 contours, 2 ends, row and column); `dashes` (N, 2, dashes, row and column of the ends); `marked` (N,
    2): the contour whose first end has a disc, and the one whose last end has one; `found` (N,) numbers of distractors.
    """

    images: ndarray  # (N, S, S) uint8
    labels: ndarray  # (N,) uint8, 1 = one contour joins the discs
    tips: ndarray
    dashes: ndarray
    marked: ndarray
    found: ndarray


def chunk(contour_length: int, seed: int, number: int, attempts: int = ATTEMPTS) -> Drawn:
    """Return the images that result from `attempts` starts; a pure function of its arguments."""
    rng = np.random.default_rng([seed, number, contour_length])
    image, mask, dashes = _targets(contour_length, rng, attempts)
    distractors = np.zeros(len(image), dtype=np.int64)
    for _ in range(20 // (contour_length // 3)):  # 20 dashes in all
        missing = np.arange(len(image))
        for _ in range(CONTOUR_TRIALS):
            if len(missing):
                done = _distractor(contour_length // 3, rng, image, mask, missing)
                distractors[missing[done]] += 1
                missing = missing[~done]
    tips = dashes[:, :, [0, -1]]
    labels = rng.integers(0, 2, len(image))
    first = rng.integers(0, 2, len(labels))
    marked = np.stack([first, np.where(labels == 1, first, 1 - first)], axis=1)
    every = np.arange(len(labels))
    marker = disc()
    for end in (0, 1):
        at = tips[every, marked[:, end], end]
        stamp(image, every, at, np.broadcast_to(marker, (len(every), *marker.shape)))
    inner = slice(PAD, PAD + SIZE)
    image = image[:, inner, inner]
    top = image.reshape(len(image), -1).max(axis=1)[:, None, None] if len(image) else np.ones((0, 1, 1))
    pixels = np.rint(image / top * 255).astype(np.uint8)
    return Drawn(pixels, labels.astype(np.uint8), tips, dashes, marked, distractors)


# -- contours --------------------------------------------------------------------------------------


def _targets(contour_length: int, rng: Generator, attempts: int) -> tuple[ndarray, ndarray, ndarray]:
    """Grow pairs of contours dash by dash, their first ends `SEED_DISTANCE` apart; keep complete pairs only.

    Returns padded images and occupancy, (N, S + 2 * PAD, S + 2 * PAD), and ends of dashes (N, 2, dashes, 2).
    """
    n = attempts
    mask = np.ones((n, *(SIZE + 2 * PAD,) * 2), dtype=np.float32)
    free = slice(PAD + PADDING, PAD + SIZE - PADDING)
    mask[:, free, free] = 0
    dashes = np.zeros((n, 2, contour_length, 2), dtype=np.int64)
    kinds = np.zeros((n, 2, contour_length), dtype=np.int64)  # degrees of a first dash, index of another one's end
    degrees = rng.integers(-180, 180, (n, 2))
    start = _central(rng, degrees[:, 0])
    around = rng.integers(0, 360, n) * (np.pi / 180)
    offset = SEED_DISTANCE * np.stack([np.sin(around), np.cos(around)], axis=1)
    dashes[:, :, 0] = np.stack([start, np.rint(start + offset).astype(np.int64)], axis=1)
    kinds[:, :, 0] = degrees % 360
    pivots, turns, inside = _begin(dashes[:, :, 0], degrees)
    grown = inside.all(axis=1)
    mask, dashes, kinds, pivots, turns = (part[grown] for part in (mask, dashes, kinds, pivots, turns))
    for dash in range(1, contour_length):
        for contour in (0, 1):
            room, pivot, turn, end, kind = _extend(rng, mask, pivots[:, contour], turns[:, contour])
            pivots[:, contour], turns[:, contour] = pivot, turn
            dashes[:, contour, dash], kinds[:, contour, dash] = end, kind
            # Only the previous dash is marked as occupied: the new one may touch the end that it continues.
            before = patches_of(dash == 1).mask[kinds[:, contour, dash - 1]]
            stamp(mask, np.arange(len(mask)), dashes[:, contour, dash - 1], before)
            mask, dashes, kinds, pivots, turns = (part[room] for part in (mask, dashes, kinds, pivots, turns))
    image, every = np.zeros_like(mask), np.arange(len(mask))
    for contour in (0, 1):
        stamp(mask, every, dashes[:, contour, -1], patches_of(False).mask[kinds[:, contour, -1]])
        for dash in range(contour_length):
            line = patches_of(dash == 0).line[kinds[:, contour, dash]]
            stamp(image, every, dashes[:, contour, dash], line * TARGET_CONTRAST)
    return image, mask, dashes


def _begin(starts: ndarray, degrees: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Return pivots behind first dashes at `starts` (..., 2), the angles of both, and whether the dash fits inside.

    The next dashes start from the pivots.
    """
    turns = degrees * (np.pi / 180)
    heads = _along(starts, turns, LENGTH)
    pivots = _along(heads, turns + np.pi, LENGTH + MARGIN)
    inside = np.all((heads >= 0) & (heads < SIZE) & (pivots >= 0) & (pivots < SIZE), axis=-1)
    return pivots, turns, inside


def _distractor(dashes: int, rng: Generator, images: ndarray, masks: ndarray, rows: ndarray) -> ndarray:
    """Try to draw one distractor on each of these images; return (rows,) bool, true where it succeeded."""
    image, mask, every = images[rows], masks[rows], np.arange(len(rows))
    degrees = rng.integers(-180, 180, len(rows))
    kind = degrees % 360
    edge = mask.copy()
    edge[:, PAD, :] = edge[:, :, PAD] = edge[:, PAD + SIZE - 1, :] = edge[:, :, PAD + SIZE - 1] = 1
    free = ~_find_blocked(edge, kind).reshape(len(mask), -1)
    count = free.sum(axis=1)
    wanted = (rng.random(len(mask)) * count).astype(np.int64) + 1  # all free places are equally likely
    place = (np.cumsum(free, axis=1) >= wanted[:, None]).argmax(axis=1)
    end, alive = np.stack(np.divmod(place, SIZE), axis=1), count > 0
    pivot, turn, inside = _begin(end, degrees)
    alive &= inside
    for dash in range(dashes):
        patches = patches_of(dash == 0)
        stamp(image, every, end, patches.line[kind] * DISTRACTOR_CONTRAST)
        before = end, patches.mask[kind]
        if dash < dashes - 1:
            room, pivot, turn, end, kind = _extend(rng, mask, pivot, turn)
            alive &= room
        stamp(mask, every, *before)
    images[rows[alive]], masks[rows[alive]] = image[alive], mask[alive]
    return alive


def _extend(rng: Generator, mask: ndarray, pivot: ndarray, turn: ndarray) -> tuple[ndarray, ...]:
    """Add the next dash of one contour in each of N images: return (N,) whether there was room, (N, 2) its pivot, (N,)
    its angle, (N, 2) its end, and (N,) the index of the displacement between them.
    """
    ends_E2, angles_E = ends()
    pivot = np.clip(_along(pivot, turn, LENGTH + 2 * MARGIN), -PAD + 4, SIZE + PAD - 5)
    candidates_NE2 = pivot[:, None] + ends_E2
    inside_NE = np.all((candidates_NE2 >= 0) & (candidates_NE2 < SIZE), axis=2)
    at = np.clip(candidates_NE2, 0, SIZE - 1) + PAD
    every = np.arange(len(mask))[:, None]
    near = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]  # a disc of radius 1, the margin
    taken_NE = np.maximum.reduce([mask[every, at[..., 0] + down, at[..., 1] + right] for down, right in near])
    delta = np.abs(angles_E - turn[:, None])
    delta = np.minimum(np.minimum(delta, 2 * np.pi - delta), np.pi / 2)
    weights_NE = (1 - np.minimum(taken_NE, 1)) * np.cos(delta) ** 2 * inside_NE
    total = weights_NE.sum(axis=1)
    alive = total >= 1e-4
    shares = np.cumsum(weights_NE, axis=1) / np.where(alive, total, 1)[:, None]
    patches = patches_of(False)
    picked, open_ = np.zeros(len(mask), dtype=np.int64), alive.copy()
    for _ in range(SEGMENT_TRIALS):
        draw = np.minimum((shares <= rng.random(len(mask))[:, None]).sum(axis=1), len(ends_E2) - 1)
        rows = np.flatnonzero(open_)
        picked[rows] = draw[rows]
        around = mask[_around(rows, candidates_NE2[rows, picked[rows]], patches.mask.shape[1])]
        crossing = around + patches.mask[picked[rows]]
        open_[rows] = crossing.max(axis=(1, 2), initial=0) >= 1.8
    end = np.clip(candidates_NE2[every[:, 0], picked], 0, SIZE - 1)
    return alive & ~open_, pivot, angles_E[picked], end, picked


def _along(points: ndarray, turn: ndarray, distance: float) -> ndarray:
    """Move points by `distance` in direction `turn` (from columns towards rows), rounded up."""
    step = distance * np.stack([np.sin(turn), np.cos(turn)], axis=-1)
    return np.ceil(points + np.round(step, 9)).astype(np.int64)


def _central(rng: Generator, degrees: ndarray) -> ndarray:
    """Choose first ends of first contours, at least twice the seed distance from every side, with room for the dash."""
    mask = np.ones((SIZE + 2 * PAD,) * 2, dtype=np.float32)
    inner = slice(PAD + 2 * SEED_DISTANCE, PAD + SIZE - 2 * SEED_DISTANCE)
    mask[inner, inner] = 0
    places = np.zeros((len(degrees), 2), dtype=np.int64)
    for angle in np.unique(degrees):
        rows = np.flatnonzero(degrees == angle)
        spots = np.argwhere(~_find_blocked(mask[None], np.array([angle % 360]))[0])
        if not len(spots):  # the dash does not fit within the margin: any point inside it will do
            spots = np.argwhere(mask[PAD:-PAD, PAD:-PAD] == 0)
        places[rows] = spots[rng.integers(0, len(spots), len(rows))]
    return places


def _find_blocked(mask: ndarray, angles: ndarray) -> ndarray:
    """Return (N, S, S) bool: whether a dash of this angle with its centre there touches what is occupied above 0.3."""
    patches = patches_of(True).mask
    middle, blocked = patches.shape[1] // 2, np.zeros((len(mask), SIZE, SIZE), dtype=bool)
    taken = mask > 0.3
    for angle in np.unique(angles):
        rows = np.flatnonzero(angles == angle)
        # The dash starts at the place and covers the points where its own mask is full.
        for down, right in np.argwhere(patches[angle] >= 1) - middle:
            down, right = PAD + down, PAD + right
            blocked[rows] |= taken[rows, down : down + SIZE, right : right + SIZE]
    return blocked


# -- dashes and discs ------------------------------------------------------------------------------


class Patches(NamedTuple):
    line: ndarray  # (angles, P, P) brightness of a dash that starts in the centre
    mask: ndarray  # (angles, P, P) the area it occupies


@lru_cache
def ends() -> tuple[ndarray, ndarray]:
    """Return displacements from a pivot to possible ends, (E, 2), one pixel apart on the circle, and their angles."""
    radius = LENGTH + MARGIN
    around = np.arange(0, 360, 360 / (2 * np.pi * radius)) * (np.pi / 180)
    circle = radius * np.stack([np.sin(around), np.cos(around)], axis=1)
    ends = np.unique(np.floor(np.round(circle, 9)).astype(np.int64), axis=0)
    return ends, np.arctan2(ends[:, 0], ends[:, 1])


@lru_cache
def patches_of(first: bool) -> Patches:
    """Return patches of a `first` dash drawn forwards from its start, for every whole degree.

    Otherwise patches of another dash drawn backwards from its end, for every possible end.
    """
    from PIL import Image, ImageDraw
    from scipy import ndimage

    angles = np.arange(360) * (np.pi / 180) if first else ends()[1] + np.pi
    middle = (LENGTH + int(np.ceil(THICKNESS)) + MARGIN) * ANTIALIAS
    reach = np.arange(-MARGIN * ANTIALIAS, MARGIN * ANTIALIAS + 1)
    disc = reach[:, None] ** 2 + reach**2 <= (MARGIN * ANTIALIAS) ** 2
    lines, masks = [], []
    for angle in angles:
        image = Image.new("L", (2 * middle + 1,) * 2)
        head = np.ceil(middle + np.round(LENGTH * ANTIALIAS * np.array([np.cos(angle), np.sin(angle)]), 9))
        ends_of_line = [(middle, middle), tuple(head.tolist())]
        ImageDraw.Draw(image).line(ends_of_line, fill=255, width=round(THICKNESS * ANTIALIAS))
        fine = np.asarray(image)
        lines.append(_smaller(fine))
        masks.append(_smaller(ndimage.grey_dilation(fine, footprint=disc)))
    return Patches(np.stack(lines), np.stack(masks))


def _smaller(fine: ndarray) -> ndarray:
    """Downsample by ANTIALIAS with a Lanczos filter; values in 0..1."""
    from PIL import Image

    size = (fine.shape[0] - 1) // ANTIALIAS + 1
    return np.asarray(Image.fromarray(fine).resize((size, size), Image.Resampling.LANCZOS), dtype=np.float32) / 255


@lru_cache
def disc() -> ndarray:
    """Return the (9, 9) marker, with values in 0..1."""
    away = np.arange(9 * ANTIALIAS) - 4 * ANTIALIAS
    return _smaller((away[:, None] ** 2 + away**2 <= (MARKER_RADIUS * ANTIALIAS) ** 2) * np.uint8(255))


# -- on the images ----------------------------------------------------------------------------------


def stamp(canvas: ndarray, rows: ndarray, at: ndarray, patch: ndarray) -> None:
    """Draw a patch on each of these images, keeping the brighter value."""
    where = _around(rows, at, patch.shape[1])
    canvas[where] = np.maximum(canvas[where], patch)


def _around(rows: ndarray, at: ndarray, size: int) -> tuple[ndarray, ndarray, ndarray]:
    span = np.arange(size) - size // 2 + PAD
    return rows[:, None, None], (at[:, :1] + span)[:, :, None], (at[:, 1:] + span)[:, None, :]
