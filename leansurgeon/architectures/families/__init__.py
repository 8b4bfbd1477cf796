"""The declared families as data: every table of a `*.toml` file here is an `Architecture` (`base.py`).

Imports no torch. The table's name is the family's name, and its only model type unless `model_types` lists others.

To add a family, write a table; it is found automatically. Test it on a real model with `leansurgeon inspect MODEL
--doctor`, then add one line to `FAMILIES` in `tests/conftest.py`: every test of families covers it.

The table `usual` of a file holds what its families have in common; `from` inherits from another family of the file
instead. Tables are merged entry by entry, and an empty text removes an entry. `@name` is a function of `rules.py`.

A tensor is a line: its name in the library's state dict, its role, its axes separated by commas (`-`: none). A name
that ends in `*` stands for `.weight` and `.bias`, which has the first axis. Options may follow:

    if=KEY          the config key or switch that must be true (`!KEY`: false; `KEY=16`) for the tensor to exist
    bias=KEY        the same for the bias alone
    only=others     the first layer of a stage lacks it; `only=first`: only that layer has it
    layers=0,2      only these layers have it
    group=1, new=1  as in `Tensor`
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from leansurgeon.architectures import rules
from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.tensors import Blocks, Keys, Takes, Tensor
from leansurgeon.architectures.timm_models import DropPath, TimmModels

KINDS = {"stages": Blocks, "keys": Keys, "takes": Takes, "timm": TimmModels, "drop_path": DropPath}


@cache
def load_families() -> dict[str, Architecture]:
    """Return every declared family by name."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return {name: family for file in files for name, family in read_families(file.read_text(encoding="utf-8"))}


def read_families(text: str) -> Iterator[tuple[str, Architecture]]:
    """Yield the families of a file with their names."""
    tables = tomllib.loads(text)
    made = {"usual": tables.pop("usual", {})}
    for name, table in tables.items():
        made[name] = merge(made[table.pop("from", "usual")], {"model_types": [name]} | table)
        yield name, Architecture(name=name, **read_value("", made[name]))


def merge(base: Any, said: Any) -> Any:
    """Merge `said` into `base`: tables, and tables in lists, entry by entry."""
    if isinstance(base, dict) and isinstance(said, dict):
        both = base | {key: merge(base.get(key), value) for key, value in said.items()}
        return {key: value for key, value in both.items() if value != ""}
    if isinstance(base, list) and said and isinstance(said[0], dict):
        return [merge(*pair) for pair in zip(base, said, strict=True)]
    return said


def read_value(key: str, said: Any) -> Any:
    """Convert an entry of a table to its value, according to its `key`."""
    if isinstance(said, dict):
        found = {name: read_value(name, value) for name, value in said.items()}
        return KINDS[key](**found) if key in KINDS else found
    if isinstance(said, list):
        return tuple(read_value(key, value) for value in said)
    if key in ("block", "outer"):
        return tuple(read_tensors(said))
    return getattr(rules, said[1:]) if isinstance(said, str) and said.startswith("@") else said


def read_tensors(text: str) -> Iterator[Tensor]:
    """Yield the tensors that the lines of a text declare."""
    for name, role, axes, *options in map(str.split, text.strip().splitlines()):
        sizes = () if axes == "-" else tuple(axes.split(","))
        given = dict(option.split("=", 1) for option in options)
        when = given.pop("if", "")
        bias = given.pop("bias", when)
        layers = given.pop("layers", None)
        tensor = Tensor(
            name,
            role,
            sizes,
            when,
            new=float(given.pop("new")) if "new" in given else None,
            group=int(given.pop("group", 0)),
            layers=layers and tuple(map(int, layers.split(","))),
            **given,
        )
        if name.endswith("*"):
            yield replace(tensor, name=f"{name[:-1]}.weight")
            tensor = replace(tensor, name=f"{name[:-1]}.bias", axes=sizes[:1], when=bias)
        yield tensor
