"""Every example of a docstring does what it shows."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [path.relative_to(ROOT) for path in sorted(ROOT.glob("leansurgeon/**/*.py")) if ">>>" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_examples_of_docstrings(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert not done.failed, capsys.readouterr().out
