"""Tasks of the Long Range Arena (Tay et al., 2021) from published files: text and retrieval as bytes, image as pixels.

Bytes are the tokens 1 to 256, with 0 as padding; grey values are the tokens 0 to 255. ListOps is in `listops`,
Pathfinder in `pathfinder`. Nystromformer's own preparation differs in one point (text is cut at 1,000 bytes), which
`max_length` can reproduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy import ndarray
from pydantic import Field, model_validator

from leansurgeon.errors import UsageError, quote
from leansurgeon.progress import Say
from leansurgeon.reading import files, tables
from leansurgeon.reading.files import in_home
from leansurgeon.tasks import base, disk_cache, hub
from leansurgeon.tasks.images import places as image_places
from leansurgeon.tasks.images import small
from leansurgeon.tasks.long_range.pathfinder import pixels_as_tokens
from leansurgeon.tasks.text import vocab

IMDB = "hub:stanfordnlp/imdb"
IMDB_BY_HAND = "Download its parquet files on another machine and name their folder with the task's option `data`."
AAN_BY_HAND = (
    "Download lra_release.gz (7.7 GB) from storage.googleapis.com/long-range-arena, unpack it with tar, and name its "
    "folder tsv_data, or the whole, with the task's option `data`."
)
LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}  # float columns of tables with gaps write 0.0 and 1.0
GREY = np.float32([0.2989, 0.5870, 0.1140])  # weights of red, green and blue in TensorFlow's rgb_to_grayscale


class BytesOptions(base.Options):
    """Options of tasks on bytes.

    `data`: where the files are. Texts are cut at `max_length` bytes, and padded to the longest of the batch or, with
    `pad: max`, to seq_len. Fewer samples take the first of a fixed shuffle.
    """

    data: str
    max_length: int = Field(4000, ge=1)
    seq_len: int = Field(4096, ge=4)
    pad: Literal["longest", "max"] = "longest"
    train_samples: base.Count = None
    eval_samples: base.Count = None

    @model_validator(mode="after")
    def _fits(self) -> BytesOptions:
        if self.max_length > self.seq_len:
            raise ValueError(f"max_length {self.max_length} is beyond seq_len {self.seq_len}")
        return self


class TextOptions(BytesOptions):
    """Options of `lra-text`.

    `data`: the hub, or a folder of train and test tables (parquet, csv, tsv, jsonl) with the columns text and label.
    """

    data: str = IMDB


class ImageOptions(base.Options):
    """`data` is that of `cifar10`; `mask_black` that of `pathfinder`."""

    data: str = small.CIFAR
    mask_black: bool = True
    train_samples: base.Count = None
    eval_samples: base.Count = None


class _Bytes(base.Shortened):
    """Samples of one or two texts as bytes."""

    head = "sequence-classification"
    metric = base.ACCURACY
    overrides = {"num_labels": 2, "vocab_size": 257}  # noqa: RUF012
    texts = ("",)  # suffixes of the arrays and of the inputs made from them

    def batch(self, split: str, indices: ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `input_ids` and `attention_mask` (B, T), of both texts if a sample has two, and `labels` (B,)."""
        rows, o = self._indices(split, indices), self.options
        arrays = {}
        for suffix in self.texts:
            starts = self._array(f"{split}-starts{suffix}")
            lengths_B = np.minimum(disk_cache.lengths_of(starts, rows), o.max_length)
            width = o.seq_len if o.pad == "max" else min(o.seq_len, -(-int(lengths_B.max(initial=1)) // 64) * 64)
            tokens = np.zeros((len(rows), width), dtype=np.int64)
            flat = self._array(f"{split}-bytes{suffix}")
            for row, start, length in zip(tokens, starts[rows], lengths_B, strict=True):
                row[:length] = flat[start : start + length]
                row[:length] += 1
            arrays[f"input_ids{suffix}"] = tokens
            arrays[f"attention_mask{suffix}"] = (np.arange(width) < lengths_B[:, None]).astype(np.int64)
        arrays["labels"] = self._array(f"{split}-labels")[rows].astype(np.int64)
        return base.as_tensors(**arrays)

    def describe(self) -> base.Description:
        """Return sizes, source and licence of the data."""
        return super().describe() | {"max_length": self.options.max_length, "seq_len": self.options.seq_len}


class LraText(_Bytes):
    """Sentiment of film reviews: IMDb (Maas et al., 2011) as bytes.

    The arena evaluates on the 25,000 test reviews; there are no others for model selection.
    """

    name = "lra-text"
    Options = TextOptions
    source, licence = "IMDb reviews (Maas et al., 2011), its published split", "none stated by its authors"

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read the published files into the cache once, as bytes."""
        vocab.check_length(self.options.seq_len, model_dir)
        data, words = self.options.data, {"train": "train", "eval": "test"}
        if named := hub.parse(data):
            splits = {split: [hub.load(*named, word, by_hand=IMDB_BY_HAND)] for split, word in words.items()}
        else:
            folder = in_home(data).absolute()
            listed = list(filter(tables.is_table, files.files_below(folder)))
            parts = image_places.parts_by_name(listed, folder, mixed=True)
            if not {"train", "test"} <= parts.keys():
                raise UsageError(f"The IMDb reviews are not in {data}: no train and test tables there.", IMDB_BY_HAND)
            splits = {split: parts[word] for split, word in words.items()}
        stamps = {split: list(map(image_places.stamp, places)) for split, places in splits.items()}
        key = {"version": 2, "files": stamps}  # version 1 accepted any integer as a label

        def build(folder: Path) -> disk_cache.Info:
            say(f"lra-text: reading {data}")
            sizes = {}
            for split, places in splits.items():
                rows = []
                for where, (text, said) in (row for place in places for row in hub.read(place, ["text", "label"])):
                    if not isinstance(text, str):
                        raise UsageError(f"{where}: a text is {quote(text)}.")
                    label = LABELS.get(str(said).strip())  # csv files hold it as text, others as a number
                    if label is None:
                        raise UsageError(f"{where}: the label {quote(said)} is not 0 or 1.")
                    rows.append((label, [text.encode()]))
                if not rows:
                    raise UsageError(f"{data} holds no reviews for '{split}'.", IMDB_BY_HAND)
                # Files are ordered by class, but a part of them must contain both.
                order = np.random.default_rng(0).permutation(len(rows))
                sizes[split] = _store(folder, split, (rows[i] for i in order), self.texts)
            return {"sizes": sizes}

        self._open(cache, "lra-text", key, build)
        self._check_limits(f"Task '{self.name}'", "samples")


class LraRetrieval(_Bytes):
    """Whether one paper of the ACL Anthology Network (Radev et al., 2013) cites the other, from both texts as bytes."""

    name = "lra-retrieval"
    Options = BytesOptions
    texts = ("", "_2")
    source, licence = "AAN pairs of the Long Range Arena release", "as its authors say"

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read the published files into the cache once, as bytes."""
        vocab.check_length(self.options.seq_len, model_dir)
        root, files = in_home(self.options.data), {}
        for split in ("train", "eval", "test"):
            matches = sorted(root.rglob(f"*.{split}.tsv"))
            if not matches:
                raise UsageError(f"The AAN pairs are not in {root}: new_aan_pairs.{split}.tsv is missing.", AAN_BY_HAND)
            files[split] = matches[0].absolute()
        key = {"version": 1, "files": {split: image_places.stamp(path) for split, path in files.items()}}

        def build(folder: Path) -> disk_cache.Info:
            sizes = {}
            for split, path in files.items():
                say(f"lra-retrieval: reading {path}")
                sizes[split] = _store(folder, split, _pairs(path), self.texts)
            return {"sizes": sizes}

        self._open(cache, "lra-retrieval", key, build)
        self._check_limits(f"Task '{self.name}'", "samples")


class LraImage(base.Shortened):
    """Grey CIFAR-10 images as sequences of 1,024 pixels.

    The last tenth of the training images is for evaluation (in the order of the files; TensorFlow's copy has another
    order), and "test" are the test images.
    """

    name = "lra-image"
    Options = ImageOptions
    head = "sequence-classification"
    metric = base.ACCURACY
    overrides = {"num_labels": 10, "vocab_size": 256}  # noqa: RUF012
    source, licence = "CIFAR-10 (Krizhevsky, 2009), grey", "none stated by its authors"

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Read the published files into the cache once."""
        vocab.check_length(32 * 32, model_dir)
        self._open(cache, "cifar10", *small.cifar_entry(self.options.data, say))
        there = self._info["sizes"]
        held = there["train"] // 10
        self._info = {**self._info, "sizes": {"train": there["train"] - held, "eval": held, "test": there["eval"]}}
        self._check_limits(f"Task '{self.name}'", "samples")

    def batch(self, split: str, indices: ndarray, *, seed: int, epoch: int) -> base.Batch:
        """Return `input_ids` (B, 1024) and `labels` (B,); `attention_mask` is 0 at black pixels."""
        rows = self._indices(split, indices)
        if split == "eval":
            rows = rows + self._info["sizes"]["train"]
        stored = "eval" if split == "test" else "train"
        grey_BT = grey(self._array(f"{stored}-images")[rows]).reshape(len(rows), -1)
        return pixels_as_tokens(grey_BT, self._array(f"{stored}-labels")[rows], self.options.mask_black)


def grey(images_BHWC: ndarray) -> ndarray:
    """Convert (B, H, W, 3) to grey (B, H, W), uint8, rounded as in `tf.image.rgb_to_grayscale`: x 255.5, truncated."""
    return np.minimum((images_BHWC.astype(np.float32) / np.float32(255)) @ GREY * np.float32(255.5), 255).astype(
        np.uint8
    )


def _store(folder: Path, split: str, rows: Iterator[tuple[int, list[bytes]]], texts: tuple[str, ...]) -> int:
    """Write concatenated bytes, their starts, and labels; return the number of samples."""
    writers = [disk_cache.ArrayWriter(folder / f"{split}-bytes{suffix}.npy", np.uint8) for suffix in texts]
    labels, lengths = [], [[] for _ in texts]
    for label, parts in rows:
        labels.append(label)
        for part, writer, sizes in zip(parts, writers, lengths, strict=True):
            writer.append(np.frombuffer(part, dtype=np.uint8))
            sizes.append(len(part))
    for writer, sizes, suffix in zip(writers, lengths, texts, strict=True):
        writer.close()
        np.save(folder / f"{split}-starts{suffix}.npy", disk_cache.starts_of(np.array(sizes, dtype=np.int64)))
    np.save(folder / f"{split}-labels.npy", np.array(labels, dtype=np.uint8))
    return len(labels)


def _pairs(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (1 if one cites the other, both texts) from lines `label <tab> id <tab> id <tab> text <tab> text`."""
    with files.open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(tables.LINE), b""), start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) == 1 and not fields[0]:
                continue
            if len(fields) != 5:
                raise UsageError(f"{path}, line {number}: {len(fields)} fields where 5 are expected.")
            label = LABELS.get(fields[0].decode(errors="replace").strip())
            if label is None:
                raise UsageError(f"{path}, line {number}: the label {quote(fields[0])} is not 0 or 1.")
            yield label, fields[3:]
