"""From which model a quantised one was made, by what lies beside it: its model card, its config, its name."""

from __future__ import annotations

import re
from pathlib import Path

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.reading.files import read_text
from leansurgeon.reading.jsonfile import Json

LIMIT = 2**20  # bytes of a model card
NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"  # of a model on the hub
# Endings that publishers of quantised models give to the name of the model that they started from.
ENDING = re.compile(
    r"[-_.](?:(?:unsloth-)?bnb|gptq|awq|hqq|aqlm|eetq|quanto|fp8|fp4|nf4|nvfp4|mxfp4|int[48]|w[48]a\d+|[48]bits?)\b.*$",
    re.IGNORECASE,
)


def base_model(folder: Path, named: Json = None) -> str | None:
    """The name of the model that a quantised one was made from: `base_model` of its card, else the name that its
    config carries (`named`) or its folder, where that has an ending such as `-GPTQ`. None where nothing says it.
    """
    try:
        card = read_text(folder / "README.md", LIMIT)
    except LeanSurgeonError:
        card = ""
    head = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", card, re.DOTALL)
    if head and (said := re.search(rf"^base_model:\s*(?:\n\s*-\s*)?[\"']?({NAME})", head[1], re.MULTILINE)):
        return said[1]
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", folder.as_posix())
    own = f"{cached[1]}/{cached[2]}" if cached else folder.name
    for name in (named, own):
        if isinstance(name, str) and re.fullmatch(rf"{NAME}|[\w.-]+", name):
            short = ENDING.sub("", name)
            if short != name or (name is named and "/" in name and name != own):
                return short
    return None


def where_to_get(folder: Path, named: Json = None) -> str:
    """What to take instead of a quantised model, in one sentence."""
    base = base_model(folder, named)
    if base is None:
        return "Take the model that it was made from; its model card should name it."
    return f"Take the model that it was made from: {base}, by its card, config or name."
