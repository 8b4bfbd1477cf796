"""The ranking benchmark on a model that knows nothing yet: its rows, its tau, and that it goes on."""

from __future__ import annotations

import json

import pytest
from scipy import stats

from tests.benchmarks.ranking.__main__ import main, rows_of, tau
from tests.conftest import build
from tests.support.models.word_models import WORDS, words


def row(stage, shape, *key, number=0):
    return {"stage": stage, "shape": shape, "round": number, "key": key, "score": "", "cpu": 30.0}


def test_the_tau_is_scipys_on_the_orders_that_search_makes():
    """Equal accuracies are told apart by the loss, as `Score.key` does."""
    first = {"a": (-0.9, 3.0), "b": (-0.9, 1.0), "c": (-0.8, 2.0), "d": (-0.7, 5.0), "e": (-0.7, 4.0)}
    then = {"a": (-0.9, 2.0), "b": (-0.8, 1.0), "c": (-0.8, 3.0), "d": (-0.6, 4.0), "e": (-0.5, 0.5)}
    rows = [row("evidence", n, *k) for n, k in first.items()] + [row("healed", n, *k) for n, k in then.items()]
    by_hand = stats.kendalltau([2, 1, 3, 5, 4], [1, 2, 3, 4, 5]).statistic
    assert tau(rows) == pytest.approx(by_hand)
    losses = [[key[1] for key in order.values()] for order in (first, then)]
    assert tau(rows, 1) == pytest.approx(stats.kendalltau(*losses).statistic) != pytest.approx(by_hand)


def test_the_command_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    build("gpt2").save_pretrained(tmp_path / "model")
    words(tmp_path / "model")
    lines = (" ".join(WORDS[(k * k + j * j) % 25] for j in range(9)) for k in range(160))
    (tmp_path / "a.txt").write_text("\n".join(lines))
    state = tmp_path / "rows.jsonl"
    call = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "a.txt"), "--shapes", "2", "--epochs", "1"]
    main([*call, "--between", "0.3,0.9", "--state", str(state)])
    rows = rows_of(state)
    assert [(r["stage"], r.get("round")) for r in rows] == [("evidence", 0)] * 2 + [("evidence", 1)] * 2 + [
        ("healed", None)
    ] * 2
    state.write_text("".join(json.dumps(r) + "\n" for r in rows[:-1]))
    main([*call, "--between", "0.3,0.9", "--state", str(state)])
    again = rows_of(state)
    assert [r["shape"] for r in again] == [r["shape"] for r in rows]
    assert again[-1]["key"] == pytest.approx(rows[-1]["key"], rel=1e-4)
    assert "Kendall's tau over 2 shapes" in capsys.readouterr().out
