"""`leansurgeon undo`: every tensor of the source again, bit by bit, and a sentence where that cannot be."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.surgery import undo
from leansurgeon.surgery.method import Method
from tests import conftest
from tests.checkpoints.test_skeleton import TIMM, make
from tests.cli.answers import document, read, stdout_of, typed, works
from tests.cli.look.test_diff import cut

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
    first, again = (read(f / "config.json") for f in (folder, tmp_path / "back"))
    assert first == again  # the library's own family again, too
    assert {o.name for o in record.plan.operators} <= {"undo-add-heads", "undo-widen-mlp"}


def test_the_config_in_a_record_is_as_foreign_as_any(saved, tmp_path):
    """It becomes the config.json of what is undone, and a library reads it in the proof."""
    folder, _ = saved("llama")
    cut(folder, tmp_path / "wide", ADD, heads="8")
    file = tmp_path / "wide" / "surgery.json"
    record = read(file)
    for change in ({"attn_implementation": "somebody/kernel"}, {"transformers_weights": "x.safetensors"}):
        file.write_text(json.dumps(record | {"source_config": record["source_config"] | change}))
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            undone(tmp_path / "wide", tmp_path / "back")
    assert not (tmp_path / "back").exists()


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


def test_reloaded_if_the_bytes_are_others(saved, tmp_path):
    """A file that another program wrote cannot be had byte for byte; its tensors can."""
    folder, model = saved("vit")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "by": "somebody"})
    cut(folder, tmp_path / "wide", ADD, heads="8")
    record = undone(tmp_path / "wide", tmp_path / "back")
    assert record.decided.verified.by == "reload" and equal(folder, tmp_path / "back")
    assert record.proof.parameters == sum(p.numel() for p in model.parameters())
    assert record.proof.compared.max_difference <= 1e-4 * record.proof.compared.spread


def test_the_command_and_its_sentences(saved, tmp_path):
    folder, model = saved("bert")
    cut(folder, tmp_path / "wide", ADD, heads="8", head_dim="keep")
    found = document(f"undo {tmp_path}/wide -o {tmp_path}/back")
    assert found["plan"]["exactness"] == "exact" and found["verified"]["by"] == "sha256"
    inputs = conftest.example(model)
    with torch.no_grad():
        assert torch.equal(*(conftest.output(m, inputs) for m in (model, load(tmp_path / "back").model.eval())))
    assert "bit for bit" in stdout_of(works(f"undo {tmp_path}/wide -o {tmp_path}/again"))


@pytest.mark.parametrize(
    ("shape", "method", "says"),
    [
        ({}, None, "no surgery.json"),
        ({"heads": "8", "head_dim": "keep", "layers": "2"}, ADD, "drop-layers cannot be undone, because it discards"),
        ({"mlp_dim": "24"}, ADD, "trim-mlp cannot be undone"),
        ({"heads": "8", "head_dim": "split", "init": "fresh-attention"}, ADD, "fresh-attention cannot be undone"),
        ({}, Method(balance=True), "balance cannot be undone to the bit"),
    ],
)
def test_what_cannot_be_undone_is_one_sentence(shape, method, says, saved, tmp_path):
    folder, _ = saved("bert")
    if method:
        cut(folder, tmp_path / "made", method, **shape)
    done = typed(f"undo {tmp_path / 'made' if method else folder} -o {tmp_path}/never")
    assert done.returncode == 2 and says in done.stderr and not done.stdout and not (tmp_path / "never").exists()


def test_what_was_trained_cannot_be_undone(saved, tmp_path):
    folder, _ = saved("bert")
    cut(folder, tmp_path / "wide", ADD, heads="8", head_dim="keep")
    (tmp_path / "trained").mkdir()
    load(tmp_path / "wide").save(tmp_path / "trained")
    done = typed(f"undo {tmp_path}/trained -o {tmp_path}/never")
    assert done.returncode == 2 and "was trained after add-heads" in done.stderr


def test_a_model_that_has_moved_on_is_refused_whatever_its_record_says(saved, tmp_path):
    folder, _ = saved("llama")
    for name, method in (("o_proj", ADD), ("q_proj", SPLIT)):
        out = tmp_path / name
        cut(folder, out, method, heads="8")
        tensors = load_file(out / "model.safetensors")
        tensors[f"model.layers.2.self_attn.{name}.weight"][0] += 1e-3
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError, match=rf"layers\.2\.self_attn\.{name}\.weight'"):
            undone(out, tmp_path / "never")
        assert not (tmp_path / "never").exists()
