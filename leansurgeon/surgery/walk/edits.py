"""Changed tensors of a result on their way to the writer, on disk: memory holds one block of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from leansurgeon.checkpoints.publish.leftovers import scratch


class Edits(Mapping[str, np.ndarray]):
    """Changed tensors of the result in float32, by file name, on disk. `close` removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, {}

    def put(self, name: str, values: np.ndarray) -> None:
        """Store a tensor as float32 on disk; one of the same name is replaced."""
        file = self.folder / f"{len(self.files)}.npy" if name not in self.files else self.files[name]
        np.save(file, np.ascontiguousarray(values, np.float32))
        self.files[name] = file

    def __getitem__(self, name: str) -> np.ndarray:
        return np.load(self.files[name], mmap_mode="r")

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def edits_in(place: Path | None, held: ExitStack) -> Edits:
    """No edits yet, in a folder of their own that lasts as long as `held`."""
    return Edits(held.enter_context(scratch(place)))
