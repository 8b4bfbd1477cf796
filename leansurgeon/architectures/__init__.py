"""The model families that leansurgeon knows, and how to find the one of a config. No torch here."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from fnmatch import fnmatchcase
from functools import cache

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.errors import UnsupportedModel


@cache
def known() -> dict[str, Architecture]:
    """Every declared family by name."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in ("base", "presets"))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [v for m in modules for v in vars(m).values() if isinstance(v, Architecture)]
    return {a.name: a for a in found}


def of(config: Config) -> Architecture:
    """The family of a `config.json`, by its `model_type` (transformers) or `architecture` (timm, where `*` may stand in
    a declaration).

    Raises `UnsupportedModel` with the nearest known family.
    """
    timm = "model_type" not in config and "architecture" in config
    model_type = config.get("architecture" if timm else "model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModel(
            "config.json names neither a model_type nor a timm architecture.", "Is it a model's config?"
        )
    candidates = [a for a in known().values() if (a.library == "timm") == timm]
    for architecture in candidates:
        if any(fnmatchcase(model_type, pattern) for pattern in architecture.model_types):
            return architecture
    names = sorted({t.rstrip("*_") for a in candidates for t in a.model_types if not t.startswith("leansurgeon_")})
    near = difflib.get_close_matches(model_type, names, n=1, cutoff=0.0)[0]
    raise UnsupportedModel(
        f"'{model_type}' is an architecture that leansurgeon does not know; the nearest known one is '{near}'.",
        "A family is one declaration of some 50 lines: leansurgeon/architectures/base.py says on top how to add it, "
        "opt.py beside it is an example, and `leansurgeon inspect MODEL --doctor` puts it to the test.",
    )
