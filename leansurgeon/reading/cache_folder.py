"""The folder for prepared data, inferred families and notes that are kept between calls."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$LEANSURGEON_CACHE`, or the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("LEANSURGEON_CACHE") or Path(home) / "leansurgeon")
