"""The verdict on a result from the accounts of the fresh process; the process itself runs in every test of surgery."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from scipy import stats

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.proof import prove, reload_check
from leansurgeon.checkpoints.record import PairedFigure
from leansurgeon.errors import LeanSurgeonError
from tests.conftest import build
from tests.support.command_line import leansurgeon
from tests.support.processes import proofs

RESULT = {"output": [2, 5, 7], "count": 8, "loss_sum": 4.0, "right": 6, "finite": True}
RESULT |= {"samples": [[1.0, 4, 3], [3.0, 4, 3]], "valued": []}  # loss, labels and right answers of each sample
SAME = {"rows": 10, "max_difference": 1e-5, "spread": 2.0, "relative_error": 1e-6, "cosine": 1.0}
SOURCE = RESULT | {"loss_sum": 2.0, "differences": SAME, "samples": [[0.5, 4, 3], [1.5, 4, 3]]}


def test_what_is_compared():
    found = prove.against(SOURCE, RESULT, "held-out data", exact=True)
    assert found.done and (found.loss.source, found.loss.result, found.scored) == (0.25, 0.5, 8)
    wanted = stats.ttest_rel([1.0 / 4, 3.0 / 4], [0.5 / 4, 1.5 / 4]).confidence_interval(0.95)
    assert (found.loss.low, found.loss.high) == pytest.approx((wanted.low, wanted.high))
    assert found.accuracy == PairedFigure(0.75, 0.75, 0.0, 0.0) and found.data == "held-out data"
    alone = [account | {"samples": account["samples"][:1]} for account in (SOURCE, RESULT)]
    assert prove.against(*alone, "noise", exact=True).loss == PairedFigure(0.25, 0.5)  # of one sample nothing is known


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"trouble": "OSError: no file"}, r"OSError: no file"),
        (SOURCE | {"output": [2, 5, 8]}, r"\[2, 5, 7\].*\[2, 5, 8\]"),
        (SOURCE | {"finite": False}, r"\bsource\b.*NaN"),
    ],
    ids=["unloadable", "other-output", "nan"],
)
def test_a_source_that_nothing_can_be_compared_with(source, why):
    found = prove.against(source, RESULT, "noise", exact=True)
    assert not found.done and re.search(why, found.why)


def test_an_exact_plan_may_err_by_rounding_only():
    far = SOURCE | {"differences": SAME | {"max_difference": 3e-4}}
    assert prove.against(far, RESULT, "noise", exact=False).done
    with pytest.raises(LeanSurgeonError, match=r"0\.0003.*\b2\b"):
        prove.against(far, RESULT, "noise", exact=True)


def test_what_the_source_lacks_too_is_no_fault_of_the_result():
    """An encoder that was saved without its pooler, whose 1,056 parameters the library makes anew."""
    pooler = ["pooler.dense.bias", "pooler.dense.weight"]
    account = {"missing": pooler, "unexpected": [], "parameters": 3056, "missing_parameters": 1056, "finite": True}
    prove.check(account, 2000, pooler)
    for lacking, parameters, wrong in (
        (pooler[:1], 3056, r"1 tensors.*pooler\.dense\.weight"),
        (pooler, 2001, "3,056.*3,057"),
    ):
        with pytest.raises(LeanSurgeonError, match=wrong):
            prove.check(account, parameters, lacking)


def test_an_encoder_without_a_pooler_is_cut(tmp_path):
    source = transformers.BertModel(build("bert").config, add_pooling_layer=False)
    source.save_pretrained(tmp_path / "source")
    more_heads = ("--heads", 8, "--head-dim", "keep")
    done = leansurgeon("shrink", tmp_path / "source", *more_heads, "--uncalibrated", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    proof = record.read(tmp_path / "out").proof
    assert proof.missing == ("pooler.dense.bias", "pooler.dense.weight") and "pooler.dense.bias" in done.stdout
    assert proof.compared.max_difference <= 1e-4 * proof.compared.spread


def test_a_source_that_does_not_load_does_not_hide_that_the_result_does(saved, tmp_path):
    folder, model = saved("bert")
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    account = prove.prove(folder, sum(p.numel() for p in model.parameters()), source=broken)
    assert account.finite and not account.missing
    assert re.search(r"\bsource\b.*Error", account.compared.why, re.S)


def test_a_fork_says_what_a_process_of_its_own_says_with_all_weights_in_memory_or_few(saved, tmp_path, monkeypatch):
    """Elsewhere proofs are forked (`support/processes/proofs.py`). The result brings its modelling file and has tied
    tables; what does not fit the memory is read from the disk as it is needed.
    """
    folder, model = saved("gpt2")
    more_heads = ("--heads", "8", "--head-dim", "keep", "--no-proof")
    assert leansurgeon("shrink", folder, *more_heads, "-o", tmp_path / "out").returncode == 0
    said = prove.run(tmp_path / "out", folder, None, "plain")
    assert said[0]["source"]["differences"]["rows"] > 0
    assert said[0]["source"]["parameters"] == sum(p.numel() for p in model.parameters())
    monkeypatch.setattr("subprocess.run", proofs.own_process)
    monkeypatch.setattr(prove, "ROOM", 2**12)
    assert prove.run(tmp_path / "out", folder, None, "plain")[0] == said[0]


def test_differences_are_those_of_torch():
    draws = torch.Generator().manual_seed(0)
    a, b = (torch.randn(700, 5, generator=draws) for _ in range(2))
    found = reload_check.differences([a, a[:9]], [b, b[:9]])
    assert found["rows"] == 700 and found["max_difference"] == pytest.approx(float((a - b).abs().max()))
    assert found["spread"] == pytest.approx(float(a.double().std(correction=0)))
    assert found["relative_error"] == pytest.approx(float((a - b).double().norm() / a.double().norm()))
    cosines = torch.nn.functional.cosine_similarity(a.double(), b.double())
    assert found["cosine"] == pytest.approx(float(cosines.mean()))
    assert found["embeddings"]["cosine"] == pytest.approx(float(cosines[:9].mean()))
    assert found["embeddings"]["samples"] == 9


def mixtral(folder: Path) -> torch.nn.Module:
    """A model with experts, which the library merges while it loads."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(folder)
    return model


def test_weights_beyond_the_room_stay_on_the_disk_and_the_account_is_the_same(tmp_path, monkeypatch):
    folder, model = tmp_path, mixtral(tmp_path)
    places, run = [], reload_check.run

    def noting(model: torch.nn.Module, *rest: object):
        places.append(set(getattr(model, "hf_device_map", {"": "cpu"}).values()))
        return run(model, *rest)

    monkeypatch.setattr(reload_check, "run", noting)
    how, asked = prove.how_to_load(folder), {"inputs": None, "kind": "plain", "offload": str(tmp_path / "disk")}
    few, many = (reload_check.examine_folder(how, asked | {"room": room}) for room in (2**12, 2**40))
    assert places[0] >= {"disk"} and places[1] == {"cpu"}
    assert few[0] == many[0] and few[0]["parameters"] == sum(p.numel() for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*(outputs[0] for _, outputs in (few, many)), strict=True))
