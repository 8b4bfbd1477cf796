"""`report --plots`: every chart of every section as files, named after both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from leansurgeon.report.charts.render import save
from leansurgeon.report.charts.sections import every
from leansurgeon.report.rows.rows import Section


def draw(directory: Path, sections: Sequence[Section]) -> list[Path]:
    """Draw what every section has the figures for; returns the files."""
    return [
        file
        for name, section in zip(names(sections), sections, strict=True)
        for chart in every(section)
        for file in save(chart, directory / f"{name}-{stem(chart.key)}")
    ]


def names(sections: Sequence[Section]) -> list[str]:
    """A file name for every section, each once."""
    made: list[str] = []
    for section in sections:
        name = stem(section.name) or "section"
        taken = made.count(name) or any(other.startswith(f"{name}-") for other in made)
        made.append(f"{name}-{len(made) + 1}" if taken else name)
    return made


def stem(name: str) -> str:
    """Name of a chart's file without its ending: all but word characters, dots and dashes become a dash."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")
