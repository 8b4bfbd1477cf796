"""Print an inferred declaration in the form of `families/`, with what was proven and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.limits import CAN, CANNOT

# Fields given by the table's name or the user's flags, and fields that only inferred declarations have.
ELSEWHERE = ("name", "model_types", "code", "evidence", "decoupled", "shared")


def as_source(made: Architecture) -> str:
    """Return a TOML table for a file in `families/`; numbers from other config keys are plain integers.

    Above it stand, line by line, what is refused and why, and how the rest was proven.
    """
    said = [f"{CANNOT[kind]}: {why}." for kind, why in made.refused.items()]
    inputs = " and ".join(made.evidence.get("proven_on_inputs") or ["inputs"])
    proven = f"proven on a small random model of the library's {made.evidence['class']}, given random {inputs}."
    said.append(f"Inferred and {proven}" if len(made.refused) < len(CAN) else f"Tried, not {proven}")
    if made.section:
        said.append(
            f"Of the model's towers it is the one that '{made.section}' describes; the others stay as they are."
        )
    if made.decoupled:
        said.append(
            "The library derives head_dim from width // heads: more heads of the same size take the modelling file"
        )
        said.append(
            "that travels with a result, which knows this family by inference (this text alone cannot name it)."
        )
        why = made.heads_unsplittable.partition("cannot be divided: ")[2]
        said.append(f"Heads cannot be divided: {why}." if why else "Heads of half the size were proven as well.")
    if made.taps:
        said.append(f"Other parts listen behind its layers: {', '.join(made.taps)} follows those that are left.")
    if any(made.stay):
        said.append(f"Of the first layers stay: {', '.join(map(str, made.stay))}; what enters there is told by number.")
    if made.uneven:
        said.append("Layers are of several kinds; a tensor says in `layers` which of this model have it.")
    name = json.dumps(made.name)
    lines = [f"# {made.name}: {verdict(made)}.", *(f"# {line}" for line in said), f"[{name}]"]
    lines += entries(made, *ELSEWHERE, "stages")
    for blocks in made.stages:
        lines += ["", f"[[{name}.stages]]", *entries(blocks)]
    return "\n".join(lines)


def entries(record: Any, *elsewhere: str) -> Iterator[str]:
    """Yield the lines of a table: the fields of a record, except those given `elsewhere`."""
    for key, value in fields_of(record).items():
        if key in ("block", "outer"):
            yield f'{key} = """'
            for tensor in value:
                group = f" group={tensor.group}" if tensor.group else ""
                layers = f" layers={','.join(map(str, tensor.layers))}" if tensor.layers else ""
                yield f"{tensor.name:<48} {tensor.role:<16} {','.join(tensor.axes) or '-'}{group}{layers}"
            yield '"""'
        elif key not in elsewhere:
            yield f"{key} = {in_toml(value)}"


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults."""
    usual = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(record)}
    return {name: value for name in usual if (value := getattr(record, name)) != usual[name]}


def in_toml(value: Any) -> str:
    if is_dataclass(value):
        value = fields_of(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {in_toml(entry)}" for key, entry in value.items()) + "}"
    return "[" + ", ".join(map(in_toml, value)) + "]" if isinstance(value, tuple) else json.dumps(value)


def verdict(made: Architecture) -> str:
    """Say what may change, in one sentence without its full stop."""
    able = [text for kind, text in CAN.items() if kind not in made.refused]
    return ", ".join(able) or "nothing may change"
