"""The form of a family that holds any number of heads of any size, where its library derives head_dim from the width:
the same tensors, by a modelling file of ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leansurgeon.architectures.base import Architecture, derive


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
