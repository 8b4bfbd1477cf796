"""Decide whose code runs.

A checkpoint is data: modelling files of this package are loaded from the package, those of transformers and timm from
there, and code that comes with a checkpoint runs only if --trust-remote-code allows it for one command.

A checkpoint can ask for classes of its own (`auto_map`) and for kernels of the hub (`attn_implementation`). If a
library knows the model_type, `auto_map` is ignored. Our own results name their modelling file in `auto_map`; such a
file is trusted if it matches, byte for byte, one that some version of this package shipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.digests import digest
from leansurgeon.checkpoints.foreign import unpacked
from leansurgeon.errors import UnsupportedModel, quote
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import Json

FLAG = "--trust-remote-code"
ALLOWED = "LEANSURGEON_TRUST_REMOTE_CODE"  # passes the permission on to child processes
# Config keys that name code for transformers to fetch. In a result they would name a file that is not there.
CODE_KEYS = ("auto_map", "custom_pipelines")
KERNELS = ("attn_implementation", "experts_implementation")
# Arguments of timm.create_model other than a model's own: files that it unpickles, weights that it fetches.
LOADERS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
# Makes transformers load a file named in the config instead of the weights that surgery reads. If peft is installed, it
# also loads adapters beside them, which may be a pickle.
WEIGHTS_KEY = "transformers_weights"
# Files whose code transformers runs once remote code is allowed, whatever config.json names.
GENERATION = "custom_generate"
BESIDE = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def allow(value: bool) -> None:
    """Set whether code of checkpoints may run in this process and its child processes."""
    if value:
        os.environ[ALLOWED] = "1"
    else:
        os.environ.pop(ALLOWED, None)


def is_allowed() -> bool:
    """Return whether code that came with a model may run."""
    return os.environ.get(ALLOWED) == "1"


def judge_code(architecture: Architecture, config: Config, folder: Path) -> Architecture:
    """Return the family of a checkpoint folder; its `code` is the folder if the checkpoint's own code may run.

    Raises `UnsupportedModel` if the checkpoint needs code that is not ours and that the user has not allowed.
    """
    named = list_code_modules(config)
    if architecture.library != "leansurgeon" or not named:
        return architecture  # the library's own class, or ours from the package
    files = {f"{module}.py" for module in named}
    strange = sorted(files - {architecture.modelling, *earlier()})
    changed = sorted(name for name in files if (folder / name).exists() and not is_shipped(folder / name))
    if not strange and not changed:
        return architecture
    what = strange[0] if strange else f"{changed[0]}, and that is not the file that leansurgeon ships"
    if not is_allowed():
        raise UnsupportedModel(
            f"Loading {folder} would run code that comes with it: config.json names {what}.",
            f"If you have read the code and trust it, add {FLAG}; or remove auto_map from config.json.",
        )
    return replace(architecture, code=folder)


def list_code_modules(config: Config) -> set[str]:
    """Return the modules that `auto_map` names; for a hub repository in the form `org/name--module`."""
    values = (config.get("auto_map") or {}).values()
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    return {str(item).rpartition(".")[0] or str(item) for item in flat if item is not None}


def brings_code(folder: Path) -> bool:
    """Return whether a folder has code that a library would run besides what config.json names.

    That is a custom generation loop, or classes that the configs of tokenizers and processors name.
    """
    named = (folder / name for name in BESIDE)
    return os.path.lexists(folder / GENERATION) or any(
        file.is_file() and "auto_map" in jsonfile.read_object(file) for file in named
    )


def refuse_kernels(config: Config, folder: Path) -> None:
    """Raise `UnsupportedModel` if transformers would fetch an implementation from the hub and run it."""
    for key, value in walk(config):
        if key.strip("_").removesuffix("_internal") in KERNELS and isinstance(value, str) and "/" in value:
            raise UnsupportedModel(
                f"Loading {folder} would run code from the hub: config.json says {key} = {value!r}.",
                f"Remove the key from config.json; or, if you trust it, add {FLAG}.",
            )


def refuse_loaders(config: Config, folder: Path) -> None:
    """Raise `UnsupportedModel` if a library would load other weights than the safetensors files that surgery reads.

    That is the case for a timm config that names a file (some versions run code from a pickle there), a transformers
    config that does so, and an adapter.
    """
    if os.path.lexists(folder / unpacked.ADAPTER):
        raise UnsupportedModel(
            f"{folder} holds an adapter ({unpacked.ADAPTER}), which transformers would put on top of the weights.",
            f"{unpacked.merging(folder)}\nOr take {unpacked.ADAPTER} away.",
        )
    if named := config.get(WEIGHTS_KEY):
        raise UnsupportedModel(
            f"{folder} would load weights other than its own: config.json says {WEIGHTS_KEY} = {quote(named)}.",
            "Remove the key from config.json, and name the file model.safetensors.",
        )
    args = config.get("model_args")
    loader = next((key for key in LOADERS if isinstance(args, Mapping) and args.get(key)), None)
    if loader:
        raise UnsupportedModel(
            f"{folder} would load weights other than its own: config.json says model_args.{loader} = "
            f"{quote(args[loader])}.",
            "Remove the key from config.json.",
        )


def walk(config: Json) -> Iterator[tuple[str, Json]]:
    """Yield every key of nested objects and lists with each value directly below it."""
    for item in config if isinstance(config, list | tuple) else ():
        yield from walk(item)
    for key, value in config.items() if isinstance(config, Mapping) else ():
        yield from walk(value)
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        yield from ((str(key), item) for item in inner)


# -- what we ship ----------------------------------------------------------------------------------


def find_shipped_file(name: str) -> Path:
    """Return the path of one of our modelling files."""
    return Path(str(files("leansurgeon.models") / name))


@cache
def earlier() -> Mapping[str, list[str]]:
    """SHA-256 digests of modelling files of earlier versions, by file name; written by `tests/support/shipped.py`."""
    return jsonfile.read_object(Path(__file__).with_name("shipped.json"))


def is_shipped(file: Path) -> bool:
    """Return whether a file is, byte for byte, one that this version or a listed earlier one ships."""
    if not file.is_file():
        return False
    own, seen = find_shipped_file(file.name), digest(file)
    return seen in earlier().get(file.name, ()) or (own.is_file() and seen == digest(own))


# -- code that the user trusts ---------------------------------------------------------------------


def code_files(folder: Path, config: Config) -> list[Path]:
    """Return the files that a trusted folder's classes need: modules of `auto_map` and their relative imports."""
    from transformers.dynamic_module_utils import get_relative_import_files

    needed = {}
    for module in sorted(list_code_modules(config)):
        file = folder / f"{module}.py"
        if "--" not in module and file.is_file():
            needed[file] = None
            needed |= dict.fromkeys(Path(name) for name in get_relative_import_files(file))
    return list(needed)


def load_trusted_class(folder: Path, config: Config, name: str) -> type | None:
    """Return the class `name` from a trusted folder's code, None if its `auto_map` lacks it. Runs that code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    values = [value for value in (config.get("auto_map") or {}).values() if isinstance(value, str)]
    full = next((value for value in values if value.endswith("." + name)), None)
    return get_class_from_dynamic_module(full, folder) if full else None


def as_written(config: Json) -> Any:
    """Return a config without the keys that name code, in nested configs (`text_config`) too."""
    if isinstance(config, list):
        return [as_written(item) for item in config]
    if not isinstance(config, Mapping):
        return config
    return {key: as_written(value) for key, value in config.items() if key not in CODE_KEYS}


def with_known_classes(config: Config, architecture: Architecture) -> Config:
    """Return a config that names only classes of transformers.

    A class that exists only in the checkpoint's own code is replaced by the library's class of the same model_type and
    task.
    """
    remote, names = config.get("auto_map"), config.get("architectures")
    if architecture.library != "transformers" or not remote or not names:
        return config
    import transformers

    known = []
    for name in names:
        auto = next((key for key, value in remote.items() if str(value).endswith(f".{name}")), "")
        if not hasattr(transformers, name) and hasattr(transformers, auto):
            mapping = getattr(getattr(transformers, auto), "_model_mapping", None)
            found = getattr(mapping, "_model_mapping", {}).get(config["model_type"], name)
            name = found if isinstance(found, str) else found[0]
        known.append(name)
    return config | {"architectures": known}
