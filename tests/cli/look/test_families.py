"""`leansurgeon families`: rows that are known already need no torch, and a type that cannot be tried is a row."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from leansurgeon.surgery.family_check import FamilyCheck


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
