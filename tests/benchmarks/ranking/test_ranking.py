"""The ranking benchmark on a model that knows nothing yet: its rows, its tau, and that it goes on."""

from __future__ import annotations

import json

import pytest
from scipy import stats

from tests.benchmarks.ranking.__main__ import main, tau
from tests.conftest import build
from tests.support.models.word_models import WORDS, words


def test_the_tau_is_scipys():
    rows = [
        {"evidence": e, "healed": h} for e, h in zip((3.0, 1.0, 2.0, 5.0, 4.0), (2.0, 1.0, 3.0, 4.0, 5.0), strict=True)
    ]
    wanted = stats.kendalltau([r["evidence"] for r in rows], [r["healed"] for r in rows]).statistic
    assert tau(rows) == pytest.approx(wanted)


def test_the_command_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    build("gpt2").save_pretrained(tmp_path / "model")
    words(tmp_path / "model")
    lines = (" ".join(WORDS[(k * k + j * j) % 25] for j in range(9)) for k in range(160))
    (tmp_path / "a.txt").write_text("\n".join(lines))
    state = tmp_path / "rows.jsonl"
    call = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "a.txt"), "--shapes", "2", "--epochs", "1"]
    main([*call, "--between", "0.3,0.9", "--state", str(state)])
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    assert len({row["shape"] for row in rows}) == 2 and all(row["healed"] > 0 < row["evidence"] for row in rows)
    state.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    main([*call, "--between", "0.3,0.9", "--state", str(state)])
    again = [json.loads(line) for line in state.read_text().splitlines()]
    assert [row["shape"] for row in again] == [rows[1]["shape"], rows[0]["shape"]]
    assert again[1]["healed"] == pytest.approx(rows[0]["healed"], rel=1e-4)
    assert "Kendall's tau over 2 shapes" in capsys.readouterr().out
