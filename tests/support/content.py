"""The side of a sample as the documentation says it, written anew: tests compare with it and not with the package."""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np


def number_of(*texts: str) -> int:
    """BLAKE2b of 64 bits over the texts in NFC with single spaces, joined by a unit separator."""
    normal = "\x1f".join(" ".join(unicodedata.normalize("NFC", text).split()) for text in texts)
    return int.from_bytes(hashlib.blake2b(normal.encode(), digest_size=8).digest(), "big")


def number_of_image(pixels: np.ndarray) -> int:
    """The same of a picture (height, width, 3): its width and height as Python writes a pair, then its bytes."""
    content = repr((pixels.shape[1], pixels.shape[0])).encode() + pixels.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def side_of(*texts: str) -> str:
    """The first tenth of all numbers is "test", the second "eval", the rest "train"."""
    share = number_of(*texts) / 2**64
    return "test" if share < 0.1 else "eval" if share < 0.2 else "train"
