"""Run folders: names, and writes that never leave a half-written file in place. No torch here.

A file or folder is written under a temporary name, synced to the disk and renamed into place; only then is the old one
deleted.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.foreign import unpacked
from leansurgeon.checkpoints.publish import durable
from leansurgeon.checkpoints.publish.durable import sync, sync_tree, write_durably
from leansurgeon.errors import LeanSurgeonError, UsageError, disk_is_full
from leansurgeon.progress import Say
from leansurgeon.reading import files

RECIPE, METRICS, SUMMARY, BEST, LAST = "recipe.yaml", "metrics.jsonl", "summary.json", "model", "last"
EXPERIMENT = "experiment.yaml"  # the resolved recipe of an experiment, beside the runs of its arms
STARTS = "starts"  # where an experiment keeps the untrained models of its arms


def place_of(folder: Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder, which tell it from another of the same name; None if it does
    not exist.
    """
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_CALL = "# leansurgeon "


def with_call(line: str, recipe: str) -> str:
    """Return a recipe with the command that made it in a comment, which `call_in` reads."""
    return f"# {line}\n{recipe}" if line.isprintable() else recipe


def call_in(recipe: str) -> str:
    """Return the command in a recipe's first line, or "" if there is none.

    The command is shown to users to type again, so it is quoted: whatever the file holds is one command, and nothing
    that a shell would interpret further.
    """
    first = recipe.split("\n", 1)[0]
    if not (first.startswith(_CALL) and first.isprintable()):
        return ""
    try:
        return shlex.join(shlex.split(first.removeprefix("# ")))
    except ValueError:  # an unclosed quotation mark
        return ""


def new_run(workspace: Path, name: str, seed: int) -> Path:
    """Return a path for a new run that does not exist yet: `runs/digits-vit-s0-20260131-142501`, with `-2` appended if
    it is taken.
    """
    stem = f"{name}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = workspace / stem, 1
    while path.exists():
        number += 1
        path = workspace / f"{stem}-{number}"
    return path


def check_free(run_dir: Path, *, replace: bool = False) -> None:
    """Raise `UsageError` if the folder is not empty, unless it is a run and `replace` discards it."""
    if replace and (run_dir / RECIPE).is_file():
        return
    with explain_errors(run_dir):
        if run_dir.exists() and not run_dir.is_dir():
            raise UsageError(f"{run_dir} is a file, and a run is a folder.", "Choose another folder with -o.")
        taken = run_dir.exists() and any(run_dir.iterdir())
    if taken:
        raise UsageError(f"{run_dir} exists already and is not empty.", "Choose another folder with -o.")


def create(run_dir: Path, *, replace: bool = False) -> None:
    """Create the folder, empty. Raises `UsageError` as `check_free` does."""
    check_free(run_dir, replace=replace)
    with explain_errors(run_dir):
        if replace and run_dir.exists():
            shutil.rmtree(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)


def model_of(path: Path) -> Path:
    """Return the model folder that `path` means: itself, or `model/` of a run folder. Raises `UsageError` if there is
    none.
    """
    if not path.is_dir():
        raise UsageError(f"There is no model folder {path}.", "`leansurgeon shrink SOURCE ... -o FOLDER` makes one.")
    if (path / "config.json").is_file():
        return path
    if (path / BEST / "config.json").is_file():
        return path / BEST
    raise unpacked.of_folder(path)


def newest_shrunk(workspace: Path) -> Path:
    """Return the folder below `workspace` with the newest `surgery.json`, except those internal to runs and
    experiments.
    """
    records = []
    for path in workspace.glob("**/surgery.json"):
        # not an incomplete folder, the starting model of an experiment's arm, or a trained copy in a run
        parts = path.parent.relative_to(workspace).parts
        internal = any(part.startswith(".") for part in parts) or STARTS in parts[:-1]
        if not internal and not is_trained(path.parent):
            records.append(path)
    if not records:
        raise UsageError(
            f"There is no shrunk model in {workspace}.",
            "`leansurgeon shrink SOURCE --heads .. --layers ..` makes one, or name the MODEL.",
        )
    return max(records, key=lambda path: (path.stat().st_mtime_ns, str(path))).parent


def is_trained(folder: Path) -> bool:
    """Return whether this model folder was written by a training: `model/` or `last/` of a run."""
    folder = Path(os.path.abspath(folder))  # `.` has no name
    return folder.name in (BEST, LAST) and (folder.parent / RECIPE).is_file()


def has_learned(model_dir: Path) -> bool:
    """Return whether the weights are trained: weights that surgery initialized are not, until they are trained."""
    made = record.read(Path(model_dir))
    return is_trained(model_dir) or made is None or made.learned


def display_name(model_dir: Path) -> str:
    """Return the name of a model's folder, or for a model inside a run the name of the run."""
    folder = Path(model_dir).resolve()
    return folder.parent.name if folder.name in (BEST, LAST) else folder.name


def find_run(model: str | Path) -> Path | None:
    """Return the run folder that MODEL names, itself or by a model in it; None for anything else."""
    folder = files.in_home(model)
    if is_trained(folder):
        return Path(os.path.abspath(folder)).parent if folder.name in ("", "..") else folder.parent
    return folder if (folder / RECIPE).is_file() and (folder / BEST / "config.json").is_file() else None


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file with this text, atomically."""
    with explain_errors(path):
        write_durably(path, text)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with `write_text`. Refuses NaN, which other readers do not accept."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def keep_beside(path: Path, value: Any, say: Say) -> None:
    """Write measurements with `write_json`. A failure to write is reported, and the measurement is not lost."""
    try:
        write_json(path, value)
    except (LeanSurgeonError, OSError, ValueError) as error:
        say(f"{path} was not written: {files.why(error) if isinstance(error, OSError) else error}")
    else:
        say(f"Kept as {path}.")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into an empty folder, and replace `path` by it.

    A crash leaves the old folder or the new one, complete; between two renames neither is at `path`, and the old one is
    at `.<name>.old`.
    """
    aside, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    with explain_errors(path):
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            fill(aside)
            sync_tree(aside)
            move_in_place(aside, path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def move_in_place(aside: Path, path: Path) -> None:
    """Rename a folder whose files are synced to `path`; delete the old one once the new one is safe."""
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        os.rename(path, old)
    sync(aside)
    os.rename(aside, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


class MetricsLog:
    """`metrics.jsonl`: one JSON object per line, in the order of the steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def bytes(self) -> int:
        """Size of the file so far; `truncate` to it removes later lines."""
        return self.path.stat().st_size if self.path.exists() else 0

    def truncate(self, size: int) -> None:
        """Remove lines beyond `size` bytes, from a process that continued after its last checkpoint.

        If the file is shorter than that, remove its incomplete last line.
        """
        with explain_errors(self.path), open(self.path, "a+b", opener=_no_link) as file:
            if self.bytes < size:
                file.seek(0)
                size = file.read().rfind(b"\n") + 1
            file.truncate(size)

    def sync(self) -> None:
        """Sync the file to the disk, so that it is not shorter there than a checkpoint says."""
        if self.path.exists():
            with explain_errors(self.path):
                sync(self.path)

    def write(self, **record: Any) -> None:
        with explain_errors(self.path), open(self.path, "a", encoding="utf-8", opener=_no_link) as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def _no_link(path: str, flags: int) -> int:
    """Open a file that grows in place, but not through a link: in another user's run, it may point anywhere."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


_NO_PLACE = (  # ENOENT: a folder such as /proc, in which nothing can be created
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
    *(errno.ENOENT, errno.ENOTSUP, errno.ENAMETOOLONG, errno.ELOOP),
)


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence. Raises `LeanSurgeonError` (exit code 1) or `UsageError`."""
    try:
        yield
    except Exception as error:
        if disk_is_full(error):
            raise LeanSurgeonError(
                f"The disk is full: {path} could not be written.", "Free some space, or choose another folder with -o."
            ) from error
        if isinstance(error, OSError) and error.errno in _NO_PLACE:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}.", "Choose another folder with -o."
            ) from error
        raise


is_held = durable.in_use  # whether some process is training in a folder now

_held: set[int] = set()  # handles that `hold` opened in this process


def hold(run_dir: Path) -> int | None:
    """Lock the folder for training, until this process ends or closes the returned handle.

    Raises `UsageError` if another process holds the lock. Returns None if the file system does not support locks.
    """
    handle, taken = durable.take_lock(run_dir)
    if taken:
        raise UsageError(f"{run_dir} is being trained by another process.", "Choose another folder with -o.")
    if handle is not None:
        _held.add(handle)
    return handle


def release(handle: int | None) -> None:
    if handle is not None:
        _held.discard(handle)
        os.close(handle)


def leave_to_parent() -> None:
    """In a forked process, close the copies of the parent's lock handles. With them the folder would stay locked as
    long as this process lives, which may be longer than its parent.
    """
    while _held:
        os.close(_held.pop())
