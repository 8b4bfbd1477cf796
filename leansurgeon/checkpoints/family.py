"""Write what a folder needs besides tensors: a config of the right family and, if needed, the modelling file."""

from __future__ import annotations

import ast
import json
import shutil
from copy import deepcopy
from pathlib import Path

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.foreign import trust
from leansurgeon.checkpoints.places import without_place
from leansurgeon.errors import UnsupportedModel


def convert_config(config: Config, source: Architecture, target: Architecture) -> Config:
    """Return a copy of `config` as a config of `target`, the source's family or its decoupled form.

    Raises `UnsupportedModel` if the target has no such class or does not support a flag of the config.
    """
    config = deepcopy(config)
    if source.name == target.name:
        return config
    if target.library == "timm":
        config["architecture"] = target.model_types[0]
        return target.adopt(config) if target.adopt else config
    config["model_type"] = target.model_types[0]
    classes = config.get("architectures") or []
    unknown = [c for c in classes if c not in target.classes]
    if unknown:
        raise UnsupportedModel(
            f"{unknown[0]} has no form with a head_dim of its own; there is one of {', '.join(target.classes)}.",
            "Use --head-dim split.",
        )
    flag = next((flag for flag in target.unknown if config.get(flag)), None)
    if flag:
        raise UnsupportedModel(
            f"This model's config sets {flag}, which {source.name} with a head_dim of its own does not know.",
            "Use --head-dim split.",
        )
    config["architectures"] = [target.classes[c] for c in classes]
    if target.adopt:
        return target.adopt(config) | {"architectures": config["architectures"]}
    return config


def write_config(folder: Path, config: Config, architecture: Architecture) -> None:
    """Write config.json and, if the family needs it, the modelling file with its `auto_map`.

    If the user allowed the checkpoint's own code, that code is written instead.
    """
    config, ours = without_place(trust.as_written(config)), architecture.modelling
    if architecture.code:
        of_code = read_config(architecture.code)
        for file in trust.code_files(architecture.code, of_code):
            shutil.copyfile(file, folder / file.name)
        config = config | {"auto_map": of_code["auto_map"]}
    elif ours and architecture.library != "timm":
        shutil.copyfile(trust.find_shipped_file(ours), folder / ours)
        config = config | {"auto_map": auto_map(ours, config["model_type"])}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def auto_map(file: str, model_type: str) -> dict[str, str]:
    """Return `{"AutoConfig": "file.Class", ...}` of a family, read without importing torch.

    It comes from the AUTO_MAP at the bottom of our modelling file, by model_type if that file holds several.
    """
    for node in ast.parse(trust.find_shipped_file(file).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "AUTO_MAP":
            names = ast.literal_eval(node.value)
            return {k: f"{file.removesuffix('.py')}.{v}" for k, v in names.get(model_type, names).items()}
    raise AssertionError(f"{file} has no AUTO_MAP")
