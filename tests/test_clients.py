"""The guide's table of clients shows what is tried, cell by cell. The trials themselves: `pytest -m clients`."""

from __future__ import annotations

import re
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


def test_every_client_has_a_test_with_its_cells():
    files = (TESTS / "clients").glob("test_*.py")
    tried = [name for file in files for name in re.findall(r'^@kinds\("(.+)"\)', file.read_text(), flags=re.M)]
    assert sorted(tried) == sorted(CELLS)
