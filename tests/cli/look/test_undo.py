"""`leansurgeon undo`: every tensor of the source again, bit by bit, and a sentence where that cannot be."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.record import Proof
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.surgery import undo
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.transfer import FRESH
from tests import conftest
from tests.checkpoints.test_skeleton import TIMM, make
from tests.cli.look.test_diff import cut
from tests.support.command_line import leansurgeon

ADD, SPLIT = Method(), Method(more="split")


def undone(folder, out):
    return undo.carry_out(undo.plan_undo(open_source(str(folder))), out)


def equal(a, b):
    one, other = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("family", conftest.KEEP)
def test_added_heads_and_units_go_again(family, saved, tmp_path):
    folder, _ = saved(family)
    mlp = {"gpt2": "160"}.get(family, "64")
    cut(folder, tmp_path / "wide", ADD, heads="2x", head_dim="keep", mlp_dim=mlp)
    record = undone(tmp_path / "wide", tmp_path / "back")
    assert record.decided.verified.by == "sha256" and record.proof is None
    assert equal(folder, tmp_path / "back")
    first, again = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "back"))
    assert first == again  # the library's own family again, too
    assert {o.name for o in record.plan.operators} <= {"undo-add-heads", "undo-widen-mlp"}


def test_the_config_in_a_record_is_as_foreign_as_any(saved, tmp_path):
    """It becomes the config.json of what is undone, and a library reads it in the proof."""
    folder, _ = saved("llama")
    cut(folder, tmp_path / "wide", ADD, heads="8")
    file = tmp_path / "wide" / "surgery.json"
    record = json.loads(file.read_text())
    for change in ({"attn_implementation": "somebody/kernel"}, {"transformers_weights": "x.safetensors"}):
        file.write_text(json.dumps(record | {"source_config": record["source_config"] | change}))
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            undone(tmp_path / "wide", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "qwen3"])
def test_children_are_joined_again(family, saved, tmp_path):
    folder, _ = saved(family)
    cut(folder, tmp_path / "split", SPLIT, heads="2x", head_dim="keep")
    undone(tmp_path / "split", tmp_path / "back")
    assert equal(folder, tmp_path / "back")


@pytest.mark.parametrize("key", TIMM)
def test_timm_models_too(key, tmp_path):
    source, _ = make(key, tmp_path / "source")
    wanted = {"heads": "2x", "head_dim": "keep", "class_attention": key in ("timm-xcit", "timm-cait")}
    if not (source.architecture.stores_head_dim or source.architecture.decoupled):
        wanted = {"mlp_ratio": 3}
    cut(tmp_path / "source", tmp_path / "wide", ADD, **wanted)
    undone(tmp_path / "wide", tmp_path / "back")
    assert equal(tmp_path / "source", tmp_path / "back")


def test_a_chain_is_undone_step_by_step(saved, tmp_path):
    folder, _ = saved("llama")
    cut(folder, tmp_path / "wide", ADD, heads="8")
    cut(tmp_path / "wide", tmp_path / "wider", SPLIT, heads="16", mlp_dim="96")
    undone(tmp_path / "wider", tmp_path / "one")
    assert equal(tmp_path / "wide", tmp_path / "one")
    undone(tmp_path / "one", tmp_path / "two")
    assert equal(folder, tmp_path / "two")
    with pytest.raises(UsageError, match=r"\btwo\b.*\bundo\b"):
        undone(tmp_path / "two", tmp_path / "three")


def test_reloaded_if_the_bytes_are_others(saved, tmp_path, monkeypatch):
    """A file that another program wrote cannot be had byte for byte; its tensors can."""
    folder, model = saved("vit")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "by": "somebody"})
    cut(folder, tmp_path / "wide", ADD, heads="8")
    asked = {}

    def prove(result, parameters, *, source, exact, families):
        asked.update(parameters=parameters, source=source, exact=exact)
        return Proof("a stand-in", parameters)

    monkeypatch.setattr(undo, "prove", prove)
    record = undone(tmp_path / "wide", tmp_path / "back")
    assert record.decided.verified.by == "reload" and equal(folder, tmp_path / "back")
    count = sum(p.numel() for p in model.parameters())
    assert asked == {"parameters": count, "source": tmp_path / "wide", "exact": True}


def test_the_command_and_its_sentences(saved, tmp_path):
    folder, model = saved("bert")
    cut(folder, tmp_path / "wide", ADD, heads="8", head_dim="keep")
    code, out, err = leansurgeon("undo", tmp_path / "wide", "-o", tmp_path / "back", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["plan"]["exactness"] == "exact" and document["verified"]["by"] == "sha256"
    inputs = conftest.example(model)
    with torch.no_grad():
        assert torch.equal(*(conftest.output(m, inputs) for m in (model, load(tmp_path / "back").model.eval())))
    code, out, _ = leansurgeon("undo", tmp_path / "wide", "-o", tmp_path / "again")
    assert code == 0 and "bit for bit" in " ".join(out.split())

    def refused(model, words):
        code, out, err = leansurgeon("undo", model, "-o", tmp_path / "never")
        assert code == 2 and words in err and not out and not (tmp_path / "never").exists()

    refused(folder, "no surgery.json")
    cut(folder, tmp_path / "short", ADD, heads="8", head_dim="keep", layers="2", mlp_dim="24")
    refused(tmp_path / "short", "drop-layers cannot be undone, because it discards weights: keep 2 of 4 layers")
    cut(folder, tmp_path / "narrow", ADD, mlp_dim="24")
    refused(tmp_path / "narrow", "trim-mlp cannot be undone")
    cut(folder, tmp_path / "fresh", ADD, heads="8", init="fresh-attention", head_dim="split")
    refused(tmp_path / "fresh", "fresh-attention cannot be undone")
    cut(folder, tmp_path / "even", Method(balance=True))
    refused(tmp_path / "even", "balance cannot be undone to the bit")
    (tmp_path / "trained").mkdir()
    load(tmp_path / "wide").save(tmp_path / "trained")
    refused(tmp_path / "trained", "was trained after add-heads")


def test_a_model_that_has_moved_on_is_refused_whatever_its_record_says(saved, tmp_path):
    folder, _ = saved("llama")
    for name, what, method in (("o_proj", "silent", ADD), ("q_proj", "a copy", SPLIT)):
        out = tmp_path / name
        cut(folder, out, method, heads="8")
        tensors = load_file(out / "model.safetensors")
        tensors[f"model.layers.2.self_attn.{name}.weight"][0] += 1e-3
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError, match=rf"layers\.2\.self_attn\.{name}\.weight'"):
            undone(out, tmp_path / "never")
        assert what and not (tmp_path / "never").exists()


def test_a_head_that_has_begun_to_hear_a_new_one_cannot_be_undone():
    """CaiT mixes the scores of its heads: new rows may say anything, the new columns of old rows stay zero."""
    old, picks = np.eye(2, dtype=np.float32), [np.array([0, 1, FRESH])] * 2
    new = np.ones((3, 3), np.float32)
    new[:2] = np.eye(2, 3)
    assert undo.is_untouched(new, old, picks, "head_mix")
    new[0, 2] = 0.1
    assert not undo.is_untouched(new, old, picks, "head_mix")
