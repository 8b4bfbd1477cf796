"""Decode foreign images as a viewer shows them: a few formats, one sentence for everything else."""

from __future__ import annotations

import io
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING

from leansurgeon.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow knows forty more, one of which (EPS) starts another program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
LIMIT = 256_000_000  # bytes of a file


# Whether unreadable images in a command's data are skipped and counted.
SKIPS: ContextVar[bool] = ContextVar("SKIPS", default=False)


def decode(content: bytes, mode: str, where: str) -> Image:
    """Decode an image to mode `RGB` or `L`, upright, on white if transparent, with 16 bits scaled to 8. Raises
    `UsageError`; `where` begins its sentence.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images and odd metadata
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            return plain(ImageOps.exif_transpose(image), where).convert(mode)
    except (UsageError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UsageError(f"{where} cannot be read: its format is none of {', '.join(FORMATS)}.") from None
    except Exception as error:  # decoders raise all kinds of errors; Pillow names the stream, not the file
        said = str(error) or type(error).__name__
        raise UsageError(f"{where} cannot be read: {said}.") from None


def plain(image: Image, where: str) -> Image:
    """Convert an image to 8 bits per channel without transparency: Pillow clips 16 bits and fractions where others
    scale them, and shows the colors of invisible pixels. Raises `UsageError` for numbers that cannot be brightness.
    """
    import numpy as np
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image, dtype=np.float64)
        low, high = float(values.min()), float(values.max())
        # Possible values of white: for fractions or bytes; for 16 bits; or for integers, where one must guess.
        tops = (1, 255) if image.mode == "F" else (65_535,) if image.mode.startswith("I;16") else (255, 65_535)
        white = next((most for most in tops if high <= most), None)
        if not (white and low >= 0):
            raise UsageError(
                f"{where} holds numbers from {low:g} to {high:g}, and does not say which one is white.",
                "Save it with 8 or 16 bits a channel, or with fractions from 0 to 1.",
            )
        return Image.fromarray((values * (255 / white)).round().astype(np.uint8))
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
    return image
