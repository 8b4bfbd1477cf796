"""Run folders: names, and writing such that nothing half-written is ever taken for whole. No torch here.

A file or folder is written under another name, synced to the disk and renamed into place; only then is the old one
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
    """What tells a folder from another of the same name: its device and inode; None where there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_CALL = "# leansurgeon "


def with_call(line: str, recipe: str) -> str:
    """A recipe behind the command that it came from, as a comment that `call_in` reads."""
    return f"# {line}\n{recipe}" if line.isprintable() else recipe


def call_in(recipe: str) -> str:
    """The command that a recipe came from, as its first line says; "" where nobody noted it. It is shown for people to
    type again, so whatever stands there is one command and nothing that a shell would read as more.
    """
    first = recipe.split("\n", 1)[0]
    if not (first.startswith(_CALL) and first.isprintable()):
        return ""
    try:
        return shlex.join(shlex.split(first.removeprefix("# ")))
    except ValueError:  # a quotation mark without its other half
        return ""


def new_run(workspace: Path, name: str, seed: int) -> Path:
    """A path for a new run that does not exist yet: `runs/digits-vit-s0-20260131-142501`, `-2` behind it if taken."""
    stem = f"{name}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = workspace / stem, 1
    while path.exists():
        number += 1
        path = workspace / f"{stem}-{number}"
    return path


def check_free(run_dir: Path, *, replace: bool = False) -> None:
    """Raises `UsageError` if something is in the folder, unless that is a run and `replace` gives it up."""
    if replace and (run_dir / RECIPE).is_file():
        return
    with explain_errors(run_dir):
        if run_dir.exists() and not run_dir.is_dir():
            raise UsageError(f"{run_dir} is a file, and a run is a folder.", "Choose another folder with -o.")
        taken = run_dir.exists() and any(run_dir.iterdir())
    if taken:
        raise UsageError(f"{run_dir} exists already and is not empty.", "Choose another folder with -o.")


def create(run_dir: Path, *, replace: bool = False) -> None:
    """Make the folder, empty. Raises `UsageError` as `check_free` does."""
    check_free(run_dir, replace=replace)
    with explain_errors(run_dir):
        if replace and run_dir.exists():
            shutil.rmtree(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)


def model_of(path: Path) -> Path:
    """The model folder that `path` means: itself, or `model/` of a run folder. Raises `UsageError`."""
    if not path.is_dir():
        raise UsageError(f"There is no model folder {path}.", "`leansurgeon shrink SOURCE ... -o FOLDER` makes one.")
    if (path / "config.json").is_file():
        return path
    if (path / BEST / "config.json").is_file():
        return path / BEST
    raise unpacked.of_folder(path)


def newest_shrunk(workspace: Path) -> Path:
    """The folder below `workspace` with the youngest `surgery.json`; what a run or an experiment keeps for itself does
    not count.
    """
    records = [path for path in workspace.glob("**/surgery.json") if not _internal(path.parent, workspace)]
    if not records:
        raise UsageError(
            f"There is no shrunk model in {workspace}.",
            "`leansurgeon shrink SOURCE --heads .. --layers ..` makes one, or name the MODEL.",
        )
    return max(records, key=lambda path: (path.stat().st_mtime_ns, str(path))).parent


def _internal(folder: Path, workspace: Path) -> bool:
    """Whether this is a half-written folder, a trained copy in a run, or what an arm of an experiment starts from."""
    parts = folder.relative_to(workspace).parts
    return any(part.startswith(".") for part in parts) or STARTS in parts[:-1] or is_trained(folder)


def is_trained(folder: Path) -> bool:
    """Whether this model folder is what a training left, `model/` or `last/` of a run."""
    folder = Path(os.path.abspath(folder))  # `.` has no name
    return folder.name in (BEST, LAST) and (folder.parent / RECIPE).is_file()


def has_learned(model_dir: Path) -> bool:
    """Whether the weights know anything: what surgery started afresh does not, until it is trained."""
    made = record.read(Path(model_dir))
    return is_trained(model_dir) or made is None or made.learned


def display_name(model_dir: Path) -> str:
    """The name of a model's folder; of a run, whose model lies in a folder of its own, that of the run."""
    folder = Path(model_dir).resolve()
    return folder.parent.name if folder.name in (BEST, LAST) else folder.name


def find_run(model: str | Path) -> Path | None:
    """The run folder that MODEL names, itself or by a model in it; None for anything else."""
    folder = files.in_home(model)
    if is_trained(folder):
        return Path(os.path.abspath(folder)).parent if folder.name in ("", "..") else folder.parent
    return folder if (folder / RECIPE).is_file() and (folder / BEST / "config.json").is_file() else None


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file with this text, at once."""
    with explain_errors(path):
        write_durably(path, text)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON. NaN is refused: no other reader takes it."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def keep_beside(path: Path, value: Any, say: Say) -> None:
    """`write_json` of what was measured. Where it cannot be written that is said, and the measurement is not lost."""
    try:
        write_json(path, value)
    except (LeanSurgeonError, OSError, ValueError) as error:
        say(f"{path} was not written: {files.why(error) if isinstance(error, OSError) else error}")
    else:
        say(f"Kept as {path}.")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into an empty folder, and put it in the place of `path`.

    A crash leaves the old folder or the new one, whole; between two renames neither stands at `path`, and the old one
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
    """Rename a folder whose files are synced to `path`; what stood there goes when the new one is safe."""
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
        """How much has been written; `truncate` to it takes back what came later."""
        return self.path.stat().st_size if self.path.exists() else 0

    def truncate(self, size: int) -> None:
        """Forget what was written beyond `size` bytes, by a process that went on after its last checkpoint.

        A file that somebody has shortened loses the line that was cut.
        """
        with explain_errors(self.path), open(self.path, "a+b", opener=_no_link) as file:
            if self.bytes < size:
                file.seek(0)
                size = file.read().rfind(b"\n") + 1
            file.truncate(size)

    def sync(self) -> None:
        """Bring what was written to the disk, so that it is not shorter there than a checkpoint says."""
        if self.path.exists():
            with explain_errors(self.path):
                sync(self.path)

    def write(self, **record: Any) -> None:
        with explain_errors(self.path), open(self.path, "a", encoding="utf-8", opener=_no_link) as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def _no_link(path: str, flags: int) -> int:
    """Open a file that grows in place: in somebody else's run it may be a link to a file that nobody means."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


_NO_PLACE = (  # ENOENT: a folder such as /proc, in which nothing can be made
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
    *(errno.ENOENT, errno.ENOTSUP, errno.ENAMETOOLONG, errno.ELOOP),
)


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn what the file system says into one sentence. Raises `LeanSurgeonError` (exit code 1)."""
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

_held: set[int] = set()  # what this process has open by `hold`


def hold(run_dir: Path) -> int | None:
    """Mark the folder as being trained, until this process ends or closes the handle that is returned.

    Raises `UsageError` where another process holds it. None where the file system knows no locks.
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
    """In a process that was forked by one that holds a folder: give up the copies of its handles. With them the folder
    would be held as long as this process lives, which may be longer than its parent.
    """
    while _held:
        os.close(_held.pop())
