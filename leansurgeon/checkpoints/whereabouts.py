"""Remember the folder of a result's source in the user's cache, by digest: published records hold no paths."""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256 as hashed
from pathlib import Path

from leansurgeon.checkpoints.digests import sha256
from leansurgeon.checkpoints.publish.durable import write_durably
from leansurgeon.checkpoints.record import Origin
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.files import in_home, is_name


def remember(origin: Origin, folder: Path | None) -> None:
    """Store the folder of the model with these digests; ignore a cache that cannot be written."""
    if folder is None or not origin.sha256:
        return
    note = _note(origin)
    with suppress(OSError, UnicodeEncodeError):  # a folder name need not be valid text
        note.parent.mkdir(parents=True, exist_ok=True)
        write_durably(note, f"{folder.resolve()}\n")


def find(origin: Origin) -> Path | None:
    """Return the folder with exactly the weight files of `origin`: at its name, or where it was when it was cut."""
    places = [in_home(origin.name)] if origin.kind != "hub" else []
    with suppress(OSError, UnicodeDecodeError):
        places.append(Path(_note(origin).read_text(encoding="utf-8").rstrip("\n")))
    return next((folder for place in places if (folder := holding(place, origin))), None)


def holding(folder: Path, origin: Origin) -> Path | None:
    """Return the folder, or the model in a run folder, if its weight files have the recorded digests."""
    if not origin.sha256 or not all(map(is_name, origin.sha256)):
        return None
    for place in (folder, folder / "model"):
        with suppress(OSError):
            if all(sha256(place / name) == digest for name, digest in origin.sha256.items()):
                return place
    return None


def _note(origin: Origin) -> Path:
    key = hashed("\n".join(sorted(origin.sha256.values())).encode()).hexdigest()[:32]
    return cache_folder() / "sources" / key
