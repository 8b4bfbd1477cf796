"""Images of others as a viewer shows them: a few formats, a limit of pixels, one sentence for all else."""

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
PIXELS = 100_000_000
LIMIT = 256_000_000  # bytes of a file


# Whether images of a command's data that cannot be read are left out, and counted.
SKIPS: ContextVar[bool] = ContextVar("SKIPS", default=False)


def decode(content: bytes, mode: str, where: str) -> Image:
    """The image in the mode `RGB` or `L`, upright, on white where it is transparent, and 16 bit scaled to 8. Raises
    `UsageError`; `where` begins its sentence.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which are refused below, and of odd metadata
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = image.size
            if width * height > PIXELS:
                raise UsageError(f"{where} has {width:,} x {height:,} pixels, more than {PIXELS:,}.")
            return plain(ImageOps.exif_transpose(image), where).convert(mode)
    except (UsageError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UsageError(f"{where} cannot be read: its format is none of {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError:
        raise UsageError(f"{where} has more than {PIXELS:,} pixels.") from None
    except Exception as error:  # a decoder fails in every way there is; Pillow names the stream and not the file
        said = str(error) or type(error).__name__
        raise UsageError(f"{where} cannot be read: {said}.") from None


def plain(image: Image, where: str) -> Image:
    """The image with 8 bits a channel and nothing transparent: Pillow clips 16 bits and fractions where others scale
    them, and shows the colours of pixels that nobody sees. Raises `UsageError` for numbers that mean no brightness.
    """
    import numpy as np
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image, dtype=np.float64)
        low, high = float(values.min()), float(values.max())
        # What may be white: of fractions or bytes; of 16 bits; or of integers of which one must guess.
        tops = (1, 255) if image.mode == "F" else (65_535,) if image.mode.startswith("I;16") else (255, 65_535)
        white = next((most for most in tops if high <= most), None)
        if not (white and low >= 0):
            raise UsageError(
                f"{where} holds numbers from {low:g} to {high:g}, of which it does not say what is white.",
                "Save it with 8 or 16 bits a channel, or with fractions from 0 to 1.",
            )
        return Image.fromarray((values * (255 / white)).round().astype(np.uint8))
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
    return image
