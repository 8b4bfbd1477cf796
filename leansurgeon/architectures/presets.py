"""Presets: architectures without weights, with the paper's own head policy, listed in `presets.yaml`.

They need neither network nor torch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from leansurgeon.architectures.base import Config
from leansurgeon.architectures.families import load_families
from leansurgeon.architectures.timm_models import folder_config
from leansurgeon.errors import UsageError, did_you_mean
from leansurgeon.reading import yamlfile


@dataclass(frozen=True)
class Preset:
    """A preset. `config` is the content of the original's config.json; `family` names the Architecture.

    `policy` is what --head-dim auto means.
    """

    name: str
    family: str
    config: Config
    policy: str  # keep | split
    recipe: str | None = None  # the shipped recipe that trains it
    title: str = ""
    notes: tuple[str, ...] = ()


def get(name: str) -> Preset:
    """Return the preset of this name, with a copy of its config. Raises `UsageError` with the nearest name."""
    if name not in PRESETS:
        raise UsageError(
            f"There is no preset '{name}'{did_you_mean(name, PRESETS)}.", "Presets: " + ", ".join(PRESETS) + "."
        )
    return copy.deepcopy(PRESETS[name])


def read() -> dict[str, Preset]:
    """Return every preset by name."""
    document, _ = yamlfile.read(Path(__file__).with_name("presets.yaml"))
    presets = {}
    for name, said in document.items():
        timm, pixels, labels = said.pop("timm", None), said.pop("pixels", None), said.pop("labels", 0)
        if timm:
            said["config"] = folder_config(load_families()[said["family"]], timm, said["config"], pixels)
        if labels:  # transformers derives the number of classes from these keys
            said["config"] = said["config"] | {
                "id2label": {str(i): f"LABEL_{i}" for i in range(labels)},
                "label2id": {f"LABEL_{i}": i for i in range(labels)},
            }
        presets[name] = Preset(name, **said | {"notes": tuple(said.get("notes", ()))})
    return presets


PRESETS: dict[str, Preset] = read()
