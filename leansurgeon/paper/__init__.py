"""The tables and figures of "Leaner Transformers: More Heads, Less Depth" as data, and their audit.

`tables.yaml` and `figures.yaml` hold what the paper prints and the shapes that reproduce its parameter counts; `audit`
recounts every row, `output` shows both. Accuracy and memory are the paper's: nothing is trained here.
"""

from __future__ import annotations

from leansurgeon.errors import UsageError, did_you_mean
from leansurgeon.paper.audit import Exhibit, read

TABLES = read("tables.yaml")
EXHIBITS: dict[str, Exhibit] = {e.key: e for e in (*TABLES, *read("figures.yaml"))}


def choose_exhibits(key: str | None) -> tuple[Exhibit, ...]:
    """Return the exhibits that a user names: None the five tables, `all` the figures, too. Raises `UsageError`."""
    if key is None:
        return TABLES
    if key == "all":
        return tuple(EXHIBITS.values())
    word = key.lower().replace("table", "").replace("figure", "fig").replace(" ", "").replace("-", "")
    if word not in EXHIBITS:
        raise UsageError(
            f"The paper's audit has no '{key}'{did_you_mean(word, EXHIBITS)}.",
            f"There are {', '.join(EXHIBITS)} and all.",
        )
    return (EXHIBITS[word],)
