"""An inferred declaration as the text of a hand-written one, with what was proven and what is refused."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields

from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.limits import CAN, CANNOT
from leansurgeon.architectures.tensors import Blocks, Keys, Tensor

# What a module says in another way, or what only an inferred declaration has.
ELSEWHERE = ("name", "library", "model_types", "keys", "outer", "stages", "evidence", "decoupled", "shared")


def as_source(made: Architecture) -> str:
    """A module for `architectures/`: numbers that the config names elsewhere stand in it as plain integers."""
    name = re.sub(r"\W", "_", made.name).upper()
    block = [blocks_text(blocks) for blocks in made.stages]
    lines = [
        f'"""{made.name}: {verdict(made)}.',
        "",
        *said(made),
        '"""',
        "",
        "from leansurgeon.architectures.base import Architecture, Keys, Tensor",
        "from leansurgeon.architectures.tensors import Blocks",
        "",
        f"{name} = Architecture(",
        *(f"    {key}={getattr(made, key)!r}," for key in ("name", "library", "model_types")),
        f"    keys={keys_text(made.keys)},",
        *(f"    {key}={getattr(made, key)!r}," for key in told(made)),
        "    outer=(",
        *(f"        {tensor_text(t)}," for t in made.outer),
        "    ),",
        "    stages=(",
        *(line for text in block for line in text),
        "    ),",
        ")",
    ]
    return "\n".join(lines)


def told(made: Architecture) -> list[str]:
    """The fields that a declaration of this family has to name, beside its names, keys and tensors."""
    needed = ("norm", "causal", "positions", "prefixes", "tied")
    others = [f for f in fields(made) if f.name not in ELSEWHERE and f.name not in needed]
    plain = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in others}
    return [*needed, *(name for name, value in plain.items() if getattr(made, name) != value)]


def verdict(made: Architecture) -> str:
    """What may change, in one sentence without its full stop."""
    able = [text for kind, text in CAN.items() if kind not in made.refused]
    return ", ".join(able) or "nothing may change"


def said(made: Architecture) -> list[str]:
    """What is refused and why, and on what all else was proven, line by line."""
    lines = [f"{CANNOT[kind]}: {why}." for kind, why in made.refused.items()]
    inputs = " and ".join(made.evidence.get("proven_on_inputs") or ["inputs"])
    proven = f"proven on a small random model of the library's {made.evidence['class']}, given random {inputs}."
    lines.append(f"Inferred and {proven}" if len(made.refused) < len(CAN) else f"Tried, not {proven}")
    if made.section:
        lines.append(
            f"Of the model's towers it is the one that '{made.section}' describes; the others stay as they are."
        )
    if made.decoupled:
        lines.append(
            "The library derives head_dim from width // heads: more heads of the same size take the modelling file"
        )
        lines.append(
            "that travels with a result, which knows this family by inference (this text alone cannot name it)."
        )
        why = made.heads_unsplittable.partition("cannot be divided: ")[2]
        lines.append(f"Heads cannot be divided: {why}." if why else "Heads of half the size were proven as well.")
    if made.taps:
        lines.append(f"Other parts listen behind its layers: {', '.join(made.taps)} follows those that are left.")
    if any(made.stay):
        lines.append(
            f"Of the first layers stay: {', '.join(map(str, made.stay))}; what enters there is told by number."
        )
    if made.uneven:
        lines.append("Layers are of several kinds; a tensor says in `layers` which of this model have it.")
    return lines


def blocks_text(blocks: Blocks) -> list[str]:
    keys = keys_text(blocks.keys) if blocks.keys else None
    return [
        f"        Blocks({blocks.layer!r}, (",
        *(f"            {tensor_text(t)}," for t in blocks.block),
        f"        ), {blocks.projection!r}, {keys}),",
    ]


def tensor_text(tensor: Tensor) -> str:
    more = "".join(f", {key}={getattr(tensor, key)!r}" for key in ("group", "layers") if getattr(tensor, key))
    return f"Tensor({tensor.name!r}, {tensor.role!r}, {tensor.axes!r}{more})"


def keys_text(keys: Keys) -> str:
    given = {f.name: getattr(keys, f.name) for f in fields(keys)}
    default = Keys("", "", "")
    more = "".join(
        f", {k}={v!r}" for k, v in given.items() if v != getattr(default, k) and k not in ("depth", "heads", "width")
    )
    return f"Keys({keys.depth!r}, {keys.heads!r}, {keys.width!r}{more})"
