"""Model cards: their front matter, and the name that a card uses for its own model."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from leansurgeon.errors import LeanSurgeonError, raised_as
from leansurgeon.reading import yamlfile
from leansurgeon.reading.files import read_text
from leansurgeon.reading.jsonfile import Json, JsonObject

LIMIT = 2**20  # bytes of a model card
CARD = "README.md"
HEAD = re.compile(r"\A(?:\ufeff|\s)*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")  # a model in the hub's cache
TITLE = re.compile(r"#[ \t]+`?([\w./-]+?)`?[ \t]*")
NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"  # of a model on the hub


@raised_as(LeanSurgeonError)
def front_matter(folder: Path) -> JsonObject:
    """Return the front matter of a folder's card for JSON; empty if there is no card, or none in it. What JSON cannot
    hold (dates, sets) is left out.

    Raises `LeanSurgeonError` if the card cannot be read: too long, not UTF-8, not YAML, a duplicate key.
    """
    if not (folder / CARD).is_file():
        return {}
    kept = plain(parts(read_text(folder / CARD, LIMIT), folder.name)[0])
    return kept if isinstance(kept, dict) else {}


@raised_as(LeanSurgeonError)
def body(folder: Path) -> str:
    """Return the text behind the front matter of a folder's card, without leading blank lines.

    Raises as `front_matter` does.
    """
    return HEAD.sub("", read_text(folder / CARD, LIMIT)).lstrip()


@raised_as(LeanSurgeonError)
def parts(card: str, of: str) -> tuple[dict[str, Any], str]:
    """Split a card into front matter (all that YAML holds) and body. Raises `LeanSurgeonError` if it is not YAML."""
    head = HEAD.match(card)
    said = yamlfile.parse(head[1], f"{CARD} of {of}")[0] if head else None
    return said if isinstance(said, dict) else {}, HEAD.sub("", card).lstrip()


def plain(value: object) -> Json:
    """Return the part of a YAML value that JSON can hold; None for everything else.

    >>> plain({"a": [1, {2}], 3: "b", "c": float("nan")})
    {'a': [1], 'c': None}
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if isinstance(key, str)}
    if isinstance(value, list):
        return [entry for item in value if (entry := plain(item)) is not None]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | bool | int | float) else None


def hub_name_of_cache(folder: Path) -> str | None:
    """Return `org/name` of a folder in the hub's cache; None for any other."""
    match = CACHED.search(folder.as_posix())
    return f"{match[1]}/{match[2]}" if match else None


def own_name(folder: Path) -> str | None:
    """Return the `org/name` that a card uses for its own model: its title, or the only name in its text that ends with
    the title (for `all-MiniLM-L6-v2` the one that its example loads). None if there is none.
    """
    try:
        text = body(folder)
    except LeanSurgeonError:
        return None
    title = next((match[1] for line in text.splitlines() if (match := TITLE.fullmatch(line))), "")
    if re.fullmatch(NAME, title):
        return title
    names = re.findall(rf"(?<![\w./-])([A-Za-z0-9][\w.-]*/{re.escape(title)})(?![\w/-])", text) if title else []
    return names[0] if len(set(names)) == 1 else None
