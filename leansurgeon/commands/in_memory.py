"""Models, data and results in memory: write them to the folders and files that commands take, and return results as
Python objects. Printing a result shows what the command prints; `as_dict()` is the document of its --json.

A model is written to a temporary folder by its own library, so that it takes the same path as one on disk, verification
included. Texts become a cache file named by its content: the same texts give the same file, so that prepared data is
found again and an interrupted training can resume.
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
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leansurgeon.commands.host import public
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.progress import quiet_transformers
from leansurgeon.reading import modelcard, names
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.jsonfile import JsonObject

RESULT = "leansurgeon"  # a model's attribute that holds its `Cut` or `Trained`

if TYPE_CHECKING:
    import torch

    from leansurgeon.checkpoints.record import PlanRecord, Proof, SurgeryRecord
    from leansurgeon.shape import Shape
    from leansurgeon.training.runs.summary import Summary


class Folder:
    """A folder that `load` and plain transformers or timm can load."""

    folder: Path

    @cached_property
    @public
    def model(self) -> torch.nn.Module:
        """The model, loaded once; `model.leansurgeon` is this result."""
        from leansurgeon.checkpoints.loading import load

        made = load(str(self.folder))
        setattr(made, RESULT, self)
        return made

    @public
    def push_to_hub(self, repo: str, *, private: bool = True, force: bool = False, token: str | None = None) -> str:
        """Push the folder to the repository `org/name` on the hub, private if it is new; return its address.

        `force` replaces another model in that repository; text and metadata of its card are kept. Raises `UsageError`
        without a token or for a repository of another model, and `errors.NotPushed` if the hub refuses: the folder
        stays.
        """
        from leansurgeon.commands.push import push

        return push(self.folder, repo, private=private, force=force, token=token)


@dataclass(frozen=True)
class Cut(Folder):
    """A model that was cut: its `folder`, and the `record` in its surgery.json."""

    folder: Path
    record: SurgeryRecord = field(repr=False)
    document: JsonObject = field(repr=False)
    text: str = field(default="", repr=False)
    held: tuple[object, ...] = field(default=(), repr=False, compare=False)  # folders of models in memory

    @property
    def proof(self) -> Proof | None:
        """The verification of the result in a fresh process; None if it was not requested."""
        return self.record.proof

    @property
    def plan(self) -> PlanRecord:
        """The plan that was carried out: operators, shapes, parameters."""
        return self.record.plan

    @property
    def before(self) -> Shape | None:
        """Layers, heads, head_dim and MLP of the source."""
        return self.record.plan.before

    @property
    def after(self) -> Shape | None:
        """The same of the result."""
        return self.record.plan.after

    @property
    def parameters(self) -> int | None:
        """Parameters of the result; None if its record does not say."""
        return self.record.plan.parameters_after.get("total")

    def as_dict(self) -> JsonObject:
        """Return what --json prints."""
        return self.document

    def __str__(self) -> str:
        if self.text:
            return self.text
        before, after = self.record.plan.parameters_before.get("total"), self.parameters
        known = f" with {after:,} of {before:,} parameters" if before is not None and after is not None else ""
        return f"{self.folder}: {self.record.source.name}{known}"


@dataclass(frozen=True)
class Trained(Folder):
    """A training: `run` is its folder, `folder` the best model in it, `summary` its results."""

    run: Path
    folder: Path
    summary: Summary = field(repr=False)
    held: tuple[object, ...] = field(default=(), repr=False, compare=False)

    @property
    def record(self) -> SurgeryRecord | None:
        """The surgery before the training; None if there was none."""
        from leansurgeon.checkpoints import record

        return record.read_if_whole(self.folder)

    @property
    def before(self) -> float | None:
        """The task's metric before the training."""
        return self.summary.before and self.summary.before.metric

    @property
    def after(self) -> float | None:
        """The task's metric of the best model."""
        best = self.summary.best or self.summary.final
        return best and best.metric

    def as_dict(self) -> JsonObject:
        """Return what --json prints."""
        return self.summary.as_dict()

    def __str__(self) -> str:
        return str(self.run)


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
    """Return whether this is a model in memory, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def place(value: object, what: str = "source") -> str:
    """Return the path or name of a source on disk or on the hub; for a result, its folder.

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
    """The folder of a model in memory. It is deleted with the object, or with the process."""

    def __init__(self) -> None:
        from leansurgeon.checkpoints.publish.durable import scratch

        held = ExitStack()
        self.folder = held.enter_context(scratch())
        self.close = weakref.finalize(self, held.close)  # deletes the folder

    def __deepcopy__(self, memo: dict[int, Any]) -> Copy:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (object, ())  # another process does not need it


def write_copy(model: torch.nn.Module, tokenizer: object | None = None) -> Copy:
    """Write a model in memory to its own folder: weights and config as its library saves them, and its record if
    leansurgeon made it.

    Tokenizer and processor come from `tokenizer`, from the folder of its result, or from where its config says it was
    loaded. Raises `UnsupportedModel` for a model that is neither of transformers nor of timm.
    """
    from leansurgeon.checkpoints import record
    from leansurgeon.checkpoints.foreign import companions
    from leansurgeon.checkpoints.publish.card import adopt

    kept, made = Copy(), getattr(model, RESULT, None)
    said = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    last = said.rstrip("/").split("/")[-1] or getattr(model, "default_cfg", {}).get("architecture")
    cleaned = "".join(c if c.isalnum() or c in "_.-" else "-" for c in last or type(model).__name__).strip("-.")
    folder = kept.folder / (cleaned[:100] or "model")
    folder.mkdir()
    kept.folder = folder
    home, name = (made.folder, None) if made is not None else home_of(said)
    if home is not None:  # first, so that what is in memory replaces it
        companions.copy(home, folder)
        adopt(home, folder, name)
    adapters = hasattr(model, "merge_and_unload")
    if hasattr(getattr(model, "config", None), "model_type") and hasattr(model, "save_pretrained") and not adapters:
        if type(model).__module__.startswith("leansurgeon."):  # it comes with its modelling file, as all results do
            from leansurgeon import architectures
            from leansurgeon.checkpoints.model import save_model

            config = model.config.to_dict() | {"architectures": [type(model).__name__]}
            save_model(model, architectures.of(config), config, folder)
        else:
            with quiet_transformers():
                model.save_pretrained(folder)
    elif isinstance(getattr(model, "pretrained_cfg", None), Mapping):
        from timm.models import save_for_hf

        # A timm model does not keep its constructor's arguments. If there were more than the name, opening the folder
        # reports that config and weights differ.
        save_for_hf(model, str(folder), safe_serialization=True)
    else:
        hint = "Merge its adapters first: model.merge_and_unload()." if adapters else "Save it, and give its folder."
        if type(model).__name__ in WRAPPERS:
            hint = "Give the model in it: model.module."
        raise UnsupportedModel(f"A {type(model).__name__} is neither a model of transformers nor of timm.", hint)
    if tokenizer is not None:
        reads = hasattr(tokenizer, "get_vocab")  # else a processor, for images alone or with a tokenizer
        old = () if reads else names.PROCESSOR
        old += (*names.TOKENIZER, *names.TEMPLATES) if reads or hasattr(tokenizer, "tokenizer") else ()
        companions.remove(folder, old)
        tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    if made is not None and made.record is not None:
        anew = made.record.initialised == record.FRESH and was_trained(model, made.folder)
        record.write(folder, made.record.as_trained() if anew else made.record)
    return kept


def was_trained(model: torch.nn.Module, folder: Path) -> bool:
    """Return whether a model was trained since it was loaded from its folder; True if the folder is gone."""
    from leansurgeon.checkpoints.loading import load

    if not (folder / "config.json").is_file():
        return True
    before, now = load(str(folder)).state_dict(), model.state_dict()
    return any(not now[key].cpu().equal(value) for key, value in before.items() if key in now)


def home_of(said: str) -> tuple[Path | None, str | None]:
    """Return the folder that a model says it was loaded from, or that of the hub's cache and its name there: it holds
    tokenizer and card. (None, None) if there is none.
    """
    if said and os.path.isdir(said):
        return Path(said), modelcard.hub_name_of_cache(Path(said))
    if not re.fullmatch(modelcard.NAME, said):
        return None, None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(said, "config.json")
    return (Path(cached).parent, said) if isinstance(cached, str) else (None, None)


def load_result(result: Folder, source: torch.nn.Module) -> torch.nn.Module:
    """Load the model of a result on the device of its source; the model carries the result."""
    from leansurgeon.checkpoints.loading import load

    made = load(str(result.folder)).to(next(source.parameters()).device).train(source.training)
    setattr(made, RESULT, result)
    return made


# -- data ------------------------------------------------------------------------------------------


def data(value: Data | None, name: str = "data") -> str | None:
    """Return data in the form that commands take.

    A path or name stays; paths (also strings that are all files) are joined by commas; texts, (text, label) pairs and
    rows (mappings, a data set of `datasets`, a pandas frame) become a file in the cache. Raises `UsageError` for
    anything else.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # iterating over a frame gives its column names
        value = value.to_dict("records")
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
        items = list(value)
        if not items:
            raise UsageError(f"{name} is empty.", "Give a path, or some texts.")
        if all(isinstance(item, Mapping) for item in items):
            return store_rows([dict(item) for item in items])
        if all(isinstance(item, os.PathLike) for item in items):
            return ",".join(os.fspath(item) for item in items)
        if all(isinstance(item, str) for item in items):
            if all(len(item) < 1_000 and os.path.isfile(item) for item in items):
                return ",".join(items)
            return store_rows([{"text": item} for item in items])
        if all(isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) for item in items):
            return store_rows([{"text": item[0], "label": item[1]} for item in items])
    raise UsageError(
        f"{name}={type(value).__name__}: give a path, or a list of paths, of texts, of (text, label), or of rows.",
        "Images lie in a folder, with a folder for every class.",
    )


def store_rows(rows: list[dict[str, Any]]) -> str:
    """Write the rows to a cache file named by their digest, one JSON object per line, and return its path."""
    from leansurgeon.training.runs.folder import write_text

    try:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    except (TypeError, UnicodeEncodeError) as error:
        raise UsageError(f"The data cannot be saved: {error}.", "Labels are words or numbers.") from None
    file = cache_folder() / "given" / digest / "texts.jsonl"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    return str(file)
