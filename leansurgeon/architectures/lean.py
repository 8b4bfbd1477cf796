"""Short ways to declare families: those of transformers, and those by a modelling file of ours. The latter are families
that no library has, and the form of a library's family that holds any number of heads of any size, where the library
derives head_dim from the width (the same tensors).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leansurgeon.architectures.base import Architecture, derive
from leansurgeon.architectures.tensors import HEAD_DIM_KEYS, USUAL_KEYS


def of_transformers(name: str, **more: Any) -> Architecture:
    """The family of transformers' type of this `name`; `more` is its tensors, and what else is its own."""
    usual = {"name": name, "library": "transformers", "model_types": (name,), "keys": USUAL_KEYS}
    return Architecture(**usual | more)


def lean(family: Architecture, modelling: str, **more: Any) -> Architecture:
    """`family` by the file `modelling` in models/, with a `head_dim` in its config; `more` is what else differs. The
    family names it as `decoupled`.
    """
    name = f"leansurgeon_{family.name.removeprefix('timm_')}"
    changes = {
        "name": name,
        "library": "timm" if family.library == "timm" else "leansurgeon",
        "model_types": (name,),
        "keys": replace(family.keys, head_dim="head_dim"),
        "decoupled": None,
        "modelling": modelling,
    }
    return derive(family, **changes | more)


def own(name: str, **more: Any) -> Architecture:
    """The family of this name, whose file in models/ is all that there is of it; `more` is what is its alone."""
    return Architecture(
        name=name,
        library="leansurgeon",
        model_types=(name,),
        keys=HEAD_DIM_KEYS,
        layer="layers.{i}.",
        projection="layers.{i}.attention.output",
        norm="pre",
        modelling=f"{name}.py",
        **more,
    )
