"""Copy companion files (tokenizer, processor and the like) with the weights.

They come from a folder that somebody else may have made, and the copies are published. So only regular files of that
folder are taken: a link may lead to another file of the folder or, in a snapshot of the hub's cache, to the cache's own
copy of that model (`snapshots/REVISION/tokenizer.json -> ../../blobs/...`), and nowhere else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from leansurgeon.checkpoints.foreign import trust
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.reading import jsonfile, names
from leansurgeon.reading.files import is_name

NAMES = (*names.TOKENIZER, *names.TEMPLATES, *names.PROCESSOR, names.GENERATION, *names.SENTENCES, *names.TERMS)
# Files that determine how data becomes model input.
READING = (*names.TOKENIZER, *names.PROCESSOR)
MODULES, MODULE = "modules.json", ("config.json", "model.safetensors")  # sentence-transformers: one folder per module
LARGEST = 512_000_000  # bytes of one file; the largest tokenizers have some 40 million


def find_companions(source: Path, also: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the companion files in `source`. Raises `UnsupportedModel` for one that leads out of it."""
    # Modules that sentence-transformers puts after the encoder (pooling, dense layers), as named in modules.json. An
    # entry that is not a plain folder name is ignored.
    paths = [path for part in modules(source) if is_name(path := part.get("path"))]
    files = files_of(source, (*NAMES, *also, *(f"{path}/{name}" for path in paths for name in MODULE)))
    for name in files:
        refuse_elsewhere(source, name)
        if (size := (source / name).stat().st_size) > LARGEST:
            raise UnsupportedModel(
                f"{source / name} has {size:,} bytes, more than the {LARGEST:,} that such a file may have.",
                "Replace it with the right file, or remove it.",
            )
    return files


def files_of(folder: Path, wanted: Iterable[str]) -> list[str]:
    """Return which of these names and patterns are files of a folder, each once."""
    places = (sorted(folder.glob(name)) if "*" in name else [folder / name] for name in wanted)
    return list(dict.fromkeys(p.relative_to(folder).as_posix() for found in places for p in found if p.is_file()))


def modules(source: Path) -> list[jsonfile.JsonObject]:
    """Return the modules of sentence-transformers that a folder's modules.json lists."""
    try:
        said = jsonfile.read(source / MODULES) if (source / MODULES).is_file() else []
    except UsageError:
        return []  # copied as it is; not ours to judge
    return [part for part in said if isinstance(part, dict)] if isinstance(said, list) else []


def is_embedder(source: Path) -> bool:
    """Return whether modules.json pools the model's hidden states (SPLADE pools logits, in another class)."""
    return any(str(part.get("type")).rpartition(".")[2] == "Pooling" for part in modules(source))


def copy(source: Path, target: Path, also: tuple[str, ...] = ()) -> list[str]:
    """Copy the companion files and return their names. Raises the errors of `find_companions`."""
    copied = find_companions(source, also)
    for name in copied:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        # The config of a tokenizer or processor is written without classes whose code is not copied. One that cannot be
        # read is not ours to judge.
        said = jsonfile.read_object_if_whole(source / name) if name.endswith("_config.json") else None
        if (kept := trust.as_written(said)) != said:
            (target / name).write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(source / name, target / name)
    return copied


def remove(folder: Path, wanted: Iterable[str]) -> None:
    """Remove files that others will replace."""
    for name in files_of(folder, wanted):
        (folder / name).unlink()


def refuse_elsewhere(source: Path, name: str) -> None:
    """Raise `UnsupportedModel` if a file to be copied is a link out of the model's folder (or its hub cache)."""
    home, real = source.resolve(), (source / name).resolve()
    places = [home]
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        places.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in places):
        raise UnsupportedModel(
            f"{source / name} is a link to {real}, outside this model, and would be copied into the result.",
            "Replace the link with a copy of the file, or remove it.",
        )
