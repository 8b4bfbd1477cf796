"""An output folder that is either absent or complete: everything is written aside, synced, and renamed at the end."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.publish.durable import (
    REPLACED,
    UNFINISHED,
    beside,
    claim_name,
    exchange,
    give_mode,
    open_unfinished,
    rename_new,
    sync,
    sync_tree,
)
from leansurgeon.checkpoints.record import read_if_whole
from leansurgeon.errors import LeanSurgeonError, UsageError, disk_is_full

# Errors of a write to an open file, besides a full disk.
WRITING = (errno.EFBIG, errno.EIO, errno.EROFS, errno.EPERM, errno.EACCES, errno.ESTALE)


@contextmanager
def output_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` if the block succeeds and is deleted if it does not.

    Raises `UsageError` if `path` exists without `force`, at the start or at the end, and if another process is writing
    it. With `force` the old folder is removed after the new one is complete.
    """
    with hold_output(path, force=force), ExitStack() as stack:
        path = path.resolve()  # a link is kept, and its target is written
        with making(path):
            aside = stack.enter_context(open_unfinished(path))
        try:
            yield aside
            give_mode(aside)
            sync_tree(aside)
            publish(aside, path, force=force)
        except LeanSurgeonError:
            raise
        except Exception as error:
            if disk_is_full(error):
                raise full(path) from None
            if reason := refusal(error, aside, path):
                raise LeanSurgeonError(
                    f"{path} cannot be written: {reason}.", "Choose another folder with -o."
                ) from error
            raise


@contextmanager
def hold_output(path: Path, *, force: bool = False) -> Iterator[None]:
    """Hold the name of an output while the block runs.

    Raises `UsageError` if it is not free or another process is writing it.
    """
    check_free(path, force=force)
    with ExitStack() as stack:
        with making(path):
            stack.enter_context(claim_name(path))
        yield


@contextmanager
def making(path: Path) -> Iterator[None]:
    """Turn system errors while something is made beside `path` into one sentence."""
    try:
        yield
    except OSError as error:
        if disk_is_full(error):
            raise full(path) from None
        raise UsageError(f"The folder {path} cannot be made: {error.strerror or error}.") from None


def full(path: Path) -> LeanSurgeonError:
    """Return the error for a full disk."""
    return LeanSurgeonError(
        f"The disk is full; nothing was written to {path}.", "Free some space or choose another -o."
    )


def refusal(error: Exception, *folders: Path) -> str | None:
    """Return why the system refused to write in `folders`; None for other errors, or errors about other files.

    safetensors raises its own class, which only quotes the system's error number.
    """
    quoted = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(quoted[1]) if quoted else None
    name = getattr(error, "filename", None)
    named = isinstance(name, str) and any(Path(name).is_relative_to(folder) for folder in folders)
    ours = named or (name is None and number in WRITING)
    return os.strerror(number) if number and ours else None


def check_free(path: Path, *, force: bool) -> None:
    """Raise `UsageError` before long work if `path` cannot be written.

    That is the case if it exists without `force`, is a file, holds files that are not ours, cannot be inspected, or its
    parent folder is not writable.
    """
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # raises for a name that is too long
        if path.exists() and not force:
            raise UsageError(f"{path} exists already.", "Use --force to replace it, or choose another folder with -o.")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file, not a folder.")
        above = next((folder for folder in path.absolute().parents if folder.exists()), path)  # "/" has no parent
        if not above.is_dir() or not os.access(above, os.W_OK):
            why = "cannot be written to" if above.is_dir() else "is a file"
            raise UsageError(f"The folder {path} cannot be made: {above} {why}.", "Choose another folder with -o.")
        if path.exists() and any(path.iterdir()) and (strange := not_ours(path)):
            raise holds(path, strange)
    except OSError as error:
        raise UsageError(f"The folder {path} cannot be used: {error.strerror or error}.") from None


def holds(path: Path, strange: str) -> UsageError:
    """Return the error for a folder with files that leansurgeon did not write."""
    return UsageError(
        f"{path} holds {strange}, which leansurgeon did not write there; --force will not delete it.",
        "Choose another folder with -o.",
    )


def not_ours(path: Path) -> str | None:
    """Return the first file of a folder that its surgery.json does not list as ours; None if all are listed."""
    made = read_if_whole(path)
    known = set(made.files) if made else set()
    names = sorted(str(f.relative_to(path)) for f in path.rglob("*") if not f.is_dir())
    return next((name for name in names if name not in known), None)


def check_apart(path: Path, source: Path | None) -> None:
    """Raise `UsageError` if the output overlaps the source folder; check the source's companion files too."""
    if source is None:
        return
    companions.find_companions(source)
    out, read = path.resolve(), source.resolve()
    if out == read or out in read.parents or read in out.parents:
        raise UsageError(f"The output {path} and the source {source} overlap.", "Choose another folder with -o.")


def publish(aside: Path, path: Path, *, force: bool) -> None:
    """Move the finished folder `aside` to `path` atomically.

    Raises `UsageError` if something was created there meanwhile, unless `force` replaces it.
    """
    try:
        rename_new(aside, path)
    except FileExistsError:
        if not force:
            raise UsageError(
                f"{path} was created by something else in the meantime; nothing was replaced.",
                "Use --force to replace it, or choose another folder with -o.",
            ) from None
        check_free(path, force=True)
        if exchange(aside, path):  # the creator of `aside` then deletes the old folder
            if strange := not_ours(aside):  # created since the check
                exchange(aside, path)
                raise holds(path, strange) from None
        else:
            old = beside(path, REPLACED)
            path.rename(old)
            try:
                rename_new(aside, path)
            except BaseException:
                rename_new(old, path)
                raise
            gone = beside(path, UNFINISHED)  # a name that marks it for deletion
            old.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    sync(path.parent)
