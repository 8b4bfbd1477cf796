"""Files that travel with a checkpoint stand alone, so families of one descent have one each. They are one text: what is
changed in the first must be changed in the second, or nothing that was cut before and after would be alike.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from leansurgeon import models

ROOM = Path(models.__file__).parent
# The first file, its twin, words of the one that are other words in the other, and the classes in which the libraries
# themselves differ.
TWINS = {
    "bart": ("decoupled_bart", "decoupled_mbart", {"Bart": "MBart", "bart": "mbart", "BART": "mBART"}, set()),
    "bert": (
        "decoupled_bert",
        "decoupled_roberta",
        {"Bert": "Roberta", "bert": "roberta", "BERT": "RoBERTa"},
        {"LeanRobertaForMaskedLM", "LeanRobertaForSequenceClassification"},
    ),
}


def definitions(text: str) -> dict[str, str]:
    """Every class and function of a file by its name, without docstrings, comments and line breaks."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            for inner in ast.walk(node):
                body = getattr(inner, "body", None)
                if isinstance(inner, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(inner) is not None:
                    inner.body = body[1:] or [ast.Pass()]
            found[node.name] = ast.unparse(node)
    return found


def twin(text: str, words: dict[str, str]) -> str:
    return re.sub("|".join(words), lambda found: words[found[0]], text)


@pytest.mark.parametrize("pair", TWINS)
def test_twins_are_one_text(pair):
    first, second, words, libraries = TWINS[pair]
    rendered = definitions(twin((ROOM / f"{first}.py").read_text(), words))
    written = definitions((ROOM / f"{second}.py").read_text())
    assert set(written) <= set(rendered) and libraries <= set(written)
    assert len(written) - len(libraries) >= 5
    assert {name: text for name, text in written.items() if name not in libraries} == {
        name: rendered[name] for name in written if name not in libraries
    }
