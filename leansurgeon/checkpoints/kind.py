"""Find the class that a model is used as. Imports torch only when a class is requested.

The evidence is the name in config.json, the weights in its files, and the modules.json of sentence-transformers.

A class with a head whose weights are not in the files is not used as such: the library would initialise them at random,
and nothing random is measured or taught by. The model is used without its head instead.
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
# Endings of the class names for each head; the first one is also that of transformers' auto class.
SUFFIX = {
    "image-classification": ("ForImageClassification",),
    "sequence-classification": ("ForSequenceClassification",),
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "masked-lm": ("ForMaskedLM",),
}


def class_name(config: Config) -> str:
    """Return the class that a config names; empty if it names none."""
    return (config.get("architectures") or [""])[0]


def find_used_class(folder: Path | None, config: Config, architecture: Architecture, *, trains: bool = False) -> str:
    """Return the class that the model is used as.

    It is the class of the body if the files lack weights of the head, or if modules.json makes embeddings of the hidden
    states (not when the model is trained, `trains`: then everything in its files stays).
    """
    return classes_of(folder, config, architecture, trains=trains)[1]


def classes_of(
    folder: Path | None, config: Config, architecture: Architecture, *, trains: bool = False
) -> tuple[str, str]:
    """Return the class whose weights the files hold (the body's if they lack the head), and that of `find_used_class`.

    Both are the name in config.json unless the files say otherwise.
    """
    name = class_name(config)
    if folder is None or architecture.library == "timm" or not ("For" in name or "LMHead" in name):
        return name, name
    try:
        lacking, body, alone = random_weights(folder, config, architecture)
    except (LeanSurgeonError, OSError, RuntimeError, TypeError, ValueError):
        return name, name  # loading it will report the error
    used = body if lacking or (companions.is_embedder(folder) and (alone or not trains)) else name
    return body if lacking and alone else name, used


def find_used_class_in(folder: Path) -> str:
    """Return `find_used_class` of the model in a folder."""
    config = read_config(folder)
    return find_used_class(folder, config, trust.judge_code(architectures.of(config), config, folder))


def head_note(name: str, used: str, folder: Path | None) -> str:
    """Explain in a sentence why a model of class `name` is used as class `used`; empty if they are equal."""
    if name == used:
        return ""
    why = "modules.json makes embeddings of it" if companions.is_embedder(folder) else "its head is not in the files"
    return f"config.json names {name}, but {why}: it is used and measured as {used}"


def body_class(architecture: Architecture, plain: str) -> str:
    """Return the class of a family's models without a head.

    `plain` is the library's class, which has no head_dim of its own.
    """
    if architecture.library != "leansurgeon":
        return plain
    return auto_map(architecture.modelling, architecture.model_types[0])["AutoModel"].split(".")[-1]


def random_weights(folder: Path, config: Config, architecture: Architecture) -> tuple[tuple[str, ...], str, bool]:
    """Return the randomly initialised matrices, the class of the body, and whether the files hold the body only.

    The matrices are those of the model's class that are missing in its files, by their names in memory. The body's
    class is the model's own if it has no head. Only headers are read.
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
    if not own:  # tied: the names in the files show which class was saved
        alone = not any(n.startswith(f"{model.base_model_prefix}.") for n in Weights.open(folder).shapes)
    return tuple(n for n in drawn if n in info["missing_keys"]), body, alone


def transformers_class(architecture: Architecture, name: str) -> type:
    """Return a model class by its name, from transformers or our own modelling file.

    It comes from the checkpoint's folder only if the user allowed that code. Raises `UnsupportedModel` if there is no
    such model class, or if it belongs to another model_type.
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
        raise UnsupportedModel(f"config.json names the class {name or '?'}, which is not a model of {module.__name__}.")
    if architecture.library == "transformers":
        from transformers.models.auto.configuration_auto import model_type_to_module_name

        own = getattr(getattr(cls, "config_class", None), "model_type", None)
        rooms = (f".{model_type_to_module_name(name)}." for name in architecture.model_types)
        near = own is not None and any(room in cls.__module__ for room in rooms)
        if not near and own not in architecture.model_types:  # it would start with new random weights, without an error
            raise UnsupportedModel(
                f"config.json names the class {name}, which is no class of {architecture.model_types[0]} models.",
                "Correct model_type or architectures there.",
            )
    return cls
