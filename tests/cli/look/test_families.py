"""`leansurgeon families`: rows that are known already need no torch, and a type that cannot be tried is a row."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

from leansurgeon.commands import families
from leansurgeon.surgery.family_check import NAMES, PREFIX, FamilyCheck, RandomModel


def test_known_rows_are_shown_without_torch(tmp_path):
    row = FamilyCheck("bert", "BertForMaskedLM", built=True, declared=True, difference=0.0)
    (tmp_path / "rows.jsonl").write_text(json.dumps(asdict(row)) + "\n")
    code = (
        "import sys; from leansurgeon.cli.main import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'timm', 'numpy'} & set(sys.modules), 'heavy'"
    )
    call = [sys.executable, "-c", code, "families", "bert", "--state", "rows.jsonl", "--json"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    shown = {key: value for key, value in asdict(row).items() if key != "defect"}
    assert document["rows"] == [shown] and document["counts"]["all three"] == 1


def test_a_library_that_cannot_be_imported_is_a_row(monkeypatch):
    def broken(name):
        raise ImportError(f"{name} is broken")

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # its process is its own, this one is not
    monkeypatch.setenv("LEANSURGEON_CACHE", os.environ.get("LEANSURGEON_CACHE", ""))  # put back afterwards
    monkeypatch.setattr(importlib, "import_module", broken)
    for name in ("bert", PREFIX + NAMES[0]):
        row = families.patiently(name, RandomModel())
        assert (row.name, row.built) == (name, False)
        assert row.why.startswith("ImportError: ") and row.why.endswith(" is broken")
