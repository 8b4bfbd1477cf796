"""The guide's table of clients shows what is tried, cell by cell. The trials themselves: `pytest -m clients`."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.clients.cells import CELLS, KINDS

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "examples" / "guide" / "clients.md"


def test_the_table_of_the_guide_is_what_is_tried():
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, body = [cell.strip() for cell in rows[0][1:]], rows[1:]
    assert head == list(KINDS.values())
    shown = {
        row[0].strip(): tuple(kind for kind, cell in zip(KINDS, row[1:], strict=True) if cell.strip() == "yes")
        for row in body
    }
    assert shown == CELLS
    assert sum(map(len, CELLS.values())) >= 20


def test_every_client_has_a_test_with_its_cells():
    tried = set()
    for file in (TESTS / "clients").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                calls = [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
                tried |= {call.args[0].value for call in calls if getattr(call.func, "id", "") == "kinds"}
    assert tried == set(CELLS)
