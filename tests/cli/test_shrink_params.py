"""`shrink --params`, `judge`, and proofs that cannot flatter."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from scipy import stats

from leansurgeon.checkpoints.proof import reload_check
from leansurgeon.errors import UsageError
from leansurgeon.search.choose import budget_of
from tests.cli.answers import document, read, stderr_of, typed, works
from tests.support.models import strangers


@pytest.mark.parametrize(("text", "wanted"), [("-30%", 700), ("70 %", 700), ("600", 600), ("0.5K", 500)])
def test_a_number_of_parameters_is_a_share_or_a_number(text, wanted):
    assert budget_of(text, 1000) == wanted


@pytest.mark.parametrize("text", ["+30%", "100%", "0%", "-100%", "much"])
def test_what_leaves_nothing_or_more_is_refused(text):
    with pytest.raises(UsageError):
        budget_of(text, 1000)


def test_the_shape_is_chosen_by_what_its_refit_leaves(tmp_path):
    """Shapes of one size compete; the one that is taken is the best of those that were tried, and that is said."""
    source = strangers.encoder(tmp_path / "source")
    data = strangers.texts(tmp_path / "texts", lines=30)
    done = works(f"shrink {source} --params -30% --calibrate {data} --heal none --json -o {tmp_path}/lean")
    plan = json.loads(done.stdout)["plan"]
    before, after = (plan[f"parameters_{when}"]["total"] for when in ("before", "after"))
    assert 0.4 * before < after <= 0.7 * before
    taken, others = stderr_of(done).split("The others: ")
    best = re.search(r"cosine (0\.\d+) after a short refit", taken)
    scores = [float(score) for score in re.findall(r"%\) (0\.\d+)", others)]
    assert scores and float(best[1]) >= max(scores) and f"{after:,}" in taken


def test_another_domain_judges(tmp_path):
    source, data = strangers.encoder(tmp_path / "source"), strangers.texts(tmp_path / "texts", lines=20)
    other = strangers.texts(tmp_path / "other", lines=20) / "a.txt"
    works(f"shrink {source} --keep 0,1,3 --heal none --calibrate {data} -o {tmp_path}/lean")
    done = works(f"judge {tmp_path}/lean --data {other}")
    record = read(tmp_path / "lean" / "surgery.json")
    assert record["call"] == f"leansurgeon shrink source --calibrate {data.name} --keep 0,1,3 --heal none --out lean"
    assert list(record["judged"]) == [data.name, "own", other.name]  # the record does not say where they lie
    own, foreign = record["proof"]["compared"], record["judged"][other.name]
    assert own["embeddings"].keys() == foreign["embeddings"].keys() >= {"rank_correlation", "nearest_kept"}
    assert own["embeddings"]["cosine"] != foreign["embeddings"]["cosine"] and other.name in done.stdout
    refused = typed(f"judge {tmp_path}/lean --data {tmp_path}/nowhere.txt")
    assert refused.returncode == 2 and "nowhere.txt" in refused.stderr


def test_neighbours_are_those_of_scipy_and_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 6, generator=generator)
    b = a + 0.5 * torch.randn(40, 6, generator=generator)
    b[7] = b[8]  # equal similarities share a rank
    found = reload_check.neighbours(a, b)
    similar = []
    for x in (a.numpy().astype(float), b.numpy().astype(float)):
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        similar.append(x @ x.T)
    rows, columns = np.triu_indices(40, 1)
    wanted = stats.spearmanr(similar[0][rows, columns], similar[1][rows, columns]).statistic
    assert found["rank_correlation"] == pytest.approx(wanted, abs=1e-3)
    kept = []
    for i in range(40):
        near = [set(sorted((j for j in range(40) if j != i), key=lambda j: -s[i, j])[:10]) for s in similar]
        kept.append(len(near[0] & near[1]) / 10)
    assert found["nearest_kept"] == pytest.approx(np.mean(kept), abs=2.5e-3)
    same = {"rank_correlation": pytest.approx(1), "nearest_kept": 1, "nearest": 10}
    assert reload_check.neighbours(a, a) == same


def test_a_model_for_multiple_choice_is_proved(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=61,
        max_position_embeddings=40,
    )  # fmt: skip
    transformers.BertForMultipleChoice(config).save_pretrained(tmp_path / "source")
    strangers.words(tmp_path / "source")
    wish = "--heads 8 --head-dim split --uncalibrated"
    proof = document(f"shrink {tmp_path}/source {wish} -o {tmp_path}/more")["proof"]
    assert proof["output"] == [1, 2] and proof["finite"]


def test_ctrl_c_during_the_proof_keeps_the_result_unproved(tmp_path, monkeypatch):
    from leansurgeon.surgery import shrink

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    source = strangers.model(tmp_path / "source", "llama")
    monkeypatch.setattr(shrink, "prove", interrupted)
    done = typed(f"shrink {source} --keep 0,2 --uncalibrated -o {tmp_path}/lean")
    assert done.returncode == 130 and str(tmp_path / "lean") in done.stderr
    assert read(tmp_path / "lean" / "surgery.json")["proof"] is None
