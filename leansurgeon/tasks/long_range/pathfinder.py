"""Pathfinder of the Long Range Arena: are the two discs joined by one dashed contour? 32 x 32 grey pixels as a
sequence.

Read from the published files (`lra_release/pathfinder32/curv_contour_length_14`), or made here by the published rules
(`pathfinder_draw`), since the files are part of an archive of 7.7 GB.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say, phase
from leansurgeon.reading import files
from leansurgeon.reading.files import in_home
from leansurgeon.reading.images import decode
from leansurgeon.tasks import base, disk_cache
from leansurgeon.tasks.long_range import makers
from leansurgeon.tasks.long_range.pathfinder_draw import CONTOUR_LENGTH, chunk
from leansurgeon.tasks.text import vocab

_VERSION = 1  # of the generator: a change that changes the data changes this
GENERATED = "generated"
TOKENS = 32 * 32
LIST, PICTURE = 100_000_000, 1_000_000  # bytes of a list of images, and of an image of a kilobyte
_FOLDERS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
_STYLE = {  # the numbers of the drawing, as the keys of cache entries have always spelled them
    "size": 32, "padding": 1, "length": 2, "thickness": 0.5, "margin": 1, "marker_radius": 1.5, "seed_distance": 7,
    "continuity": 1.0, "antialias": 2, "target_contrast": 1.5, "distractor_contrast": 2.0, "segment_trials": 3,
    "contour_trials": 5,
}  # fmt: skip


class Options(base.Options):
    """`data`: `generated`, or the published folder (of Pathfinder-32, or of the level in it). `samples` is the number
    of images to make; 80 % are for training, 10 % for evaluation, 10 % for a test. `seed` is that of the data.
    `mask_black` hides black pixels from the attention, as the code of the Nystromformer authors does for every id 0.
    """

    data: str = GENERATED
    difficulty: Literal["easy", "intermediate", "hard"] = "hard"
    samples: int = Field(200_000, ge=10)
    seed: int = Field(0, ge=0)
    mask_black: bool = True


class Pathfinder(base.Task):
    """Two-way classification of 1,024 grey values, 0 to 255."""

    name = "pathfinder"
    overrides = {"num_labels": 2, "vocab_size": 256}  # noqa: RUF012
    head = "sequence-classification"
    metric = base.ACCURACY
    Options = Options
    licence = "made by leansurgeon: no rights attached"

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        """Generate the images once, in `workers` processes, or read the published ones."""
        o, made = self.options, self.options.data == GENERATED
        vocab.check_length(TOKENS, model_dir)
        self.source = f"Pathfinder-32 {o.difficulty}, {f'generated with seed {o.seed}' if made else o.data}"
        if made:
            style = _STYLE | {"contour_length": CONTOUR_LENGTH[o.difficulty]}
            key = {"version": _VERSION, "style": style, "samples": o.samples, "seed": o.seed}
            self._open(cache, "pathfinder", key, partial(_generate, o, workers, say))
            return
        self.licence = "as its authors say"
        root, name = in_home(o.data).absolute(), _FOLDERS[o.difficulty]
        places = (root, root / name, root / "pathfinder32" / name, root / "lra_release" / "pathfinder32" / name)
        folder = next((place for place in places if (place / "metadata").is_dir()), None)
        if folder is None:
            raise UsageError(
                f"Pathfinder-32 ({o.difficulty}) is not in {root}: {name}/metadata is missing.",
                "It is in lra_release.gz (7.7 GB) from storage.googleapis.com/long-range-arena; or leave `data` out, "
                "and the images are made here.",
            )
        if folder == root and root.name in _FOLDERS.values() and root.name != name:
            raise UsageError(f"{root} is not Pathfinder of the difficulty '{o.difficulty}', which is called {name}.")
        lists = sorted((folder / "metadata").glob("*.npy"), key=lambda p: (len(p.name), p.name))
        stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in lists]
        key = {"version": _VERSION, "folder": str(folder), "lists": stamps, "seed": o.seed}
        self._open(cache, "pathfinder", key, partial(_read, folder, lists, o.seed, say))

    def batch(self, split: str, indices: np.ndarray, *, seed: int, epoch: int) -> base.Batch:
        """`input_ids` (B, 1024), a grey level for each pixel, and `labels` (B,); `attention_mask` is 0 at black."""
        rows = self._indices(split, indices) + self._info["first"][split]
        return pixels_as_tokens(self._array("images")[rows], self._array("labels")[rows], self.options.mask_black)


def pixels_as_tokens(grey_BT: np.ndarray, labels_B: np.ndarray, mask_black: bool) -> base.Batch:
    """Grey values as `input_ids` (B, T), with an `attention_mask` that is 0 at black ones where these are hidden."""
    arrays = {"input_ids": grey_BT} | ({"attention_mask": grey_BT != 0} if mask_black else {}) | {"labels": labels_B}
    return base.as_tensors(**{name: array.astype(np.int64) for name, array in arrays.items()})


def _split(total: int) -> disk_cache.Info:
    """80, 10 and 10 % of the samples, one split after the other."""
    train, end = int(total * 0.8), int(total * 0.9)
    return disk_cache.name_stretches({"train": train, "eval": end - train, "test": total - end})


def _read(level: Path, lists: list[Path], seed: int, say: Say, folder: Path) -> disk_cache.Info:
    """All images that the lists name, empty files left out as upstream does, shuffled by `seed`."""
    say(f"pathfinder: reading {level}")
    images, labels = [], []
    for path in lists:
        for number, line in enumerate(files.read_text(path, LIST).splitlines(), start=1):
            fields = line.split()
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                raise UsageError(f"{path}, line {number}: not a line of Pathfinder (folder, file, number, label, ...).")
            picture = level / fields[0] / fields[1]
            content = files.read_bytes(picture, PICTURE)
            if not content:
                continue
            image = np.asarray(decode(content, "L", f"The image {picture}"))
            if image.shape != (32, 32):
                raise UsageError(f"The image {picture} has {image.shape[1]} x {image.shape[0]} pixels, not 32 x 32.")
            images.append(image.reshape(-1))
            labels.append(int(fields[3]))
    if len(labels) < 10:
        raise UsageError(f"{level} lists {len(labels)} images, too few for three splits.")
    order = np.random.default_rng(seed).permutation(len(labels))
    np.save(folder / "images.npy", np.stack(images)[order])
    np.save(folder / "labels.npy", np.array(labels, dtype=np.uint8)[order])
    return _split(len(labels))


def _generate(options: Options, workers: int, say: Say, folder: Path) -> disk_cache.Info:
    total = options.samples
    workers = min(workers, 1 + total // 1000)
    given = (CONTOUR_LENGTH[options.difficulty], options.seed)
    say(f"pathfinder: drawing {total:,} images with {workers} process{'es' if workers > 1 else ''}")
    images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, (total, TOKENS))
    labels = np.empty(total, dtype=np.uint8)
    done = 0
    with makers.chunks(chunk, given, workers) as chunks, phase("pathfinder", total, "images/s") as advance:
        for drawn in chunks:
            take = min(len(drawn.labels), total - done)
            images[done : done + take] = drawn.images[:take].reshape(take, TOKENS)
            labels[done : done + take] = drawn.labels[:take]
            done += take
            if done == total:
                break
            advance(take)
    images.flush()
    np.save(folder / "labels.npy", labels)
    return _split(total)
