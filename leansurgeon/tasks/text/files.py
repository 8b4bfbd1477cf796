"""Find and read the texts that a recipe names: files, folders, globs, and the novel that comes with the package."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from leansurgeon.errors import UsageError
from leansurgeon.reading import files, tables
from leansurgeon.reading.files import in_home

LARGEST = 4_000_000_000  # bytes; a file is read at once
SUFFIXES = (".txt", ".text", ".md", ".rst")  # text files in a folder; a file that is named may have any suffix
PACKAGED = {"austen": Path(__file__).parent.parent / "data" / "persuasion.txt"}
PROSE = ("austen", str(PACKAGED["austen"].with_name("countries.txt")))  # a novel, and reports on countries


def find(names: str | Sequence[str]) -> list[Path]:
    """Return the files that these names refer to, each once, in order of the names and sorted within a folder or glob.

    Raises UsageError for a name without files.
    """
    unique = {}
    for name in [names] if isinstance(names, str) else names:
        path = in_home(name)
        if name in PACKAGED:
            paths = [PACKAGED[name]]
        elif path.is_dir():
            paths = in_folder(path)
            if not paths:
                endings = ", ".join(sorted({*SUFFIXES, *tables.SUFFIXES}))
                raise UsageError(
                    f"'{name}' is a folder without a file that ends in {endings}.",
                    f"A file that is named may have any extension: '{Path(name) / '*'}' names them all.",
                )
        else:
            found = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
            paths = list(filter(Path.is_file, found))
        if not paths:
            known = ", ".join(f"'{word}'" for word in PACKAGED)
            raise UsageError(f"No data file is called or matches '{name}'.", f"Packaged text: {known}.")
        unique.update(dict.fromkeys(paths))
    return list(unique)


def in_folder(folder: Path) -> list[Path]:
    """Return all text files and tables in and below a folder, sorted; hidden ones are omitted."""
    known = (*SUFFIXES, *tables.SUFFIXES)
    return [path for path in files.files_below(folder) if path.suffix.lower() in known]


def read(path: Path) -> str:
    """Read a UTF-8 file with normalised line ends. Raises UsageError if it is something else, or empty."""
    text = files.read_text(path, LARGEST, encoding="utf-8-sig")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UsageError(f"{path} holds no text.")
    return text


def cut_end(text: str, last: float) -> tuple[str, str]:
    """Split off the last part of about this fraction, after a line end if there is one."""
    at = len(text) - round(len(text) * last)
    newline = text.rfind("\n", 0, at)
    at = newline + 1 if newline >= 0 else at
    return text[:at], text[at:]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return names of files, with their folder if two have the same name."""
    alike = len({path.name for path in paths}) < len(paths)
    return [f"{path.parent.name}/{path.name}" if alike else path.name for path in paths]
