"""What the tool knows of a family stands in its declaration, and nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from leansurgeon import architectures

PACKAGE = Path(architectures.__file__).parent.parent
# Declarations, what they name, and the tables of the paper; a reader of one published layout, which is its family's.
HOMES = {"architectures", "models", "paper"}
LAYOUT = "checkpoints/foreign/converted.py"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in HOMES)


def family_names() -> set[str]:
    """Names of all families and of the model types that they serve, and the parts of timm's."""
    known = architectures.load_families().values()
    names = {name for family in known for name in (family.name, *family.model_types)}
    parts = {part for name in names if name.startswith(("timm_", "leansurgeon_")) for part in name.split("_")[1:]}
    return {re.sub(r"[_*]+$", "", name) for name in names} | parts


def texts(path: Path) -> list[tuple[int, str]]:
    """The strings of a file with their lines, docstrings aside."""
    tree = ast.parse(path.read_text())
    plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [(node.lineno, node.value) for node in strings if id(node) not in plain]


def test_no_file_holds_the_name_of_a_family():
    names = family_names()
    assert {"bert", "timm_vit", "swin", "nystromformer_lra", "t5"} <= names
    found = {(str(path.relative_to(PACKAGE)), text) for path in FILES for _, text in texts(path)}
    named = {(path, text) for path, text in found if text.strip("_*") in names}
    assert named <= {(LAYOUT, "crammed_bert")}
