"""The notebook runs from its first cell to its last, and shows what it says."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "shrink_and_heal.ipynb"


def said(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_goes_from_a_checkpoint_to_a_healed_one(tmp_path):
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "committed without outputs"
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    errors = [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert not errors
    told = [next(said(cell) for cell in code if word in cell.source) for word in ("retrain(", "data=data", "heal(")]
    (_, original), (_, at_cut), (_, at_end) = ([float(n) for n in re.findall(r"([\d.]+) %", one)] for one in told)
    assert original > 80 and at_end > at_cut, told  # it learned, and it healed
    pictures = [o for cell in code for o in cell.outputs if "image/svg+xml" in o.get("data", {})]
    assert len(pictures) >= 3
    assert not list(tmp_path.iterdir())  # nothing is left where the notebook lies
