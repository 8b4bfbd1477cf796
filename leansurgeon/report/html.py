"""HTML and SVG as text: every string is escaped unless it is `Markup` already. No template engine, no script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from leansurgeon.report.humans import NONE


class Markup(str):
    """Text that `tag` has made, so safe to put into a page as it is."""


Child = str | int | float | None | Iterable["Child"]


def safe(value: str | int | float) -> Markup:
    """`value` as text of a page: names from a file must steer neither the browser nor the encoder.

    >>> safe("<script>") + safe("a" + chr(0))
    '&lt;script&gt;a?'
    """
    if isinstance(value, Markup):
        return value
    shown = "".join(c if c.isprintable() or c in "\n\t\u00a0" else "?" for c in str(value))
    return Markup(html.escape(shown, quote=True))


def join(*children: Child) -> Markup:
    """Children one behind the other; None and empty ones vanish, lists are opened."""
    return Markup(
        "".join(
            "" if c is None else join(*c) if isinstance(c, Iterable) and not isinstance(c, str) else safe(c)
            for c in children
        )
    )


VOID = ("meta", "br", "hr", "col")  # elements of HTML that have no end tag


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """One element. `class_` stands for class, `_` in a name for `-`; None and False leave an attribute out.

    >>> tag("td", "a < b", class_="left", data_label="x")
    '<td class="left" data-label="x">a &lt; b</td>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{safe(value)}"')
    start = f"<{' '.join(words)}>"
    return Markup(start if name in VOID else f"{start}{join(*children)}</{name}>")


def data(shown: str, value: object) -> Markup:
    """A figure as a person reads it, with the number itself beside it for programs (the element `data`)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or shown == NONE:
        return safe(shown)
    return tag("data", shown, value=repr(value))


def table(
    caption: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[Child]],
    *,
    cards: bool = True,
    caption_hidden: bool = False,
) -> Markup:
    """A table whose first column names the row. Where a screen is narrow, `cards` makes each row a block of its own
    (labels before the figures); else the table scrolls inside its frame. Roles are written out since `display: block`
    would take them away from screen readers.
    """
    head = tag("tr", [tag("th", h, scope="col", role="columnheader") for h in heads], role="row")
    body = [
        tag(
            "tr",
            tag("th", first, scope="row", role="rowheader"),
            [
                tag("td", tag("span", cell), data_label=label, role="cell")
                for label, cell in zip(heads[1:], rest, strict=True)
            ],
            role="row",
        )
        for first, *rest in rows
    ]
    made = tag(
        "table",
        tag("caption", caption, class_="hidden" if caption_hidden else None),
        tag("thead", head, role="rowgroup"),
        tag("tbody", body, role="rowgroup"),
        class_="cards" if cards else None,
        role="table",
    )
    return tag("div", made, class_="scroll", role="region", aria_label=caption, tabindex="0")


def sentence(line: str) -> Markup:
    """A sentence in which `backticks` mark what is typed."""
    if isinstance(line, Markup):
        return line
    return join([tag("code", piece) if i % 2 else safe(piece) for i, piece in enumerate(line.split("`"))])


def prose(lines: Iterable[str], class_: str | None = None) -> Markup | None:
    """Sentences as a list; nothing without any."""
    found = [tag("li", sentence(line)) for line in lines]
    return tag("ul", found, class_=class_) if found else None
