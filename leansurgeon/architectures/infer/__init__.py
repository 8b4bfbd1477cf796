"""Infer undeclared families on a small random model of the library, prove the result, and keep it in a cache.

    architecture = infer.architecture(config)      # a declaration like a hand-written one, for this config

A result holds for one version of the library, its modelling file and the flags of the config, and so does the cache
entry. Importing this package is cheap; torch is loaded when a family is requested.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.foreign import library_builds
from leansurgeon.architectures.towers import of_section
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, disk_is_full, memory_is_short

DECOUPLED = "leansurgeon_decoupled"  # model_type of models that use `models/decoupled_any.py`
TIMM_LEAN = "leansurgeon_any"  # entry point of `models/timm_any.py`

KEPT = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")  # keys of the whole model, never moved

_found: dict[str, Architecture] = {}  # in this process, by digest of the config


def architecture(config: Config, tower: str | None = None) -> Architecture:
    """Return the declaration of a config's family; for a multi-tower model, of one tower (text, if there is one).

    Raises `UnsupportedModel` with the reason if none can be inferred.
    """
    from leansurgeon.architectures.infer import cache

    if "model_type" not in config:
        return _of_timm(config)
    if config.get("model_type") == DECOUPLED:
        from leansurgeon.architectures.infer.widened import native

        return make_decoupled_form(
            architecture(native(dict(config)), of_section(config["decoupled"].get("section")) or tower)
        )
    return _read_or_infer(cache.config_digest(config, tower), lambda: _infer_tower(config, tower))


def _of_timm(config: Config) -> Architecture:
    """Return the same for a timm config with complete arguments."""
    from leansurgeon.architectures.infer import cache
    from leansurgeon.architectures.infer.timm_models import declared

    if config["architecture"] == TIMM_LEAN:
        return declared.lean(_of_timm(declared.native(config)))
    key = cache.config_digest({k: config.get(k) for k in ("architecture", "model_args")}, "timm")
    return _read_or_infer(key, lambda: declared.architecture(config))


def _read_or_infer(key: str, infer: Callable[[], Architecture]) -> Architecture:
    """Return what this process or the cache knows under `key`; otherwise call `infer` and store its result in both."""
    from leansurgeon.architectures.infer import cache

    if key not in _found:
        family = cache.read(key, Architecture)
        if family is None:
            family = infer()
            cache.write(key, family)
        _found[key] = family
    return _found[key]


def timm_config(name: str, args: Config | None = None) -> Config:
    """Return the complete config.json of a timm model without a declaration. Raises `UnsupportedModel`."""
    from leansurgeon.architectures.infer.timm_models import declared

    with library_builds(f"timm/{name}"):
        return declared.complete_config(name.split(".")[0], dict(args or {}))


def is_inferred(config: Config) -> bool:
    """Return whether a timm config says that no hand-written declaration fits its model, whatever its name."""
    return isinstance(config.get("leansurgeon"), dict) and "model_type" not in config


def make_decoupled_form(base: Architecture) -> Architecture:
    """Return the form of an inferred family that supports any number of heads, by a modelling file of ours.

    Raises `UnsupportedModel` if that was not proven.
    """
    if base.decoupled is None:
        why = next((stage["heads"] for stage in base.evidence["refused"] if stage["heads"]), "nothing was tried")
        raise UnsupportedModel(f"No heads of a size of their own were proven for this '{base.name}': {why}.")
    if base.library == "timm":
        from leansurgeon.architectures.infer.timm_models import declared

        return declared.lean(base)
    from leansurgeon.architectures.infer.widened import lean

    return lean(base)


def complete_config(config: Config) -> Config:
    """Return a config with every key that the library adds, so that surgery cannot change a derived default."""
    from leansurgeon.architectures.infer import library

    with library.quietly(), library_builds(f"A {config.get('model_type')}"):
        whole = library.whole(config)
    sections = [part for key, part in whole.items() if key.endswith("_config") and isinstance(part, dict)]
    # The library moves some keys into a part of the config, where surgery changes them.
    left = {k: v for k, v in config.items() if k not in whole and not k.endswith("_config_dict")}
    return whole | {k: v for k, v in left.items() if k in KEPT or not any(k in part for part in sections)}


def sample(config: Config) -> dict[str, Any]:
    """Return random inputs that a model of an undeclared family accepts, by name."""
    from leansurgeon.architectures.infer import explore, inputs, library, widened

    plain = widened.native(dict(config)) if config.get("model_type") == DECOUPLED else config
    with library.quietly():
        full = library.whole(plain)
        text = full.get("text_config") or {}
        vocab = full.get("vocab_size") or text.get("vocab_size") or inputs.VOCAB
        of_type = library.Library.of(full)
        model = of_type.cls
        if inputs.several_kinds(model, full):  # a small one makes as many features per image or sound as the real one
            with suppress(library.Unbuildable):
                model = of_type.build(explore.build_small_config(of_type, full, geometry=True))
        return inputs.example(model, full, vocab=vocab)


def _infer_tower(config: Config, tower: str | None) -> Architecture:
    from leansurgeon.architectures.infer import bind, cache, explore, library, tiny
    from leansurgeon.architectures.infer.finding import Finding

    model_type = config["model_type"]
    library.config_class(model_type)  # reports a type that the library does not know, before anything else
    full = complete_config(config)
    try:
        with library.quietly():
            small = [tiny.shrunk(full, attempt) for attempt in range(tiny.ATTEMPTS + 1)]
        # All models with the same small form share the cached finding.
        said = {"model_type": full["model_type"], "small": [cache.key_numbers(one) for one in small]}
        key = cache.config_digest(said, tower)
        if (finding := cache.read(key, Finding)) is None:
            finding = explore.explore(full, tower)
            cache.write(key, finding)
        if finding.trouble or not finding.stages:
            raise _not_inferred(model_type, finding.trouble)
        with library.quietly():
            return bind.declaration(finding, full)
    except library.Unbuildable as error:
        raise _not_inferred(model_type, str(error)) from error
    except (LeanSurgeonError, MemoryError):
        raise
    except Exception as error:  # models of a library fail in many ways, and configs may hold anything
        if memory_is_short(error) or disk_is_full(error):
            raise
        raise _not_inferred(
            model_type, "its config or model has a form that leansurgeon does not understand"
        ) from error


def _not_inferred(model_type: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"'{model_type}' has no declaration, and none could be inferred: {why}.",
        "A family is one declaration: leansurgeon/architectures/families/__init__.py says how to add it.",
    )
