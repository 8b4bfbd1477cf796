"""The notebook calls what there is (in the suite), and runs from its first cell to its last (`pytest -m slow`)."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import leansurgeon

NOTEBOOK = Path(__file__).parent.parent / "examples" / "shrink_and_heal.ipynb"


@pytest.fixture
def book():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_of(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_the_notebook_has_no_outputs_and_calls_functions_as_they_are(book):
    nbformat.validate(book)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_of(book)), "committed without outputs"
    called = set()
    for node in ast.walk(ast.parse("\n".join(cell.source for cell in code_of(book)))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("leansurgeon."):
            name = node.func.attr
            inspect.signature(getattr(leansurgeon, name)).bind(*node.args, **{k.arg: k.value for k in node.keywords})
            called.add(name)
    assert called == {"shrink", "retrain", "plan", "heads", "heal", "report"}


def said(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
def test_the_notebook_goes_from_a_checkpoint_to_a_healed_one(book, tmp_path):
    code = code_of(book)
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = [next(said(cell) for cell in code if word in cell.source) for word in ("retrain(", "data=data", "heal(")]
    (_, original), (_, at_cut), (_, at_end) = ([float(n) for n in re.findall(r"([\d.]+) %", one)] for one in told)
    assert original > 80 and at_end > at_cut, told  # it learned, and it healed
    pictures = [o for cell in code for o in cell.outputs if "image/svg+xml" in o.get("data", {})]
    assert len(pictures) >= 3
    assert not list(tmp_path.iterdir())  # nothing is left where the notebook lies
