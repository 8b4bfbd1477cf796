"""Colours, dashes and marks of charts and page. Colour alone must not tell series apart, so each has all three."""

from __future__ import annotations

# name -> (light, dark). Text has 4.5 : 1 against both backgrounds at least, lines of a chart 3 : 1 (WCAG 2.2).
COLOURS = {
    "ground": ("#ffffff", "#14171c"),
    "raised": ("#f4f5f7", "#1e232b"),
    "text": ("#1b1f24", "#e7eaee"),
    "quiet": ("#57606a", "#a3acb8"),
    "line": ("#d0d5dc", "#3a424e"),
    "link": ("#0a58b0", "#7db8f5"),
    "warn": ("#93380c", "#ffab7d"),
    "c0": ("#0b62b0", "#6db3f2"),
    "c1": ("#b5440c", "#ff9a6b"),
    "c2": ("#067355", "#4fcfa5"),
    "c3": ("#8b3f97", "#d69ae0"),
    "c4": ("#7a5d00", "#e3bb54"),
    "c5": ("#4a5560", "#c4ccd6"),
}
SERIES = 6  # c0 to c5; further series begin again, with other dashes and marks
DASHES = ((1, 0), (7, 3), (2, 3), (9, 3, 2, 3), (15, 4), (9, 3, 2, 3, 2, 3))
MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
LIGHT = {name: pair[0] for name, pair in COLOURS.items()}


def form(style: int) -> int:
    """Which dash and mark a style has: all six differ, and where colours begin again, the next one goes with each."""
    return (style + style // SERIES) % SERIES


def colour(style: int) -> str:
    """Hex colour of a style's number in the light scheme; styles beyond the palette begin again."""
    return LIGHT[f"c{style % SERIES}"]
