"""Sources that are not yet in a form that plain libraries load, and folders of our own, opened as a user would."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out
from tests.models.test_crammed_bert import published_config, published_tensors


def cut(source: str | Path, out: Path, **wanted: str) -> SurgeryRecord:
    return carry_out(DecidedCut(plan(open_source(str(source)), RequestedShape(**wanted))), out, check=False)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """A cut of a preset, never trained."""
    out = tmp_path_factory.mktemp("sources") / "m"
    cut("digits-vit", out, layers="4")
    return out


@pytest.fixture
def own(digits, tmp_path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(digits, tmp_path / "m"))


def test_a_folder_in_the_published_crammed_bert_layout_is_converted_and_cut(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    save_file({k: np.asarray(v, np.float32) for k, v in published_tensors().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(published_config()))
    source = open_source(str(folder))
    assert source.architecture.name == "crammed_bert" and "published" in source.notes[0]

    record = carry_out(DecidedCut(plan(source, RequestedShape(heads="2x", head_dim="keep"))), tmp_path / "wide")
    assert record.proof.compared.done and record.plan.exactness == "exact"


def test_a_model_that_was_cut_before_remembers_its_preset_and_what_was_never_trained(digits, tmp_path):
    again = open_source(str(digits))
    assert again.preset.name == "digits-vit" and again.policy == "keep" and not again.learned
    record = cut(digits, tmp_path / "twice", heads="8", layers="2")
    assert record.source.preset == "digits-vit" and record.plan.layers == (0, 3)
    assert [o.name for o in record.plan.operators] == ["drop-layers", "add-heads"]
    assert record.initialised == "fresh" and len(record.history) == 2
    assert "newly initialised" in (tmp_path / "twice/README.md").read_text()
    load(digits).save(tmp_path / "trained")
    assert open_source(str(tmp_path / "trained")).learned


def test_a_run_folder_means_its_best_model(digits, tmp_path):
    shutil.copytree(digits, tmp_path / "run/model")
    assert open_source(str(tmp_path / "run")).shape.depth == 4


def test_config_keys_of_a_preset_can_be_changed_and_others_not():
    small = open_source("austen-gpt", config_changes={"hidden_size": 48, "num_hidden_layers": 2})
    assert (small.shape.stages[0].width, small.shape.depth) == (48, 2)
    with pytest.raises(UsageError, match="did you mean 'hidden_size'"):
        open_source("austen-gpt", config_changes={"hiden_size": 48})


def test_a_folder_without_config_and_a_config_that_is_no_json(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        open_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not valid JSON"):
        open_source(str(tmp_path))


def test_old_names_and_unread_heads_of_published_bert_files(tmp_path):
    """bert-base-uncased has LayerNorm.gamma and beta, a pooler and a next-sentence head beside the masked-LM head."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=61
    )
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "bert")
    tensors = load_file(tmp_path / "bert/model.safetensors")
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for k, v in tensors.items()
    }
    save_file(old, tmp_path / "bert/model.safetensors", metadata={"format": "pt"})
    changed = json.loads((tmp_path / "bert/config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "bert/config.json").write_text(json.dumps(changed))
    source = open_source(str(tmp_path / "bert"))
    masked = transformers.BertForMaskedLM(config)
    assert source.parameters.total == sum(p.numel() for p in masked.parameters())
    record = carry_out(DecidedCut(plan(source, RequestedShape(layers="1"))), tmp_path / "cut")
    assert "left out" in record.source.notes[0]


def test_the_source_is_never_overwritten(own):
    for where in (own, own / "inside", own.parent):
        with pytest.raises(UsageError, match="overlap"):
            steps = plan(open_source(str(own)), RequestedShape(layers="2"))
            carry_out(DecidedCut(steps), where, force=True, check=False)


def test_a_broken_surgery_record_and_a_shard_elsewhere(own, tmp_path):
    (own / "surgery.json").write_text('{"source": {"preset": ["a"]}}')
    assert open_source(str(own)).preset is None
    (own / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (own / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="points outside"):
        open_source(str(own))


def test_embeddings_that_are_missing_are_noticed_before_anything_is_written(own):
    tensors = load_file(own / "model.safetensors")
    tensors.pop("vit.embeddings.position_embeddings")
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"lack 'vit\.embeddings\.position_embeddings'"):
        open_source(str(own))


def test_a_pickle_keeps_its_own_name_and_hash(own, tmp_path):
    tensors = load_file(own / "model.safetensors")
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, own / "pytorch_model.bin")
    (own / "model.safetensors").unlink()
    steps = plan(open_source(str(own), allow_pickle=True), RequestedShape(layers="2"))
    record = carry_out(DecidedCut(steps), tmp_path / "cut", check=False)
    digest = hashlib.sha256((own / "pytorch_model.bin").read_bytes()).hexdigest()
    assert (record.source.name, record.source.sha256) == ("m", {"pytorch_model.bin": digest})


def test_a_layer_whose_scale_depends_on_its_number_is_not_moved(saved):
    folder, _ = saved("gpt2", scale_attn_by_inverse_layer_idx=True)
    source = open_source(str(folder))
    with pytest.raises(UsageError, match="scale_attn_by_inverse_layer_idx"):
        plan(source, RequestedShape(layers="2"))
    assert plan(source, RequestedShape(heads="8", head_dim="keep")).exactness == "exact"
