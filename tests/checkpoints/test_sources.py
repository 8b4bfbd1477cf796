"""Sources that are not yet in a form that plain libraries load, and folders of our own, opened as a user would."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out
from tests.models.test_crammed_bert import published_config, published_tensors


def test_a_folder_in_the_published_crammed_bert_layout_is_converted_and_cut(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    save_file({k: np.asarray(v, np.float32) for k, v in published_tensors().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(published_config()))
    source = open_source(str(folder))
    assert source.architecture.name == "crammed_bert" and "published" in source.notes[0]

    depth = source.shape.depth
    same, wide = plan(source, RequestedShape()), plan(source, RequestedShape(heads="2x", head_dim="keep"))
    carry_out(DecidedCut(same), tmp_path / "same", check=False)  # `wide` is proved
    carry_out(DecidedCut(wide), tmp_path / "wide")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        before = load(tmp_path / "same").model.eval()(input_ids=ids).logits
        after = load(tmp_path / "wide").model.eval()(input_ids=ids).logits
    assert wide.after.depth == depth and torch.allclose(before, after, atol=1e-5)


def test_a_model_that_was_cut_before_can_be_cut_again_and_remembers_its_preset(tmp_path):
    first = open_source("digits-vit")
    carry_out(DecidedCut(plan(first, RequestedShape(layers="4"))), tmp_path / "once", check=False)
    again = open_source(str(tmp_path / "once"))
    assert again.preset.name == "digits-vit" and again.policy == "keep"
    steps = plan(again, RequestedShape(heads="8", layers="2"))
    record = carry_out(DecidedCut(steps), tmp_path / "twice", check=False)
    assert record.source.preset == "digits-vit" and steps.layers == (0, 3)
    assert [o.name for o in steps.operators] == ["drop-layers", "add-heads"]


def test_a_run_folder_means_its_best_model(tmp_path):
    first = open_source("digits-vit")
    carry_out(DecidedCut(plan(first, RequestedShape(layers="2"))), tmp_path / "run/model", check=False)
    assert open_source(str(tmp_path / "run")).shape.depth == 2


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
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=61
    )
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "bert")
    tensors = load_file(tmp_path / "bert/model.safetensors")
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for k, v in tensors.items()
    }
    save_torch(old, tmp_path / "bert/model.safetensors", metadata={"format": "pt"})
    changed = json.loads((tmp_path / "bert/config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "bert/config.json").write_text(json.dumps(changed))
    source = open_source(str(tmp_path / "bert"))
    masked = transformers.BertForMaskedLM(config)
    assert source.parameters.total == sum(p.numel() for p in masked.parameters())
    record = carry_out(DecidedCut(plan(source, RequestedShape(layers="1"))), tmp_path / "cut")
    assert "left out" in record.source.notes[0]


def test_what_was_never_trained_stays_fresh_and_the_history_is_kept(tmp_path):
    first = open_source("digits-vit")
    carry_out(DecidedCut(plan(first, RequestedShape(layers="4"))), tmp_path / "once", check=False)
    again = open_source(str(tmp_path / "once"))
    record = carry_out(DecidedCut(plan(again, RequestedShape(layers="2"))), tmp_path / "twice", check=False)
    assert record.initialised == "fresh" and len(record.history) == 2
    assert "newly initialised" in (tmp_path / "twice/README.md").read_text()
    trained = load(tmp_path / "once")
    trained.save(tmp_path / "trained")
    assert open_source(str(tmp_path / "trained")).learned and not again.learned


@pytest.mark.parametrize("where", ["source", "source/inside", "."])
def test_the_source_is_never_overwritten(where, tmp_path):
    first = open_source("digits-vit")
    carry_out(DecidedCut(plan(first, RequestedShape(layers="4"))), tmp_path / "source", check=False)
    source = open_source(str(tmp_path / "source"))
    with pytest.raises(UsageError, match="overlap"):
        carry_out(DecidedCut(plan(source, RequestedShape(layers="2"))), tmp_path / where, force=True, check=False)


BAD_CONFIGS = [
    {"intermediate_size": "64"},
    {"model_type": ["vit"]},
    {"quantization_config": "int8"},
    {"patch_size": "x"},
    {"hidden_size": True},
    {"num_attention_heads": 0},
    {"head_dim": -1},
]


@pytest.mark.parametrize("changes", BAD_CONFIGS, ids=str)
def test_config_values_of_the_wrong_kind_are_one_sentence(changes, tmp_path):
    first = open_source("digits-vit")
    carry_out(DecidedCut(plan(first, RequestedShape(layers="2"))), tmp_path / "m", check=False)
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModel):
        open_source(str(tmp_path / "m"))


def test_a_broken_surgery_record_and_a_shard_elsewhere(tmp_path):
    first = open_source("digits-vit")
    carry_out(DecidedCut(plan(first, RequestedShape(layers="2"))), tmp_path / "m", check=False)
    (tmp_path / "m/surgery.json").write_text('{"source": {"preset": ["a"]}}')
    assert open_source(str(tmp_path / "m")).preset is None
    (tmp_path / "m/model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="points outside"):
        open_source(str(tmp_path / "m"))


def test_embeddings_that_are_missing_are_noticed_before_anything_is_written(tmp_path):
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    first = open_source("digits-vit")
    carry_out(DecidedCut(plan(first, RequestedShape(layers="2"))), tmp_path / "m", check=False)
    tensors = load_file(tmp_path / "m/model.safetensors")
    tensors.pop("vit.embeddings.position_embeddings")
    save_torch(tensors, tmp_path / "m/model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"lack 'vit\.embeddings\.position_embeddings'"):
        open_source(str(tmp_path / "m"))


def test_a_pickle_keeps_its_own_name_and_hash(tmp_path):
    import hashlib

    first = open_source("digits-vit")
    carry_out(DecidedCut(plan(first, RequestedShape(layers="4"))), tmp_path / "m", check=False)
    from safetensors.torch import load_file

    torch.save(load_file(tmp_path / "m/model.safetensors"), tmp_path / "m/pytorch_model.bin")
    (tmp_path / "m/model.safetensors").unlink()
    source = open_source(str(tmp_path / "m"), allow_pickle=True)
    record = carry_out(DecidedCut(plan(source, RequestedShape(layers="2"))), tmp_path / "cut", check=False)
    digest = hashlib.sha256((tmp_path / "m/pytorch_model.bin").read_bytes()).hexdigest()
    assert record.source.name == "m"
    assert record.source.sha256 == {"pytorch_model.bin": digest}


def test_a_layer_whose_scale_depends_on_its_number_is_not_moved(tmp_path):
    from tests.conftest import build

    build("gpt2", scale_attn_by_inverse_layer_idx=True).save_pretrained(tmp_path / "m")
    source = open_source(str(tmp_path / "m"))
    with pytest.raises(UsageError, match="scale_attn_by_inverse_layer_idx"):
        plan(source, RequestedShape(layers="2"))
    assert plan(source, RequestedShape(heads="8", head_dim="keep")).exactness == "exact"
