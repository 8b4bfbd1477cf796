"""The tables and figures as they stand in `tables.yaml` and `figures.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leansurgeon.paper.base import Exhibit, Printed, Row, Words
from leansurgeon.reading import yamlfile

TABLES, FIGURES = (Path(__file__).with_name(name) for name in ("tables.yaml", "figures.yaml"))


def read(path: Path) -> tuple[Exhibit, ...]:
    """The exhibits of a file, in its order."""
    document, _ = yamlfile.read(path)
    return tuple(
        Exhibit(e["key"], e["title"], tuple(_rows(e)), e["headline"], tuple(e.get("remarks", ()))) for e in document
    )


def _rows(exhibit: dict[str, Any]) -> Iterator[Row]:
    for model in exhibit["models"]:
        for row in model["rows"]:
            scores = dict(zip(exhibit["scores"], row["scores"], strict=True)) if "scores" in row else {}
            shape, parameters = _words(row["shape"]), row.get("parameters")
            yield Row(
                model["model"],
                row["role"],
                model["preset"],
                Printed(shape, parameters, scores, row.get("memory"), row.get("change")),
                model["policy"],
                reading=_words(row["reading"]) if "reading" in row else None,
                others={name: _words(other) for name, other in row.get("others", {}).items()},
                remark=row.get("remark", ""),
            )


def _words(shape: list[int | str]) -> Words:
    return Words(*map(str, shape))
