"""Write files and folders that are complete or absent, whatever ends the process: write aside, sync, rename.

A claim file `.NAME.writing` beside an output says who is writing it. Temporary files and folders carry their owner in
their name and are locked while in use, so that the next command that writes in the same folder can recognise and remove
what dead processes left. Locks are reliable where the file system supports them; elsewhere the process's number and
start time are used.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from hashlib import sha256
from pathlib import Path

from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.reading import jsonfile

# -- atomic renames of folders that refuse to replace, or that exchange two, where the system has them -------------

NEW, SWAP = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of Linux
_CURRENT = -100  # AT_FDCWD
_LACKING = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


@cache
def _system() -> Callable[[bytes, bytes, int], int] | None:
    """Return the system's own call as a function of two names and a flag; None if there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
        return lambda old, new, flag: call(_CURRENT, old, _CURRENT, new, ctypes.c_uint(flag))
    except (OSError, AttributeError, TypeError):
        return None


def _ask_system(old: Path, new: Path, flag: int) -> bool:
    """Return whether the system did the rename; False if it has no such call. Raises `OSError`."""
    call = _system()
    if call is None:
        return False
    if call(os.fsencode(old), os.fsencode(new), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _LACKING:
        return False
    raise OSError(number, os.strerror(number), str(old), None, str(new))


def rename_new(old: Path, new: Path) -> None:
    """Rename a folder to a free name. Raises `FileExistsError` if it is taken, even at the last moment."""
    if _ask_system(old, new, NEW):
        return
    os.mkdir(new)  # fails if the name is taken; a folder may be renamed to an empty one
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from None
        os.rmdir(new)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically; return False if the system cannot. Raises `OSError`."""
    return _ask_system(one, other, SWAP)


# -- who wrote an unfinished output, and whether that process is alive ---------------------------------------------
#
# A process is identified by its number, its start time and the kernel it runs on: numbers are reused, and a folder may
# be visible to several machines and containers. A process on another machine counts as alive, since nothing is known of
# it.

# The last part had four digits until 2026-11: 1 in 14 runs with a hundred folders in one process had a collision.
TAG = re.compile(r"-([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-(\d+)-(?:[0-9a-f]{4}|[0-9a-f]{16})$")


@dataclass(frozen=True)
class Owner:
    """A process. `host` and `boot` are eight hex digits that stand for the machine's name and its current boot."""

    host: str
    boot: str
    pid: int
    start: int  # in clock ticks since boot; 0 if unknown

    @property
    def tag(self) -> str:
        """A unique ending for the name of something that this process writes; `of_name` parses it."""
        return f"-{self.host}-{self.boot}-{self.pid}-{self.start}-{os.urandom(8).hex()}"

    @property
    def dead(self) -> bool:
        """Whether that process has certainly ended."""
        if self.boot != boot():
            return self.host == host()  # this machine, before its last reboot
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # belongs to another user
            pass
        return bool(self.start) and start_of_process(self.pid) not in (0, self.start)  # numbers are reused


def me() -> Owner:
    """Return this process."""
    return Owner(host(), boot(), os.getpid(), start_of_process(os.getpid()))


def of_name(name: str) -> Owner | None:
    """Return the process named in a leftover's name, None if there is none."""
    match = TAG.search(name)
    return Owner(match[1], match[2], int(match[3]), int(match[4])) if match else None


@cache
def host() -> str:
    """Eight hex digits of the hash of this machine's name."""
    return sha256(socket.gethostname().encode()).hexdigest()[:8]


@cache
def boot() -> str:
    """Return an id of the current boot, or of the machine's name if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:8]
    except OSError:
        return host()


def start_of_process(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if unknown."""
    try:
        # The program's name stands in parentheses and may contain anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


# -- a writer holds its name while it writes -----------------------------------------------------------------------

_held: set[tuple[Path, int, int]] = set()  # names with the process and thread that hold each


@contextmanager
def claim_name(path: Path) -> Iterator[None]:
    """Hold the name `path` while the block runs; a thread that holds it may claim it again.

    Raises `UsageError` with its holder if the name is taken, and `OSError` if nothing can be written beside it.
    """
    path = path.resolve()
    key = (path, os.getpid(), threading.get_ident())
    if key in _held:
        yield
        return
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.parent / f".{shorten_name(path.name)}.writing"
    handle = take_claim(file, path)
    _held.add(key)
    try:
        yield
    finally:
        _held.remove(key)
        with suppress(OSError):
            file.unlink()  # while locked, so that a waiting process sees a different file
        os.close(handle)
        with suppress(OSError):
            for folder in made:  # unless something was put there
                folder.rmdir()


def shorten_name(name: str) -> str:
    """Shorten a name to leave room for a prefix and suffix."""
    return os.fsdecode(os.fsencode(name)[:150])


def take_claim(file: Path, path: Path) -> int:
    """Return the handle of the locked claim file, with its owner written into it.

    Raises `UsageError` if another process holds it.
    """
    while True:
        # Links are not followed: their target would be truncated.
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            locked, said = lock(handle), jsonfile.read_object_if_whole(file) or {}
            owner = None  # stays None for a broken or empty claim
            with suppress(KeyError, TypeError, ValueError):
                owner = Owner(str(said["host"]), str(said["boot"]), int(said["pid"]), int(said["start"]))
            ours = owner is None or owner == me() or owner.dead or (locked and owner.boot == me().boot)
            if locked is False or not ours:
                who = f"process {said.get('pid', '?')} on {said.get('where', '?')}, since {said.get('since', '?')}"
                raise UsageError(
                    f"{path} is being written by another command: {who}.",
                    f"Wait for it, or choose another folder with -o. If it is long over, delete {file}.",
                )
            with suppress(FileNotFoundError):  # its holder has just released and deleted it
                if os.path.samestat(os.fstat(handle), os.stat(file)):
                    now = {"where": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(asdict(me()) | now).encode(), 0)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def lock(handle: int) -> bool | None:
    """Lock an open file or folder until it is closed; return False if another process holds it, None without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# -- temporary files and folders, and what killed processes leave of them ------------------------------------------

UNFINISHED, REPLACED, PART = ".unfinished", ".replaced", ".part"  # two folders, and a file
_KINDS = (UNFINISHED, REPLACED, PART)
SCRATCH = "leansurgeon-scratch"
_scratches: dict[Path, int] = {}


@contextmanager
def open_unfinished(path: Path) -> Iterator[Path]:
    """Create a folder beside `path` that is deleted at the end unless it was renamed. Raises `OSError`."""
    sweep(path.parent)
    aside = beside(path, UNFINISHED)
    aside.mkdir()
    with mark_in_use(aside):
        yield aside


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a folder in the system's temporary folder that lasts as long as the block."""
    where = Path(tempfile.gettempdir())
    sweep(where)
    folder = where / f"{SCRATCH}{me().tag}"
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise LeanSurgeonError(f"No temporary folder can be made in {where}: {error.strerror}.") from None
    _scratches[folder] = os.getpid()
    try:
        with mark_in_use(folder):
            yield folder
    finally:
        _scratches.pop(folder, None)


def passing(path: Path) -> bool:
    """Return whether `path` is in a scratch folder of this process, so that it need not be synced to disk."""
    return any(path.is_relative_to(folder) for folder in tuple(_scratches))  # other threads may add and remove some


@atexit.register
def _take_away() -> None:
    """Delete scratch folders that were kept for the whole process, but not those of a parent process."""
    for folder, owner in tuple(_scratches.items()):
        if owner == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def beside(path: Path, kind: str) -> Path:
    """Return a hidden name beside `path` that tells its kind and its owner."""
    return path.parent / f".{shorten_name(path.name)}{kind}{me().tag}"


def sweep(folder: Path) -> None:
    """Delete what dead processes left in `folder`; move back what one of them had moved out of the way."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            ours = entry.name.startswith(f"{SCRATCH}-") or any(kind in entry.name for kind in _KINDS)
            owner = of_name(entry.name) if ours else None
            if owner is None or not owner.dead:
                continue
            left, is_file = Path(entry.path), entry.is_file(follow_symlinks=False)
            # A link is not ours, and a lock means a live process whose number is not visible here.
            if not (is_file or entry.is_dir(follow_symlinks=False)) or in_use(left):
                continue
            if is_file:
                if PART in entry.name:
                    with suppress(OSError):
                        left.unlink()
                continue
            name = entry.name.partition(REPLACED)[0].removeprefix(".")
            if REPLACED in entry.name and shorten_name(name + "-") != name and not (folder / name).exists():
                with suppress(OSError):
                    rename_new(left, folder / name)
                continue
            shutil.rmtree(left, ignore_errors=True)


def in_use(folder: Path) -> bool:
    """Return whether another process holds a lock on the folder or file; False if locks are not supported."""
    handle, taken = take_lock(folder)
    if handle is not None:
        os.close(handle)
    return taken


@contextmanager
def mark_in_use(path: Path) -> Iterator[None]:
    """Lock a new folder or file while the block runs, then delete it unless it was renamed."""
    handle, _ = take_lock(path)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
        if path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def take_lock(folder: Path) -> tuple[int | None, bool]:
    """Lock a folder or file until the returned handle is closed; also return whether another process holds the lock.

    The handle is None if there are no locks or another process holds it.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None, False
    locked = lock(handle)
    if not locked:
        os.close(handle)
    return handle if locked else None, locked is False


# -- files ---------------------------------------------------------------------------------------------------------


def write_durably(path: Path, text: str) -> None:
    """Atomically replace `path` by a file with this text."""
    sweep(path.parent)
    aside = beside(path, PART)
    aside.touch(exist_ok=False)
    with mark_in_use(aside):
        aside.write_text(text, encoding="utf-8")
        sync(aside)
        os.replace(aside, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk, except in a scratch folder."""
    if passing(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush everything in a folder to disk, the folder itself last."""
    for file in folder.rglob("*"):
        sync(file)
    sync(folder)


def give_mode(folder: Path) -> None:
    """Give files the mode that the user's umask asks for; some libraries make weights readable by the owner only."""
    mode = 0o666 & ~umask()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def umask() -> int:
    """Return this process's umask, read without changing it, which other threads would notice."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
