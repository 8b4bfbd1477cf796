"""The model families that leansurgeon knows, and how to find the family of a config. Imports no torch."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from leansurgeon.architectures import infer, towers
from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.families import load_families
from leansurgeon.architectures.tensors import exists
from leansurgeon.errors import UnsupportedModel, UsageError

NEAR = 0.6  # cutoff of difflib for the nearest known name


def of(config: Config, tower: str | None = None) -> Architecture:
    """Return the family of a `config.json`, by its `model_type` (transformers) or `architecture` (timm).

    A declaration of a timm family may use `*` in the name. A family without a declaration that transformers knows is
    inferred and proven once (`infer/`). `tower` selects text, vision or audio in a multi-tower model (by default the
    user's choice for the command).

    Raises `UnsupportedModel` with the nearest known family, or with the reason why inference failed.
    """
    timm, model_type = family_name(config)
    tower = tower or towers.chosen_tower()
    if family := find_declared(config):
        if tower:
            raise UsageError(f"--tower {tower}: this {family.name} does not have several towers.")
        return family
    if not timm and (model_type == infer.DECOUPLED or is_transformers_type(model_type)):
        return infer.architecture(config, tower)
    if timm:
        from timm import is_model

        if model_type == infer.TIMM_LEAN or is_model(model_type):
            return infer.architecture(config)
    types = {t for a in load_families().values() if (a.library == "timm") == timm for t in a.model_types}
    names = sorted(t.rstrip("*_") for t in types if not t.startswith("leansurgeon_"))
    near = difflib.get_close_matches(model_type, names, n=1, cutoff=NEAR)
    said = f"; the nearest known one is '{near[0]}'" if near else ""
    raise UnsupportedModel(
        f"'{model_type}' is an architecture that leansurgeon does not know{said}.",
        "A family is one declaration of some 30 lines: leansurgeon/architectures/families/__init__.py says how to add "
        "it, decoders.toml beside it has examples, and `leansurgeon inspect MODEL --doctor` puts it to the test.",
    )


def decoupled_form_of(architecture: Architecture) -> Architecture:
    """Return the form of a family that supports heads of any size (`Architecture.decoupled`)."""
    if architecture.decoupled in (infer.DECOUPLED, infer.TIMM_LEAN):
        return infer.make_decoupled_form(architecture)
    return load_families()[architecture.decoupled]


def family_name(config: Config) -> tuple[bool, str]:
    """Return whether a config is timm's, and the name of its family. Raises `UnsupportedModel` if it has none."""
    timm = "model_type" not in config and "architecture" in config
    model_type = config.get("architecture" if timm else "model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModel(
            "config.json names neither a model_type nor a timm architecture.", "Is it a model's config?"
        )
    return timm, model_type


def find_declared(config: Config) -> Architecture | None:
    """Return the hand-written declaration of a config's family, which takes precedence over inference."""
    timm, model_type = family_name(config)
    if timm and infer.is_inferred(config):
        return None
    for architecture in load_families().values():
        right = (architecture.library == "timm") == timm
        right = right and any(fnmatchcase(model_type, pattern) for pattern in architecture.model_types)
        if right and exists(architecture.when, {**architecture.defaults, **config}):
            return architecture
    return None


def is_transformers_type(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES
