"""Drawing of Pathfinder images: two dashed contours, shorter ones as distractors, and a disc on two of the ends.

The rules and numbers are those of the published generator (Linsley et al., 2018; github.com/drewlinsley/pathfinder,
`snakes2.py`) with the settings of the Long Range Arena (`lra_benchmarks/data/pathfinder.py`); the code is ours and
draws thousands of images in step, so that an image costs a millisecond. Its images cannot equal the published ones bit
by bit (they hang on a Python 2 random state and on `scipy.misc.imresize`), their statistics can.

A contour is a chain of dashes ("paddles"). The next dash ends at a point about `length + margin` from the pivot, chosen
by cos^2 of the turn and by what is free. Positions are rounded up along a direction and down on the circle of ends, as
published. Two differences: the last dash of the first contour counts as occupied for the distractors too, and a
distractor is tried anew from its beginning only.

Shape letters: N images, S size (32), P patch (9), E possible displacements of a dash's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

CONTOUR_LENGTH = {"easy": 6, "intermediate": 9, "hard": 14}
ATTEMPTS = 2048  # pairs of contours begun in one chunk; most run into a dead end
PAD = 5  # around the images, so that a patch at the border needs no case of its own


@dataclass(frozen=True)
class Style:
    """The numbers of Pathfinder-32. Lengths in pixels; `length` and `margin` are those of a dash and the gap on each
    side of it.
    """

    contour_length: int = 14
    size: int = 32
    padding: int = 1
    length: int = 2
    thickness: float = 0.5
    margin: int = 1
    marker_radius: float = 1.5
    seed_distance: int = 7
    continuity: float = 1.0
    antialias: int = 2
    target_contrast: float = 1.5  # 0.75 of the dash times 2 of the contour
    distractor_contrast: float = 2.0
    segment_trials: int = 3
    contour_trials: int = 5

    @property
    def distractor_length(self) -> int:
        """Dashes of a distractor: a third of the contour's."""
        return self.contour_length // 3

    @property
    def distractors(self) -> int:
        """How many distractors there are: 20 dashes in all."""
        return 20 // self.distractor_length


class Drawn(NamedTuple):
    """Images of one chunk and what is in them: `tips` (N, 2 contours, 2 ends, row and column), `dashes` (N, 2, dashes,
    row and column of the ends), `marked` (N, 2) which end of which contour bears a disc: contour of the first end,
    contour of the last; `found` (N,) distractors.
    """

    images: np.ndarray  # (N, S, S) uint8
    labels: np.ndarray  # (N,) uint8, 1 = one contour joins the discs
    tips: np.ndarray
    dashes: np.ndarray
    marked: np.ndarray
    found: np.ndarray


class _Grown(NamedTuple):
    """A dash more: (N,) whether there was room, (N, 2) the pivot that it hangs on, (N,) its angle, (N, 2) its end, and
    (N,) the number of the displacement between them.
    """

    alive: np.ndarray
    pivot: np.ndarray
    turn: np.ndarray
    end: np.ndarray
    kind: np.ndarray


def chunk(style: Style, seed: int, number: int, attempts: int = ATTEMPTS) -> Drawn:
    """The images that come of `attempts` beginnings; a pure function of its arguments."""
    rng = np.random.default_rng([seed, number, style.contour_length])
    image, mask, dashes = _targets(style, rng, attempts)
    distractors = _distractors(style, rng, image, mask)
    tips = dashes[:, :, [0, -1]]
    labels = rng.integers(0, 2, len(image))
    first = rng.integers(0, 2, len(labels))
    marked = np.stack([first, np.where(labels == 1, first, 1 - first)], axis=1)
    every = np.arange(len(labels))
    marker = disc(style)
    for end in (0, 1):
        at = tips[every, marked[:, end], end]
        stamp(image, every, at, np.broadcast_to(marker, (len(every), *marker.shape)))
    inner = slice(PAD, PAD + style.size)
    image = image[:, inner, inner]
    top = image.reshape(len(image), -1).max(axis=1)[:, None, None] if len(image) else np.ones((0, 1, 1))
    pixels = np.rint(image / top * 255).astype(np.uint8)
    return Drawn(pixels, labels.astype(np.uint8), tips, dashes, marked, distractors)


# -- contours --------------------------------------------------------------------------------------


def _targets(style: Style, rng: np.random.Generator, attempts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of contours whose first ends lie `seed_distance` apart, grown dash by dash in turn; only whole pairs.
    Images and what is occupied in them, padded, (N, S + 2 * PAD, S + 2 * PAD), and ends of dashes (N, 2, dashes, 2).
    """
    s, n = style, attempts
    wide = s.size + 2 * PAD
    mask = np.ones((n, wide, wide), dtype=np.float32)
    free = slice(PAD + s.padding, PAD + s.size - s.padding)
    mask[:, free, free] = 0
    dashes = np.zeros((n, 2, s.contour_length, 2), dtype=np.int64)
    kinds = np.zeros((n, 2, s.contour_length), dtype=np.int64)  # degrees of a first dash, number of another's end
    degrees = rng.integers(-180, 180, (n, 2))
    start = _central(style, rng, degrees[:, 0])
    around = rng.integers(0, 360, n) * (np.pi / 180)
    offset = s.seed_distance * np.stack([np.sin(around), np.cos(around)], axis=1)
    dashes[:, :, 0] = np.stack([start, np.rint(start + offset).astype(np.int64)], axis=1)
    kinds[:, :, 0] = degrees % 360
    pivots, turns, inside = _begin(style, dashes[:, :, 0], degrees)
    grown = inside.all(axis=1)
    mask, dashes, kinds, pivots, turns = (part[grown] for part in (mask, dashes, kinds, pivots, turns))
    for dash in range(1, s.contour_length):
        for contour in (0, 1):
            new = _extend(style, rng, mask, pivots[:, contour], turns[:, contour])
            pivots[:, contour], turns[:, contour] = new.pivot, new.turn
            dashes[:, contour, dash], kinds[:, contour, dash] = new.end, new.kind
            # Only the dash before is occupied by now: the new one may touch the end that it hangs on.
            before = patches_of(style, dash == 1).mask[kinds[:, contour, dash - 1]]
            stamp(mask, np.arange(len(mask)), dashes[:, contour, dash - 1], before)
            mask, dashes, kinds, pivots, turns = (part[new.alive] for part in (mask, dashes, kinds, pivots, turns))
    image, every = np.zeros_like(mask), np.arange(len(mask))
    for contour in (0, 1):
        stamp(mask, every, dashes[:, contour, -1], patches_of(style, False).mask[kinds[:, contour, -1]])
        for dash in range(s.contour_length):
            line = patches_of(style, dash == 0).line[kinds[:, contour, dash]]
            stamp(image, every, dashes[:, contour, dash], line * s.target_contrast)
    return image, mask, dashes


def _begin(style: Style, starts: np.ndarray, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pivots behind the first dashes at `starts` (..., 2), on which the next ones hang, the angles of both, and whether
    the dash lies inside of the image.
    """
    turns = degrees * (np.pi / 180)
    heads = _along(starts, turns, style.length)
    pivots = _along(heads, turns + np.pi, style.length + style.margin)
    inside = np.all((heads >= 0) & (heads < style.size) & (pivots >= 0) & (pivots < style.size), axis=-1)
    return pivots, turns, inside


def _distractors(style: Style, rng: np.random.Generator, image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Draw distractors, all of one length, where they fit; (N,) how many did."""
    placed = np.zeros(len(image), dtype=np.int64)
    for _ in range(style.distractors):
        missing = np.arange(len(placed))
        for _ in range(style.contour_trials):
            if not len(missing):
                break
            done = _distractor(style, rng, image, mask, missing)
            placed[missing[done]] += 1
            missing = missing[~done]
    return placed


def _distractor(
    style: Style, rng: np.random.Generator, images: np.ndarray, masks: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Try one distractor on each of these images; (rows,) bool where it was drawn."""
    image, mask, every = images[rows], masks[rows], np.arange(len(rows))
    degrees = rng.integers(-180, 180, len(rows))
    kind = degrees % 360
    end, alive = _free_place(style, rng, mask, kind)
    pivot, turn, inside = _begin(style, end, degrees)
    alive &= inside
    for dash in range(style.distractor_length):
        patches = patches_of(style, dash == 0)
        stamp(image, every, end, patches.line[kind] * style.distractor_contrast)
        before = end, patches.mask[kind]
        if dash < style.distractor_length - 1:
            grown = _extend(style, rng, mask, pivot, turn)
            alive &= grown.alive
            pivot, turn, end, kind = grown.pivot, grown.turn, grown.end, grown.kind
        stamp(mask, every, *before)
    images[rows[alive]], masks[rows[alive]] = image[alive], mask[alive]
    return alive


def _extend(style: Style, rng: np.random.Generator, mask: np.ndarray, pivot: np.ndarray, turn: np.ndarray) -> _Grown:
    """The next dash of one contour in each image, where there is room."""
    s = style
    ends_E2, angles_E = ends(style)
    pivot = np.clip(_along(pivot, turn, s.length + 2 * s.margin), -PAD + 4, s.size + PAD - 5)
    candidates_NE2 = pivot[:, None] + ends_E2
    inside_NE = np.all((candidates_NE2 >= 0) & (candidates_NE2 < s.size), axis=2)
    at = np.clip(candidates_NE2, 0, s.size - 1) + PAD
    every = np.arange(len(mask))[:, None]
    near = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]  # a disc of radius 1, the margin
    taken_NE = np.maximum.reduce([mask[every, at[..., 0] + down, at[..., 1] + right] for down, right in near])
    delta = np.abs(angles_E - turn[:, None])
    delta = np.minimum(np.minimum(delta, 2 * np.pi - delta) * s.continuity, np.pi / 2)
    weights_NE = (1 - np.minimum(taken_NE, 1)) * np.cos(delta) ** 2 * inside_NE
    total = weights_NE.sum(axis=1)
    alive = total >= 1e-4
    shares = np.cumsum(weights_NE, axis=1) / np.where(alive, total, 1)[:, None]
    patches = patches_of(style, False)
    picked, open_ = np.zeros(len(mask), dtype=np.int64), alive.copy()
    for _ in range(s.segment_trials):
        draw = np.minimum((shares <= rng.random(len(mask))[:, None]).sum(axis=1), len(ends_E2) - 1)
        rows = np.flatnonzero(open_)
        picked[rows] = draw[rows]
        crossing = (
            window(mask, rows, candidates_NE2[rows, picked[rows]], patches.mask.shape[1]) + patches.mask[picked[rows]]
        )
        open_[rows] = crossing.max(axis=(1, 2), initial=0) >= 1.8
    end = np.clip(candidates_NE2[every[:, 0], picked], 0, s.size - 1)
    return _Grown(alive & ~open_, pivot, angles_E[picked], end, picked)


def _along(points: np.ndarray, turn: np.ndarray, distance: float) -> np.ndarray:
    """Points moved by `distance` in direction `turn` (from the columns towards the rows), rounded up."""
    step = distance * np.stack([np.sin(turn), np.cos(turn)], axis=-1)
    return np.ceil(points + np.round(step, 9)).astype(np.int64)


def _central(style: Style, rng: np.random.Generator, degrees: np.ndarray) -> np.ndarray:
    """First ends of first contours: at least twice the seed distance from every side, with room for the dash."""
    s = style
    mask = np.ones((s.size + 2 * PAD,) * 2, dtype=np.float32)
    inner = slice(PAD + 2 * s.seed_distance, PAD + s.size - 2 * s.seed_distance)
    mask[inner, inner] = 0
    places = np.zeros((len(degrees), 2), dtype=np.int64)
    for angle in np.unique(degrees):
        rows = np.flatnonzero(degrees == angle)
        spots = np.argwhere(~_find_blocked(style, mask[None], np.array([angle % 360]))[0])
        if not len(spots):  # the dash does not fit between the lines: the middle will do
            spots = np.argwhere(mask[PAD:-PAD, PAD:-PAD] == 0)
        places[rows] = spots[rng.integers(0, len(spots), len(rows))]
    return places


def _free_place(
    style: Style, rng: np.random.Generator, mask: np.ndarray, angles: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A free pixel of each image where a dash of this angle fits, all equally likely; (N,) whether there is one."""
    s = style
    edge = mask.copy()
    edge[:, PAD, :] = edge[:, :, PAD] = edge[:, PAD + s.size - 1, :] = edge[:, :, PAD + s.size - 1] = 1
    free = ~_find_blocked(style, edge, angles).reshape(len(mask), -1)
    count = free.sum(axis=1)
    wanted = (rng.random(len(mask)) * count).astype(np.int64) + 1
    place = (np.cumsum(free, axis=1) >= wanted[:, None]).argmax(axis=1)
    return np.stack(np.divmod(place, s.size), axis=1), count > 0


def _find_blocked(style: Style, mask: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """(N, S, S) true where the middle of a dash of this angle would touch something occupied (by more than 0.3)."""
    s = style
    patches = patches_of(style, True).mask
    middle, blocked = patches.shape[1] // 2, np.zeros((len(mask), s.size, s.size), dtype=bool)
    taken = mask > 0.3
    for angle in np.unique(angles):
        rows = np.flatnonzero(angles == angle)
        # The dash begins at the place and reaches as far as where its own mask is full.
        for down, right in np.argwhere(patches[angle] >= 1) - middle:
            down, right = PAD + down, PAD + right
            blocked[rows] |= taken[rows, down : down + s.size, right : right + s.size]
    return blocked


# -- dashes and discs ------------------------------------------------------------------------------


class Patches(NamedTuple):
    line: np.ndarray  # (angles, P, P) brightness of a dash that starts in the middle
    mask: np.ndarray  # (angles, P, P) what it occupies


@lru_cache
def ends(style: Style) -> tuple[np.ndarray, np.ndarray]:
    """Displacements from a pivot to possible ends, (E, 2), a pixel apart on the circle, and their angles."""
    radius = style.length + style.margin
    around = np.arange(0, 360, 360 / (2 * np.pi * radius)) * (np.pi / 180)
    circle = radius * np.stack([np.sin(around), np.cos(around)], axis=1)
    ends = np.unique(np.floor(np.round(circle, 9)).astype(np.int64), axis=0)
    return ends, np.arctan2(ends[:, 0], ends[:, 1])


@lru_cache
def patches_of(style: Style, first: bool) -> Patches:
    """A `first` dash drawn forwards from its start, for every whole degree; or another one drawn from its end
    backwards, for every possible end.
    """
    from scipy import ndimage

    s, angles = style, np.arange(360) * (np.pi / 180) if first else ends(style)[1] + np.pi
    middle = (s.length + int(np.ceil(s.thickness)) + s.margin) * s.antialias
    reach = np.arange(-s.margin * s.antialias, s.margin * s.antialias + 1)
    disc = reach[:, None] ** 2 + reach**2 <= (s.margin * s.antialias) ** 2
    lines, masks = [], []
    for angle in angles:
        fine = _line(2 * middle + 1, middle, angle, s.length * s.antialias, round(s.thickness * s.antialias))
        lines.append(_smaller(fine, s.antialias))
        masks.append(_smaller(ndimage.grey_dilation(fine, footprint=disc), s.antialias))
    return Patches(np.stack(lines), np.stack(masks))


def _line(size: int, middle: int, angle: float, length: float, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    image = Image.new("L", (size, size))
    head = np.ceil(middle + np.round(length * np.array([np.cos(angle), np.sin(angle)]), 9))
    ImageDraw.Draw(image).line([(middle, middle), tuple(head.tolist())], fill=255, width=width)
    return np.asarray(image)


def _smaller(fine: np.ndarray, factor: int) -> np.ndarray:
    """Lanczos-filtered to 1 / factor of its size; 0..1."""
    from PIL import Image

    size = (fine.shape[0] - 1) // factor + 1
    return np.asarray(Image.fromarray(fine).resize((size, size), Image.Resampling.LANCZOS), dtype=np.float32) / 255


@lru_cache
def disc(style: Style) -> np.ndarray:
    """(9, 9) the marker, 0..1."""
    size, a = 9, style.antialias
    away = np.arange(size * a) - (size // 2) * a
    return _smaller((away[:, None] ** 2 + away**2 <= (style.marker_radius * a) ** 2) * np.uint8(255), a)


# -- on the images ----------------------------------------------------------------------------------


def window(canvas: np.ndarray, rows: np.ndarray, at: np.ndarray, size: int) -> np.ndarray:
    """(len(rows), size, size) of the canvas around these places."""
    return canvas[_around(rows, at, size)]


def stamp(canvas: np.ndarray, rows: np.ndarray, at: np.ndarray, patch: np.ndarray) -> None:
    """Lay a patch on each of these images, the brighter value stays."""
    where = _around(rows, at, patch.shape[1])
    canvas[where] = np.maximum(canvas[where], patch)


def _around(rows: np.ndarray, at: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    span = np.arange(size) - size // 2 + PAD
    return rows[:, None, None], (at[:, :1] + span)[:, :, None], (at[:, 1:] + span)[:, None, :]
