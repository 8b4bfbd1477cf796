"""How the page looks: one style sheet for screen, phone and print, light and dark. Fonts are those of the system."""

from __future__ import annotations

from pathlib import Path

from leansurgeon.report.charts.palette import COLOURS

SHEET = Path(__file__).parent / "templates" / "page.css"


def variables(index: int) -> str:
    """The palette as CSS variables; `index` 0 is the light scheme, 1 the dark one."""
    return "".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items())


def style() -> str:
    """The style sheet, with the colours of the charts as variables."""
    return (
        f":root{{color-scheme:light dark;{variables(0)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"
        f"@media print{{:root{{color-scheme:light;{variables(0)}}}}}\n{SHEET.read_text(encoding='utf-8')}"
    )
