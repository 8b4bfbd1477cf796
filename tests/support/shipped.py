"""`python -m tests.support.shipped`: list the modelling files that earlier versions shipped, from git's history.

Run it when a file in leansurgeon/models/ has changed on the main branch, so that results of the version before it go on
being taken for what they are. Today's files need no list: they are compared with themselves.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ROOM = "leansurgeon/models"
LIST = ROOT / "leansurgeon" / "checkpoints" / "foreign" / "shipped.json"


def versions() -> dict[str, list[str]]:
    """SHA-256 of every version that git knows of every modelling file that travels."""
    found: dict[str, set[str]] = {}
    for line in git("log", "--format=", "--raw", "--no-abbrev", "--no-renames", "HEAD", "--", ROOM).splitlines():
        meta, name = line.split("\t")
        blob, name = meta.split()[3], Path(name).name
        if name.endswith(".py") and not name.startswith(("timm_", "__")) and blob.strip("0"):
            found.setdefault(name, set()).add(hashlib.sha256(content(blob)).hexdigest())
    return {name: sorted(digests) for name, digests in sorted(found.items())}


def content(blob: str) -> bytes:
    return subprocess.run(["git", "cat-file", "blob", blob], cwd=ROOT, check=True, capture_output=True).stdout


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    LIST.write_text(json.dumps(versions(), indent=1) + "\n")
