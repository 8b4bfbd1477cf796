"""Reads a page as a browser would, with nothing of ours: elements, tables with the numbers behind their cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "col", "img", "link", "input"}


@dataclass
class Cell:
    text: str = ""
    value: float | None = None  # of the element `data` in it


@dataclass
class Table:
    caption: str = ""
    heads: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)

    def row(self, name: str) -> dict[str, Cell]:
        found = next(row for row in self.rows if row[0].text == name)
        return dict(zip(self.heads, found, strict=True))


class Page(HTMLParser):
    """`elements` are (name, attributes) in their order, `open` what was never closed, `wrong` what closed nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tables: list[Table] = []
        self.texts: list[str] = []
        self.data: list[Cell] = []
        self.feed(text)
        self.close()

    def table(self, caption: str) -> Table:
        return next(t for t in self.tables if t.caption.startswith(caption))

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def names(self) -> set[str]:
        return {name for name, _ in self.elements}

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute twice in {tag}"
        self.elements.append((tag, given))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr" and "tbody" in self.open:
            self.tables[-1].rows.append([])
        elif tag in ("th", "td") and "tbody" in self.open:
            self.tables[-1].rows[-1].append(Cell())
        elif tag in ("th", "td"):
            self.tables[-1].heads.append("")
        elif tag == "data":
            self.data.append(Cell(value=float(given["value"])))
            if "tbody" in self.open:
                self.tables[-1].rows[-1][-1].value = float(given["value"])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.wrong.append(tag)
        else:
            self.open.pop()

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if "data" in self.open:
            self.data[-1].text += data
        if "tbody" in self.open and {"th", "td"} & set(self.open):
            self.tables[-1].rows[-1][-1].text += data
        elif "thead" in self.open and "th" in self.open:
            self.tables[-1].heads[-1] += data
        elif "caption" in self.open:
            self.tables[-1].caption += data
