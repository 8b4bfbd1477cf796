"""Dashes and discs of Pathfinder images: how they look, what they occupy, and how they are laid on many images at once.

A dash is drawn once for every angle that it can have, as a small patch twice as large and then made smaller, as
published. Where dashes go is decided in `pathfinder_draw`.

Shape letters: N images, S size (32), P patch (9), E possible displacements of a dash's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

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
def end_patches(style: Style) -> Patches:
    """A dash drawn from its end backwards, for every possible end."""
    return _patches(style, ends(style)[1] + np.pi)


@lru_cache
def seed_patches(style: Style) -> Patches:
    """A dash drawn forwards from its start, for every whole degree."""
    return _patches(style, np.arange(360) * (np.pi / 180))


def _patches(style: Style, angles: np.ndarray) -> Patches:
    from scipy import ndimage

    s = style
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
