"""The floors of surgery import downwards only. That no circle ties files together stands in `tests/test_imports.py`."""

import ast
from pathlib import Path

import leansurgeon

PACKAGE = Path(leansurgeon.__file__).parent
FLOORS = ["check", "shrink", "prune", "walk", "write", "plan", "layer", "refit"]  # `prune` is decided as `shrink` is


def imports(path):
    """The files of the package that a file imports, wherever in it, also for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("leansurgeon"):
            base = PACKAGE.joinpath(*node.module.split(".")[1:])
            names = [base / f"{a.name}.py" for a in node.names] + [base.with_suffix(".py")]
            found |= {name for name in names if name.exists()}
    return found - {path}


def floor(path):
    parts = path.relative_to(PACKAGE / "surgery").parts
    return FLOORS.index(parts[0].removesuffix(".py"))


def test_floors_import_downwards():
    surgery = PACKAGE / "surgery"
    for path in surgery.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        for below in imports(path):
            if surgery in below.parents:
                allowed = floor(below) >= floor(path) or (path.stem, below.stem) == ("prune", "shrink")
                assert allowed, f"{path.relative_to(surgery)} imports {below.relative_to(surgery)}"
