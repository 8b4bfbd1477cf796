"""Images of others: a few formats, a limit of pixels, one sentence for whatever else stands in the file."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from leansurgeon.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow knows forty more, one of which (EPS) starts another program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
PIXELS = 100_000_000
LIMIT = 256_000_000  # bytes of a file


def decode(content: bytes, mode: str, where: str) -> Image:
    """The image in the mode `RGB` or `L`. Raises `UsageError`; `where` begins its sentence."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which are refused below, and of odd metadata
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = image.size
            if width * height > PIXELS:
                raise UsageError(f"{where} has {width:,} x {height:,} pixels, more than {PIXELS:,}.")
            return image.convert(mode)
    except UsageError:
        raise
    except UnidentifiedImageError:
        raise UsageError(f"{where} cannot be read: its format is none of {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError:
        raise UsageError(f"{where} has more than {PIXELS:,} pixels.") from None
    except Exception as error:  # a decoder fails in every way there is; Pillow names the stream and not the file
        if isinstance(error, MemoryError):
            raise
        said = str(error) or type(error).__name__
        raise UsageError(f"{where} cannot be read: {said}.") from None
