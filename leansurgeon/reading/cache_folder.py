"""The folder for prepared data, inferred families and notes that are kept between calls."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from leansurgeon import progress


def cache_folder() -> Path:
    """Return `$LEANSURGEON_CACHE`, or the user's cache folder; if that is not writable, one in the temporary folder."""
    if given := os.environ.get("LEANSURGEON_CACHE"):
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return usable(Path(home) / "leansurgeon")


@cache
def usable(folder: Path) -> Path:
    """Return the folder, or if it is not writable, a temporary one of this user, which is reported once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        other = Path(tempfile.gettempdir()) / f"leansurgeon-cache-{os.getuid()}"
        other.mkdir(mode=0o700, exist_ok=True)
        if other.is_symlink() or other.stat().st_uid != os.getuid():  # somebody else created it
            other = Path(tempfile.mkdtemp(prefix="leansurgeon-cache-"))
        if progress.is_shown():
            why = error.strerror or type(error).__name__
            progress.say(
                f"{folder} cannot be written ({why}); the cache is in {other}. LEANSURGEON_CACHE chooses another."
            )
        return other
