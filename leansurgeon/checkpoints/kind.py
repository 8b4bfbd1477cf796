"""The class that a model is used as, by three witnesses: the name in config.json, the weights that its files hold, and
modules.json of sentence-transformers. No torch before a class is asked for.

A class with a head whose weights are not in the files is no such model: the library would draw them at random, and
nothing random is measured, taught or followed. It is the model without its head.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from leansurgeon import architectures
from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.foreign import library_builds
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.family import auto_map
from leansurgeon.checkpoints.foreign import companions, trust
from leansurgeon.checkpoints.weights import Weights
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel
from leansurgeon.progress import quiet_transformers

LANGUAGE = ("causal-lm", "masked-lm")
# How the class of a model with each head ends; the first ending is that of transformers' auto class, too.
SUFFIX = {
    "image-classification": ("ForImageClassification",),
    "sequence-classification": ("ForSequenceClassification",),
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "masked-lm": ("ForMaskedLM",),
}


def class_name(config: Config) -> str:
    """The class that a config names; empty where it names none."""
    return (config.get("architectures") or [""])[0]


def find_used_class(folder: Path | None, config: Config, architecture: Architecture, *, trains: bool = False) -> str:
    """The class of the model as it is used: that of its body where the files lack weights of the head, or where
    modules.json makes embeddings of its states (not where it `trains`: what its files hold stays with it).
    """
    return classes_of(folder, config, architecture, trains=trains)[1]


def classes_of(
    folder: Path | None, config: Config, architecture: Architecture, *, trains: bool = False
) -> tuple[str, str]:
    """The class whose weights the files hold (that of the body where nothing of the head is there), and
    `find_used_class`; both are the name in config.json where nothing speaks against it.
    """
    name = class_name(config)
    if folder is None or architecture.library == "timm" or not ("For" in name or "LMHead" in name):
        return name, name
    try:
        lacking, body, alone = random_weights(folder, config, architecture)
    except (LeanSurgeonError, OSError, RuntimeError, TypeError, ValueError):
        return name, name  # whoever loads it says why it cannot be loaded
    used = body if lacking or (companions.is_embedder(folder) and (alone or not trains)) else name
    return body if lacking and alone else name, used


def find_used_class_in(folder: Path) -> str:
    """`find_used_class` of the model in a folder."""
    config = read_config(folder)
    return find_used_class(folder, config, trust.judge_code(architectures.of(config), config, folder))


def head_note(name: str, used: str, folder: Path | None) -> str:
    """Why a model of the class `name` is used as one of the class `used`, in a sentence; empty where it is the same."""
    if name == used:
        return ""
    why = "modules.json makes embeddings of it" if companions.is_embedder(folder) else "its head is not in the files"
    return f"config.json names {name}, but {why}: it is used and measured as {used}"


def body_class(architecture: Architecture, plain: str) -> str:
    """The class of a family's models without a head; `plain` is the library's, which has no head_dim of its own."""
    if architecture.library != "leansurgeon":
        return plain
    return auto_map(architecture.modelling, architecture.model_types[0])["AutoModel"].split(".")[-1]


def random_weights(folder: Path, config: Config, architecture: Architecture) -> tuple[tuple[str, ...], str, bool]:
    """Matrices of the model's class that its files lack, by their names in memory: the library would draw them at
    random. The class of its body, which is its own where it has no head; and whether the files hold the body alone.
    Nothing but headers is read.
    """
    name = class_name(config)
    cls = transformers_class(architecture, name)
    options = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    with library_builds(cls.__name__), quiet_transformers():
        model, info = cls.from_pretrained(folder, **options)
    drawn = (n for n, p in model.named_parameters() if n.endswith("weight") and p.dim() > 1)
    body = name if model.base_model is model else body_class(architecture, type(model.base_model).__name__)
    inside = {id(p) for p in model.base_model.parameters()}
    own = [n for n, p in model.named_parameters() if id(p) not in inside]
    alone = all(n in info["missing_keys"] for n in own)
    if not own:  # tied: the names in the files say as what it was saved
        alone = not any(n.startswith(f"{model.base_model_prefix}.") for n in Weights.open(folder).shapes)
    return tuple(n for n in drawn if n in info["missing_keys"]), body, alone


def transformers_class(architecture: Architecture, name: str) -> type:
    """A model class by its name, from transformers or from our own modelling file; from the checkpoint's folder only
    where the user allowed its code.
    """
    if architecture.code and (
        trusted := trust.load_trusted_class(architecture.code, read_config(architecture.code), name)
    ):
        return trusted
    if architecture.library == "leansurgeon":
        module = importlib.import_module(f"leansurgeon.models.{architecture.modelling.removesuffix('.py')}")
    else:
        module = importlib.import_module("transformers")
    cls = getattr(module, name, None)
    if not isinstance(cls, type) or not hasattr(cls, "from_pretrained"):
        raise UnsupportedModel(f"config.json names the class {name or '?'}, which is no model of {module.__name__}.")
    if architecture.library == "transformers":
        from transformers.models.auto.configuration_auto import model_type_to_module_name

        own = getattr(getattr(cls, "config_class", None), "model_type", None)
        rooms = (f".{model_type_to_module_name(name)}." for name in architecture.model_types)
        near = own is not None and any(room in cls.__module__ for room in rooms)
        if not near and own not in architecture.model_types:  # it would start with fresh weights, without an error
            raise UnsupportedModel(
                f"config.json names the class {name}, which is no class of {architecture.model_types[0]} models.",
                "Correct model_type or architectures there.",
            )
    return cls
