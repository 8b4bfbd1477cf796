"""Models and data in memory, as the folders and files that everything below takes.

A model is written to a temporary folder as its own library writes it, so that one in memory goes exactly the way of one
on the disk, its proof included. Texts become a file in the cache that is named by its content: the same texts are the
same file, so that what was prepared of them is found again and an interrupted training can go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leansurgeon.commands.results import RESULT, Folder
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.progress import quiet_transformers
from leansurgeon.reading import modelcard, names
from leansurgeon.reading.cache_folder import cache_folder

if TYPE_CHECKING:
    import torch

Labelled = tuple[str, str | int]
Data = (
    str
    | os.PathLike[str]
    | Sequence[str]
    | Sequence[os.PathLike[str]]
    | Sequence[Labelled]
    | Sequence[Mapping[str, Any]]
)
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def is_model(value: object) -> bool:
    """Whether this is a model in memory, without importing torch for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def place(value: object, what: str = "source") -> str:
    """The path or name that stands for a source on the disk or the hub: of a result, its folder.

    Raises `UsageError` for anything else.
    """
    folder = getattr(value, "folder", None)
    if isinstance(folder, Path):
        return str(folder)
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise UsageError(
        f"{what}={type(value).__name__}: give a preset, a folder, a hub id, a result of leansurgeon, or a model of "
        "transformers or timm."
    )


# -- models ----------------------------------------------------------------------------------------


class Copy:
    """The folder of a model in memory. It goes with the object, or with the process."""

    def __init__(self) -> None:
        from leansurgeon.checkpoints.publish.durable import scratch

        held = ExitStack()
        self.folder = held.enter_context(scratch())
        self.close = weakref.finalize(self, held.close)  # takes the folder away

    def __deepcopy__(self, memo: dict[int, Any]) -> Copy:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (Gone, ())


class Gone:
    """What is left of a `Copy` in another process: nothing, which nobody asks for there."""


def written(model: torch.nn.Module, tokenizer: object | None = None) -> Copy:
    """A model in memory in a folder of its own: weights and config as its library saves them; tokenizer and processor
    from `tokenizer`, from the folder that it came from, or from where its config says it was loaded; and its record,
    where it came from here.

    Raises `UnsupportedModel` for a model that is neither of transformers nor of timm.
    """
    from leansurgeon.checkpoints import record
    from leansurgeon.checkpoints.foreign import companions
    from leansurgeon.checkpoints.publish.card import adopt

    kept, made = Copy(), getattr(model, RESULT, None)
    folder = kept.folder / name_of(model)
    folder.mkdir()
    kept.folder = folder
    home, name = (made.folder, None) if made is not None else home_of(model)
    if home is not None:  # before what is in memory, which counts
        companions.copy(home, folder)
        adopt(home, folder, name)
    adapters = hasattr(model, "merge_and_unload")
    if hasattr(getattr(model, "config", None), "model_type") and hasattr(model, "save_pretrained") and not adapters:
        save_transformers(model, folder)
    elif isinstance(getattr(model, "pretrained_cfg", None), Mapping):
        from timm.models import save_for_hf

        # A timm model does not keep what its constructor was given: where that was more than the name, opening the
        # folder says that config and weights differ.
        save_for_hf(model, str(folder), safe_serialization=True)
    else:
        hint = "Merge its adapters first: model.merge_and_unload()." if adapters else "Save it, and give its folder."
        if type(model).__name__ in WRAPPERS:
            hint = "Give the model in it: model.module."
        raise UnsupportedModel(f"A {type(model).__name__} is neither a model of transformers nor of timm.", hint)
    if tokenizer is not None:
        reads = hasattr(tokenizer, "get_vocab")  # else a processor, of images alone or around a tokenizer
        old = () if reads else names.PROCESSOR
        old += (*names.TOKENIZER, *names.TEMPLATES) if reads or hasattr(tokenizer, "tokenizer") else ()
        companions.remove(folder, old)
        tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    if made is not None and made.record is not None:
        anew = made.record.initialised == record.FRESH and moved(model, made.folder)
        record.write(folder, made.record.trained() if anew else made.record)
    return kept


def moved(model: torch.nn.Module, folder: Path) -> bool:
    """Whether somebody trained a model since it was loaded from its folder; one that is gone cannot say no."""
    from leansurgeon.checkpoints.loading import load

    if not (folder / "config.json").is_file():
        return True
    before, now = load(str(folder)).state_dict(), model.state_dict()
    return any(not now[key].cpu().equal(value) for key, value in before.items() if key in now)


def save_transformers(model: torch.nn.Module, folder: Path) -> None:
    """As `save_pretrained` does; a class of ours with its modelling file, as all results have it."""
    if type(model).__module__.startswith("leansurgeon."):
        from leansurgeon import architectures
        from leansurgeon.checkpoints.model import save_model

        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        save_model(model, architectures.of(config), config, folder)
        return
    with quiet_transformers():
        model.save_pretrained(folder)


def name_of(model: torch.nn.Module) -> str:
    """A name for the folder: that of the place it was loaded from, else of its class."""
    said = str(getattr(getattr(model, "config", None), "name_or_path", "") or "").rstrip("/")
    last = said.split("/")[-1] or getattr(model, "default_cfg", {}).get("architecture") or type(model).__name__
    cleaned = "".join(c if c.isalnum() or c in "_.-" else "-" for c in last).strip("-.")
    return cleaned[:100] or "model"


def home_of(model: torch.nn.Module) -> tuple[Path | None, str | None]:
    """The folder that a model was loaded from, or that of the hub's cache with its name there, where tokenizer and card
    lie. Where there is none, whoever needs a tokenizer says so.
    """
    said = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    if said and os.path.isdir(said):
        return Path(said), modelcard.cached_name(Path(said))
    if not re.fullmatch(modelcard.NAME, said):
        return None, None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(said, "config.json")
    return (Path(cached).parent, said) if isinstance(cached, str) else (None, None)


def returned(result: Folder, source: torch.nn.Module) -> torch.nn.Module:
    """The model of a result, on the device of its source, which carries the result."""
    from leansurgeon.checkpoints.loading import load

    made = load(str(result.folder)).to(next(source.parameters()).device).train(source.training)
    setattr(made, RESULT, result)
    return made


# -- data ------------------------------------------------------------------------------------------


def data(value: Data | None, name: str = "data") -> str | None:
    """The data as the commands take it: a path or name as it is, paths (also strings that are all files) joined by
    commas; texts, pairs of text and label, and rows (mappings, a data set of `datasets`, a frame of pandas) as a file
    in the cache.

    Raises `UsageError` for anything else.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # iterating over a frame gives the names of its columns
        value = value.to_dict("records")
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        raise wrong(value, name)
    items = list(value)
    if not items:
        raise UsageError(f"{name} is empty.", "Give a path, or some texts.")
    words = [item for item in items if isinstance(item, str)]
    if len(words) == len(items) and all(len(word) < 1_000 and os.path.isfile(word) for word in words):
        return ",".join(words)
    if all(isinstance(item, Mapping) for item in items):
        return stored([dict(item) for item in items])
    if all(isinstance(item, os.PathLike) for item in items):
        return ",".join(os.fspath(item) for item in items)
    if all(isinstance(item, str) for item in items):
        return stored([{"text": item} for item in items])
    if all(isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) for item in items):
        return stored([{"text": item[0], "label": item[1]} for item in items])
    raise wrong(value, name)


def wrong(value: Data, name: str) -> UsageError:
    """The error for data of another kind."""
    return UsageError(
        f"{name}={type(value).__name__}: give a path, or a list of paths, of texts, of (text, label), or of rows.",
        "Images lie in a folder, with a folder for every class.",
    )


def stored(rows: list[dict[str, Any]]) -> str:
    """A file of the cache with these rows, one JSON object a line, named by their digest."""
    from leansurgeon.training.runs.folder import write_text

    try:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    except (TypeError, UnicodeEncodeError) as error:
        raise UsageError(f"The data cannot be written down: {error}.", "Labels are words or numbers.") from None
    file = cache_folder() / "given" / digest / "texts.jsonl"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    return str(file)
