"""What the tool knows of a family stands in its declaration, and nowhere else."""

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


def test_no_file_holds_the_name_of_a_family():
    names = family_names()
    assert {"bert", "timm_vit", "swin", "nystromformer_lra", "t5"} <= names
    for path in FILES:
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        named = {text for text in constants if isinstance(text, str) and text.strip("_*") in names}
        assert named <= ({"crammed_bert"} if path.relative_to(PACKAGE).as_posix() == LAYOUT else set()), path
