"""Render charts: SVG for a page, whose colors follow the reader's light or dark scheme, and SVG, PNG and PDF files."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.report.charts.forms import LIGHT, Chart
from leansurgeon.report.charts.sections import every
from leansurgeon.report.rows import Section

FORMATS = ("svg", "png", "pdf")
SVG = "http://www.w3.org/2000/svg"
VARIABLES = {value: f"var(--{name})" for name, value in LIGHT.items()}
SAID = re.compile(r"^(aria-|role$)")


def svg(chart: Chart) -> str:
    """Return the chart as SVG text for a page: colors are the page's variables, every mark has its numbers
    as a title.
    """
    root = ElementTree.fromstring(chart.svg)
    ElementTree.register_namespace("", SVG)
    for parent in root.iter():
        for child in list(parent):
            if child.get("opacity") == "0":  # labels that did not fit
                parent.remove(child)
    for element in root.iter():
        said = element.get("aria-label") if element.get("aria-roledescription") not in GROUPS else None
        for key in [key for key in element.attrib if SAID.match(key) or key in ("class", "pointer-events")]:
            del element.attrib[key]
        for key, value in element.attrib.items():
            element.attrib[key] = VARIABLES.get(value, value)
        if said:
            ElementTree.SubElement(element, f"{{{SVG}}}title").text = said
    size = root.get("viewBox", "")
    words = f"{chart.title}. {chart.says}"
    root.attrib.clear()
    root.attrib.update({"viewBox": size, "role": "img", "aria-label": words})
    return ElementTree.tostring(root, encoding="unicode")


GROUPS = ("axis", "legend", "group mark container", "title", "line mark container", "rule mark container", None)


def save(chart: Chart, stem: Path) -> list[Path]:
    """Write `STEM.svg`, `.png` and `.pdf`, on white and with a title. The same numbers give the same pictures."""
    drawing = chart.drawing.properties(title=chart.title, background=LIGHT["ground"])
    drawing = drawing.configure_title(anchor="start", fontSize=13, color=LIGHT["text"], offset=10)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in FORMATS]
    try:
        for file in files:
            drawing.save(str(file), scale_factor=3) if file.suffix == ".png" else drawing.save(str(file))
    except OSError as error:
        raise LeanSurgeonError(f"{file} cannot be written: {error.strerror}.", "Choose another --plots.") from None
    return files


def draw(directory: Path, sections: Sequence[Section]) -> list[Path]:
    """Write every chart of every section to files named after both (`report --plots`); return them."""
    return [
        file
        for name, section in zip(names(sections), sections, strict=True)
        for chart in every(section)
        for file in save(chart, directory / f"{name}-{stem(chart.key)}")
    ]


def names(sections: Sequence[Section]) -> list[str]:
    """Return a unique file name for every section."""
    made = []
    for section in sections:
        name = stem(section.name) or "section"
        taken = made.count(name) or any(other.startswith(f"{name}-") for other in made)
        made.append(f"{name}-{len(made) + 1}" if taken else name)
    return made


def stem(name: str) -> str:
    """Return the name of a chart's file without its suffix: characters other than letters, digits, `_`, `.` and `-`
    become a dash.
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")
