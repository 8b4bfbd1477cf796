"""Checkpoints of an unfinished run: folders that are complete or do not exist.

    RUN/checkpoints/step-00000500/
        state.json            counters, the recipe, what was measured so far
        shared.safetensors    weights, optimizer, moving average
        rank-0000.safetensors state of one process: generators, buffers
        MANIFEST.json         size and SHA-256 of the files above, written last
    RUN/checkpoints/best.json the step whose model is in RUN/model

A folder is written under a temporary name, synced and renamed; then old ones are deleted. One whose files do not match
its manifest is incomplete and never read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.checkpoints.digests import digest
from leansurgeon.checkpoints.publish.durable import sync
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.progress import Say, silent, size_text
from leansurgeon.reading import jsonfile, tensorfile
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training.runs import folder as runfolder

if TYPE_CHECKING:
    from leansurgeon.training.distributed import Tensors
    from leansurgeon.training.processes.agree import ProcessGroup

FOLDER, MANIFEST, STATE, SHARED = "checkpoints", "MANIFEST.json", "state.json", "shared.safetensors"
BEST = "best.json"
FORMAT = 1
_SPARE = 64 * 2**20  # bytes that must remain besides the checkpoint: logs, the best model's config


_STATE = {"recipe": dict, "origin": dict, "data": dict, "history": dict, "groups": list, "metrics_bytes": int}
_NAME = re.compile(r"step-\d{8}")


def rank_file(rank: int) -> str:
    return f"rank-{rank:04d}.safetensors"


def all_of(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first, complete or not."""
    return sorted((run_dir / FOLDER).glob("step-" + "[0-9]" * 8), reverse=True)


def newest(run_dir: Path, say: Say = silent, *, hashes: bool = True) -> Path | None:
    """Return the newest complete checkpoint of a run; report incomplete ones to `say` and skip them."""
    _repair(run_dir)
    for path in all_of(run_dir):
        if not (fault := torn(path, hashes=hashes)):
            return path
        say(f"{path} is incomplete ({fault}); using an older one.")
    return None


def _repair(run_dir: Path) -> None:
    """Restore checkpoints that a crash between two renames left aside, unless another process is training there."""
    if not (left := list((run_dir / FOLDER).glob(".step-*.old"))):
        return
    with suppress(UsageError):
        lock = runfolder.hold(run_dir)
        try:
            for old in left:
                path = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
                if not path.exists():
                    os.rename(old, path)
        finally:
            runfolder.release(lock)


def torn(path: Path, *, hashes: bool) -> str | None:
    """Return what is wrong with a checkpoint folder; None if every file is as the manifest says. Without `hashes`,
    compare sizes only and read no tensors.
    """
    manifest = jsonfile.read_object_if_whole(path / MANIFEST)
    if manifest is None:
        return "it has no manifest that can be read"
    if manifest.get("format", FORMAT) != FORMAT:
        return f"its format is {manifest['format']}, and this version reads {FORMAT}"
    files = manifest.get("files")
    if not isinstance(files, dict) or not files.keys() >= {STATE, SHARED}:
        return "its manifest is damaged"
    for name, wanted in files.items():
        if not isinstance(wanted, dict) or not wanted.keys() >= {"bytes", "sha256"}:
            return "its manifest is damaged"
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != wanted["bytes"]:
            return f"{name} has {file.stat().st_size} of {wanted['bytes']} bytes"
        if hashes and digest(file) != wanted["sha256"]:
            return f"{name} has changed"
    return None


def write(
    run_dir: Path,
    step: int,
    shared: Tensors,
    own: Tensors,
    state: JsonObject,
    group: ProcessGroup,
    *,
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and delete older ones beyond `keep`. All processes must call this.

    Only rank 0's `shared` and `state` are used. Raises `LeanSurgeonError` on every process if one of them could not
    write, or the disk has too little room; existing checkpoints stay.
    """
    path = run_dir / FOLDER / f"step-{step:08d}"
    aside = path.with_name(f".{path.name}.tmp")

    @runfolder.explain_errors(path)
    def begin() -> None:
        for left in path.parent.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        bytes_shared, bytes_own = (sum(t.nbytes for t in tensors.values()) for tensors in (shared, own))
        needed = bytes_shared + group.processes * bytes_own + _SPARE
        free = shutil.disk_usage(path.parent).free
        if free < needed:
            raise LeanSurgeonError(
                f"A checkpoint needs {size_text(needed)}, and {path.parent} has {size_text(free)} free.",
                "Free some space, or choose another folder with -o.",
            )

    @runfolder.explain_errors(path)
    def fill() -> None:
        _save(own, aside / rank_file(group.rank))
        if group.rank == 0:
            _save(shared, aside / SHARED)
            runfolder.write_text(aside / STATE, json.dumps(state))

    @runfolder.explain_errors(path)
    def finish() -> None:
        told = {file.name: {"bytes": file.stat().st_size, "sha256": digest(file)} for file in sorted(aside.iterdir())}
        runfolder.write_json(aside / MANIFEST, {"format": FORMAT, "step": step, "files": told})
        runfolder.move_in_place(aside, path)
        for old in all_of(run_dir)[keep:]:
            shutil.rmtree(old, ignore_errors=True)

    try:
        group.on_main(begin)
        group.everywhere(fill)
        group.on_main(finish)
    except LeanSurgeonError:
        if group.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return path


def read_state(path: Path) -> JsonObject:
    """Return the state of a checkpoint, without its tensors. Raises `UsageError` if required values are missing."""
    state = jsonfile.read_object(path / STATE)
    for key, kind in _STATE.items():
        if not isinstance(state.get(key), kind):
            raise damaged_checkpoint(path, f"'{key}' in {STATE} is {jsonfile.a_kind_of(state.get(key))}")
    if not all(isinstance(state["data"].get(split), int) for split in ("train", "eval")):
        raise damaged_checkpoint(path, f"'data' in {STATE} does not count the samples")
    return state


def damaged_checkpoint(path: Path, what: str) -> UsageError:
    """Return the error for a checkpoint that agrees with its manifest but cannot be resumed."""
    return UsageError(f"The checkpoint {path} is damaged: {what}.", "Resume from an older one with --resume PATH.")


def note_best(run_dir: Path, step: int | None) -> None:
    """Record which step's model is in model/; None: it is about to change."""
    note = run_dir / FOLDER / BEST
    with runfolder.explain_errors(note):
        if step is None:
            note.unlink(missing_ok=True)
            return
        note.parent.mkdir(exist_ok=True)
    runfolder.write_json(note, {"step": step})


def best_kept(run_dir: Path) -> int | None:
    """Return the step whose model is in model/; None if unknown."""
    step = (jsonfile.read_object_if_whole(run_dir / FOLDER / BEST) or {}).get("step")
    return step if isinstance(step, int) else None


def read_tensors(path: Path, rank: int) -> tuple[Tensors, Tensors]:
    """Return the shared tensors and those of process `rank` (none if the run had fewer processes), on the CPU."""
    from safetensors.torch import load_file

    own = path / rank_file(rank)
    for file in (path / SHARED, *([own] if own.is_file() else [])):
        tensorfile.read_header(file)
    return load_file(path / SHARED), load_file(own) if own.is_file() else {}


def locate_checkpoint(given: Path, *, hashes: bool = True) -> tuple[Path, Path]:
    """Return the run folder and the complete checkpoint that `--resume PATH` means: PATH is a run folder, or a
    checkpoint in one.

    To find only the run, leave `hashes` off. Raises `UsageError` for anything else.
    """
    if not given.is_dir():
        raise UsageError(f"There is no run folder or checkpoint {given}.")
    whole = given.absolute()
    placed = _NAME.fullmatch(whole.name) and whole.parent.name == FOLDER
    if placed or (given / MANIFEST).is_file():
        run_dir = given.parent.parent if len(given.parts) > 2 else whole.parent.parent
        if not (placed and (run_dir / runfolder.RECIPE).is_file()):
            raise UsageError(
                f"{given} is a checkpoint that does not lie in its run, as RUN/{FOLDER}/step-00000500 does.",
                "Copy it back there under its old name, or name a run folder.",
            )
        if fault := torn(given, hashes=hashes):
            raise UsageError(
                f"{given} is not a complete checkpoint: {fault}.", "Name the run folder to take an older one."
            )
        return run_dir, given
    last = newest(given, hashes=hashes)
    if last is None:
        raise UsageError(f"{given} holds no complete checkpoint.", "It cannot be resumed; train it again.")
    return given, last


def _save(tensors: Tensors, file: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    sync(file)
