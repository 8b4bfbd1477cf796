"""Whose code runs. A checkpoint is data: the modelling files of this package are taken from the package, those of
transformers and timm from there, and nothing that comes with a checkpoint is executed unless --trust-remote-code says
so for one command.

What a checkpoint can ask for: classes of its own (`auto_map`), and kernels of the hub (`attn_implementation`). Beside
a model_type that a library knows, an `auto_map` is passed over. A result of ours names its modelling file there; it is
one of ours while it is byte for byte what a version of this package shipped.
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
ALLOWED = "LEANSURGEON_TRUST_REMOTE_CODE"  # how a command tells the processes that it starts
# Config keys that name code for transformers to fetch, or a file that is not there for others to look for.
CODE_KEYS = ("auto_map", "custom_pipelines")
KERNELS = ("attn_implementation", "experts_implementation")
# What timm.create_model takes beside a model's own arguments: files that it unpickles, weights that it fetches.
LOADERS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
# What transformers loads in the place of the weights that surgery reads: a file named in the config, and, where peft is
# installed, adapters beside them, which may be a pickle.
WEIGHTS_KEY = "transformers_weights"
# What transformers runs of a folder that it may run code of, whatever config.json names.
GENERATION = "custom_generate"
BESIDE = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def allow(value: bool) -> None:
    """Say whether code of checkpoints may run in this process and in those that it starts."""
    if value:
        os.environ[ALLOWED] = "1"
    else:
        os.environ.pop(ALLOWED, None)


def is_allowed() -> bool:
    """Whether the environment permits code that came with a model."""
    return os.environ.get(ALLOWED) == "1"


def judge_code(architecture: Architecture, config: Config, folder: Path) -> Architecture:
    """The family of a checkpoint folder, with the folder as its `code` where that runs because the user allowed it.

    Raises `UnsupportedModel` where the checkpoint asks for code that is not ours and nobody allowed it.
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
            f"{folder} wants to run code of its own: config.json names {what}.",
            f"If you have read it and trust it, {FLAG} runs it; or take auto_map out of config.json.",
        )
    return replace(architecture, code=folder)


def list_code_modules(config: Config) -> set[str]:
    """Modules that `auto_map` names, a repository of the hub before them (`org/name--module`)."""
    values = (config.get("auto_map") or {}).values()
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    return {str(item).rpartition(".")[0] or str(item) for item in flat if item is not None}


def brings_code(folder: Path) -> bool:
    """Whether a library that may run code finds some beside what config.json names: a loop of generation, or classes
    that the configs of tokenizers and processors name.
    """
    named = (folder / name for name in BESIDE)
    return os.path.lexists(folder / GENERATION) or any(
        file.is_file() and "auto_map" in jsonfile.read_object(file) for file in named
    )


def refuse_kernels(config: Config, folder: Path) -> None:
    """Raises `UnsupportedModel` where transformers would fetch an implementation from the hub and run it."""
    for key, value in walk(config):
        if key.strip("_").removesuffix("_internal") in KERNELS and isinstance(value, str) and "/" in value:
            raise UnsupportedModel(
                f"{folder} wants to run code of the hub: config.json says {key} = {value!r}.",
                f"Take the key out of config.json; or, if you trust it, add {FLAG}.",
            )


def refuse_loaders(config: Config, folder: Path) -> None:
    """Raises `UnsupportedModel` where a library would load other weights than the safetensors files beside config.json,
    which are what surgery reads: a timm config that names a file (some versions run what a pickle there says), a
    transformers config that does so, an adapter.
    """
    if os.path.lexists(folder / unpacked.ADAPTER):
        raise UnsupportedModel(
            f"{folder} holds an adapter ({unpacked.ADAPTER}), which transformers would put on top of the weights.",
            f"{unpacked.merging(folder)}\nOr take {unpacked.ADAPTER} away.",
        )
    if named := config.get(WEIGHTS_KEY):
        raise UnsupportedModel(
            f"{folder} wants to load other weights than its own: config.json says {WEIGHTS_KEY} = {quote(named)}.",
            "Take the key out of config.json, and name the file model.safetensors.",
        )
    args = config.get("model_args")
    loader = next((key for key in LOADERS if isinstance(args, Mapping) and args.get(key)), None)
    if loader:
        raise UnsupportedModel(
            f"{folder} wants to load other weights than its own: config.json says model_args.{loader} = "
            f"{quote(args[loader])}.",
            "Take the key out of config.json.",
        )


def walk(config: Json) -> Iterator[tuple[str, Json]]:
    """Every key of nested objects, in lists too, with each text right below it."""
    for item in config if isinstance(config, list | tuple) else ():
        yield from walk(item)
    for key, value in config.items() if isinstance(config, Mapping) else ():
        yield from walk(value)
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        yield from ((str(key), item) for item in inner)


# -- what we ship ----------------------------------------------------------------------------------


def find_shipped_file(name: str) -> Path:
    """The path of one of our modelling files."""
    return Path(str(files("leansurgeon.models") / name))


@cache
def earlier() -> Mapping[str, list[str]]:
    """SHA-256 of modelling files that earlier versions shipped, by name; `tests/support/shipped.py` writes the list."""
    return jsonfile.read_object(Path(__file__).with_name("shipped.json"))


def is_shipped(file: Path) -> bool:
    """Whether a file is byte for byte one that this version of the package or a listed earlier one ships."""
    if not file.is_file():
        return False
    own, seen = find_shipped_file(file.name), digest(file)
    return seen in earlier().get(file.name, ()) or (own.is_file() and seen == digest(own))


# -- code that the user trusts ---------------------------------------------------------------------


def code_files(folder: Path, config: Config) -> list[Path]:
    """The files of a trusted folder that its classes need: modules of `auto_map` and what they import beside them."""
    from transformers.dynamic_module_utils import get_relative_import_files

    needed = {}
    for module in sorted(list_code_modules(config)):
        file = folder / f"{module}.py"
        if "--" not in module and file.is_file():
            needed[file] = None
            needed |= dict.fromkeys(Path(name) for name in get_relative_import_files(file))
    return list(needed)


def load_trusted_class(folder: Path, config: Config, name: str) -> type | None:
    """The class `name` of a trusted folder's own code; None where its `auto_map` has none. Runs that code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    values = [value for value in (config.get("auto_map") or {}).values() if isinstance(value, str)]
    full = next((value for value in values if value.endswith("." + name)), None)
    return get_class_from_dynamic_module(full, folder) if full else None


def as_written(config: Json) -> Any:
    """A config without what names code, in its sections (`text_config`) too."""
    if isinstance(config, list):
        return [as_written(item) for item in config]
    if not isinstance(config, Mapping):
        return config
    return {key: as_written(value) for key, value in config.items() if key not in CODE_KEYS}


def with_known_classes(config: Config, architecture: Architecture) -> Config:
    """A config whose classes transformers has: one that only the checkpoint's own code has stands for the library's
    class of the same model_type and task.
    """
    remote, names = config.get("auto_map"), config.get("architectures")
    if architecture.library != "transformers" or not remote or not names:
        return config
    import transformers

    def library_class_name(name: str) -> str:
        """The library's own class for a class of remote code, or the name itself where there is none."""
        auto = next((key for key, value in remote.items() if str(value).endswith(f".{name}")), "")
        if hasattr(transformers, name) or not hasattr(transformers, auto):
            return name
        mapping = getattr(getattr(transformers, auto), "_model_mapping", None)
        class_name = getattr(mapping, "_model_mapping", {}).get(config["model_type"], name)
        return class_name if isinstance(class_name, str) else class_name[0]

    return config | {"architectures": [library_class_name(name) for name in names]}
