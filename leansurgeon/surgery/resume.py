"""What a calibrated cut keeps on disk: changed tensors for the writer, so that memory holds one block of them, and
finished steps next to the output, so that an interrupted cut can resume.

Saved are the choice of layers and every finished layer and span. Hidden states are recomputed, which needs no refits,
so the result equals that of an uninterrupted cut bit for bit. Every step is a folder that is complete or absent; a key
over all inputs of the result tells whether steps belong to this cut.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from leansurgeon.checkpoints.provenance import versions
from leansurgeon.checkpoints.publish.durable import sync_tree, write_durably
from leansurgeon.checkpoints.weights import Arrays
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.reading import jsonfile
from leansurgeon.surgery.planning import Plan

RECORD, KEY = "record.json", "key.json"
FORM = 3  # raise it when saved steps change their meaning


class Edits(Mapping[str, np.ndarray]):
    """Changed tensors of the result in float32, by file name, on disk. `close` removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, {}

    def update(self, tensors: Arrays) -> None:
        """Store tensors as float32 on disk, replacing those of the same names."""
        for name, values in tensors.items():
            file = self.files.setdefault(name, self.folder / f"{len(self.files)}.npy")
            np.save(file, np.asarray(values, np.float32, order="C"))

    def __getitem__(self, name: str) -> np.ndarray:
        return np.load(self.files[name], mmap_mode="r")

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Step:
    """Tensors in float32 by name, the numbers for the record, and the block-tokens that the cut had spent by then."""

    tensors: Arrays
    record: jsonfile.JsonObject
    work: float = 0.0


class ResumeState:
    """Saved steps by name in `folder`; without a folder, nothing is saved. With `resume`, steps of the same `key` are
    reused; otherwise the folder is cleared.
    """

    def __init__(self, folder: Path | None = None, key: str = "", *, resume: bool = False) -> None:
        self.folder, self.key = folder, key
        if folder is not None and not (resume and self.goes_on):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def goes_on(self) -> bool:
        """Whether steps of this very cut exist."""
        file = self.folder / KEY if self.folder else None
        return file is not None and file.is_file() and jsonfile.read_object(file).get("key") == self.key

    def get(self, name: str) -> Step | None:
        """Return a finished step; None if there is none."""
        if self.folder is None or not (self.folder / name / RECORD).is_file():
            return None
        said = jsonfile.read_object(self.folder / name / RECORD)
        tensors = {t: np.load(self.folder / name / f"{i}.npy", mmap_mode="r") for i, t in enumerate(said["tensors"])}
        return Step(tensors, said["record"], said["work"])

    def put(self, name: str, step: Step) -> None:
        """Save a finished step."""
        if self.folder is None:
            return
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            write_durably(self.folder / KEY, json.dumps({"key": self.key}))
        aside = self.folder / f"{name}.{os.getpid()}.unfinished"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            for i, values in enumerate(step.tensors.values()):
                np.save(aside / f"{i}.npy", np.asarray(values, np.float32, order="C"))
            told = {"record": step.record, "work": step.work}
            (aside / RECORD).write_text(json.dumps({"tensors": list(step.tensors)} | told))
            sync_tree(aside)
            shutil.rmtree(self.folder / name, ignore_errors=True)
            aside.rename(self.folder / name)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # it may fill the disk
            raise

    def keep_only(self, name: str) -> None:
        """Delete all steps but one."""
        for other in self.folder.iterdir() if self.folder else ():
            if other.is_dir() and other.name != name:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Delete everything: the result is published."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def place_of(output: Path) -> Path:
    """Return the folder for the state of the cut that writes to `output`."""
    return output.parent / f".{output.name}.cut"


def key_of(plan: Plan, calibration: Calibration, settings: Mapping[str, object]) -> str:
    """Return a digest of everything that determines the result: source, plan, sample data, settings, and versions."""
    files = sorted([str(path), asdict(identity)] for path, identity in plan.source.seen.items())
    said = [FORM, files, plan.as_dict(), calibration.digest, dict(settings), versions()]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
