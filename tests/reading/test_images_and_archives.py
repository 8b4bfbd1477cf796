"""Images, tar archives and gzip files: what is whole is read, what is malformed or without measure is one sentence."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from leansurgeon.errors import UsageError
from leansurgeon.reading import archives, images
from leansurgeon.tasks.images import places as image_places


def encoded(kind: str, size: tuple[int, int] = (8, 6)) -> bytes:
    out = io.BytesIO()
    pixels = np.arange(size[0] * size[1], dtype=np.uint8).reshape(size[::-1])
    Image.fromarray(pixels, "L").save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("kind", images.FORMATS)
def test_images_are_what_pillow_reads(kind):
    content = encoded(kind)
    theirs = Image.open(io.BytesIO(content)).convert("RGB")
    assert np.array_equal(np.asarray(images.decode(content, "RGB", "x")), np.asarray(theirs))


def bomb() -> bytes:
    """A PNG of 10 gigapixels in a few bytes."""
    content = bytearray(encoded("PNG"))
    content[16:24] = struct.pack(">II", 100_000, 100_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


# A file that asks Pillow to start Ghostscript, whatever its name says.
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize("content", [b"", b"GIF89a", encoded("PNG")[:40], bomb(), POSTSCRIPT, bytes(100)])
def test_what_is_no_image_is_one_sentence(content):
    with pytest.raises(UsageError, match=r"picture\.png"):
        images.decode(content, "RGB", "picture.png")


def test_damaged_images_never_raise_anything_else():
    rng = np.random.default_rng(0)
    for kind in images.FORMATS:
        for _ in range(30):
            content = bytearray(encoded(kind))
            for place in rng.integers(0, len(content), 6):
                content[place] = rng.integers(256)
            with contextlib.suppress(UsageError):
                images.decode(bytes(content), "L", "x")


def test_links_of_an_image_folder(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for place in (root / "a", elsewhere):
        place.mkdir(parents=True)
        (place / "1.png").write_bytes(encoded("PNG"))
    (root / "b").symlink_to(elsewhere)
    found = image_places.find(str(root), None)
    assert len(image_places.listing(str(root)).folders) == 2 and found.key()
    os.mkfifo(root / "a" / "2.png")
    assert image_places.listing(str(root / "a")).images == [str(root / "a" / "1.png")]
    for target in ("..", ".", "/", "c"):
        (root / "a" / "c").symlink_to(target)
        with pytest.raises(UsageError, match="/c "):
            image_places.find(str(root), None).key()
        (root / "a" / "c").unlink()


def test_gzip_to_a_limit(tmp_path):
    file = tmp_path / "x.gz"
    file.write_bytes(gzip.compress(b"abc"))
    assert archives.read_gzip(file, 3) == b"abc"
    file.write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(UsageError, match="more than 1,000 bytes"):
        archives.read_gzip(file, 1000)
    for content in (b"x", gzip.compress(b"abc" * 1000)[:-20]):
        file.write_bytes(content)
        with pytest.raises(UsageError):
            archives.read_gzip(file, 10_000)


GREY = np.add.outer(np.arange(0, 120, 8), np.arange(0, 130, 10)).astype(np.uint8)  # 15 x 13


def saved(image: Image.Image, kind: str, **options) -> np.ndarray:
    """What is read of an image that was stored so."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return np.asarray(images.decode(out.getvalue(), "RGB", "picture"))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled(kind):
    assert (saved(Image.fromarray(GREY.astype(np.uint16) * 257), kind) == GREY[..., None]).all()


@pytest.mark.parametrize("dtype, factor", [(np.float32, 1 / 255), (np.float32, 1), (np.int32, 1)])
def test_integers_and_fractions_are_scaled_where_their_white_is_plain(dtype, factor):
    assert (saved(Image.fromarray((GREY * factor).astype(dtype)), "TIFF") == GREY[..., None]).all()


@pytest.mark.parametrize("values", [GREY * 1000.0, GREY - 300.0, GREY * np.nan])
def test_numbers_that_mean_no_brightness_are_refused(values):
    with pytest.raises(UsageError, match="picture holds numbers from"):
        saved(Image.fromarray(values.astype(np.float32)), "TIFF")


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_datasets_turns_them(kind, orientation):
    import datasets

    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(GREY).convert("RGB").save(out, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    theirs = datasets.Image().decode_example({"bytes": out.getvalue(), "path": None})
    assert np.array_equal(np.asarray(images.decode(out.getvalue(), "RGB", "x")), np.asarray(theirs))


def test_colours_that_are_not_seen_are_not_read():
    rng = np.random.default_rng(0)
    drawing = rng.integers(0, 255, (*GREY.shape, 4)).astype(np.uint8)
    drawing[..., 3] = 0
    drawing[3:6, 3:6] = (10, 20, 30, 255)
    expected = np.full((*GREY.shape, 3), 255)
    expected[3:6, 3:6] = 10, 20, 30
    assert np.array_equal(saved(Image.fromarray(drawing, "RGBA"), "PNG"), expected)
    palette = Image.fromarray((GREY > 60).astype(np.uint8), "P")
    palette.putpalette([200, 0, 0, 0, 0, 200])
    assert np.unique(saved(palette, "PNG", transparency=0).reshape(-1, 3), axis=0).tolist() == [[0, 0, 200], [255] * 3]


def test_inks_of_print_are_colours():
    colours = Image.fromarray(np.dstack([GREY, 255 - GREY, GREY]))
    ours = saved(colours.convert("CMYK"), "JPEG", quality=100)
    assert np.abs(ours.astype(int) - np.asarray(colours)).max() < 12
