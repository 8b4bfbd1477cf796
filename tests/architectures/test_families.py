"""Every declared Hugging Face family against the library's own files: names, shapes, counts, modules."""

import re
from dataclasses import replace

import pytest
import torch

from leansurgeon import architectures
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.shape import Shape, Stage
from tests.architectures.test_encoder_decoder import rewrite
from tests.conftest import FAMILIES, NARROW_MLP, architecture
from tests.support.published import with_tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_declaration_matches_what_the_library_writes_and_builds(family, saved):
    folder, model = saved(family)
    source = open_source(str(folder))
    arch, stage, config = source.architecture, source.shape.stages[0], source.config
    assert arch is architecture(family)
    assert {s.name for s in source.specs if s.role != "tied"} == set(source.weights.entries)
    assert source.parameters.total == sum(p.numel() for p in model.parameters())
    declared = {s.name: s.shape for s in arch.tensors(config)}
    stored = source.weights.shapes
    assert all(declared[name] == stored[name] for name in declared.keys() & stored.keys())
    roles = {s.role for s in source.specs if s.layer is not None}
    assert {"o", "up", "down", "norm"} <= roles and ({"q", "k", "v"} <= roles or "qkv" in roles)
    assert not roles & {"head", "embedding"}
    # The module whose input is the attention block; a decoder beside an encoder has two attentions a layer.
    loaded = load(folder)
    assert len(loaded.projections) == (3 if model.config.is_encoder_decoder else 1) * stage.depth
    for name in loaded.projections:
        assert set(loaded.model.get_submodule(name).weight.shape) == {stage.inner, stage.width}
    # The config of another shape gives as many parameters in the library as are declared.
    kv_heads, mlp_dim = 8 if stage.kv_heads == stage.heads else 2, NARROW_MLP.get(family, 24)
    other = replace(stage, depth=2, heads=8, kv_heads=kv_heads, mlp_dim=mlp_dim)
    if not arch.stores_head_dim:
        other = replace(other, head_dim=stage.width // 8)
    config = arch.with_shape(config, Shape((other,) * len(source.shape.stages)), layers=(1, 3))
    with torch.device("meta"):
        built = type(model)(type(model.config).from_dict(config))
    in_blocks = sum(p.numel() for n, p in built.named_parameters() if re.search(r"\.(layers?|h|block)\.\d+\.", n))
    assert sum(s.size for s in arch.tensors(config) if s.layer is not None) == in_blocks


VARIANTS = [
    ("electra", dict(embedding_size=32)),
    ("modernbert", dict(norm_bias=False, attention_bias=True, mlp_bias=True)),
    ("dinov3_vit", dict(num_register_tokens=0)),
    ("dinov2_with_registers", dict(num_register_tokens=0)),
    ("dinov3_vit", dict(use_gated_mlp=False, key_bias=True, mlp_bias=False)),
    ("siglip_vision_model", dict(vision_use_head=False)),
    ("opt", dict(word_embed_proj_dim=32, do_layer_norm_before=False)),
    ("opt", dict(enable_bias=False, layer_norm_elementwise_affine=False)),
    ("gpt_neox", dict(attention_bias=False, tie_word_embeddings=True)),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_parts_that_a_config_switches(family, changes, saved):
    folder, model = saved(family, **changes)
    source = open_source(str(folder))
    prefix = "" if family in ("siglip_vision_model", "dinov3_vit") else source.architecture.prefixes[0]
    declared = {s.name for s in source.architecture.tensors(source.config, prefix=prefix)}
    assert {n for n in source.weights.entries if n.startswith(prefix)} <= declared
    assert declared <= set(source.weights.entries)
    assert source.parameters.total == sum(p.numel() for p in model.parameters())


def reshaped(folder, layers=None, **numbers):
    """The config of a model folder for another shape."""
    source = open_source(str(folder))
    return source.architecture.with_shape(source.config, source.shape.with_(**numbers), layers=layers)


def test_lists_with_one_entry_a_layer_follow_the_kept_layers(saved):
    folder, _ = saved("smollm3", no_rope_layers=[1, 0, 1, 0])
    config = reshaped(folder, (1, 2), depth=2)
    assert config["no_rope_layers"] == [0, 1] and len(config["layer_types"]) == 2


def test_a_rule_for_layers_becomes_a_list_when_layers_go(saved):
    """Early ModernBERT files give the interval of the layers that see everything, and a cut breaks the interval."""
    folder, _ = saved("modernbert")
    rewrite(folder, ("layer_types",), global_attn_every_n_layers=3)
    assert reshaped(folder, (0, 3), depth=2)["layer_types"] == ["full_attention", "full_attention"]


def test_a_head_dim_that_only_rotary_positions_read_does_not_outlive_the_heads(saved):
    folder, _ = saved("modernbert")
    rewrite(folder, head_dim=8)
    assert "head_dim" not in reshaped(folder, heads=8, kv_heads=8, head_dim=4)


def test_names_of_stages_do_not_outlive_their_layers(saved):
    folder, model = saved("dinov2")
    rebuilt = type(model.config).from_dict(reshaped(folder, depth=2))
    assert rebuilt.stage_names == ["stem", "stage1", "stage2"] and rebuilt.out_features == ["stage2"]


def test_an_mlp_that_a_whole_ratio_cannot_hold_is_refused(saved):
    with pytest.raises(UsageError, match=r"\b48\b.*\b32\b.*\b32\b.*\b64\b"):
        reshaped(saved("dinov2")[0], mlp_dim=48)


def test_a_file_may_leave_out_what_the_library_takes_for_granted(saved):
    folder, model = saved("vit")
    rewrite(folder, ("qkv_bias",))  # as in google/vit-base-patch16-224
    assert open_source(str(folder)).parameters.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 3}, "the weights hold"),
        ({"num_hidden_layers": 5}, r"\black \d+ tensors that 5 layers\b.*\blayer\.4\."),
        ({"intermediate_size": 50}, "asks for"),
    ],
)
def test_config_and_weights_that_disagree_are_refused(changes, says, saved):
    folder, _ = saved("bert")
    rewrite(folder, **changes)
    with pytest.raises(UnsupportedModel, match=says):
        open_source(str(folder))


def test_shape_arithmetic_refuses_what_cannot_be():
    with pytest.raises(Exception, match=r"\b10\b.*\b4\b.*key/value.*\b8\b.*\b12\b"):
        Shape((Stage(2, 10, 8, 4, 16, 32),))
    with pytest.raises(Exception, match=r"\bdepth\b.*\b1\b"):
        Shape((Stage(0, 8, 8, 4, 16, 32),))


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("bert", "bert.embeddings.position_ids", torch.arange(40)[None]),
        ("gpt2", "transformer.h.0.attn.bias", torch.ones(1, 1, 40, 40).bool()),
    ],
)
def test_constants_of_old_files_are_no_parameters(family, name, value, saved):
    """transformers 4 saved BERT's position_ids and GPT-2's causal mask with the weights."""
    folder, model = saved(family)
    source = open_source(str(with_tensors(folder, {name: value})))
    assert source.parameters.total == sum(p.numel() for p in model.parameters())
    assert name not in {s.name for s in source.specs}


def test_norms_of_opt_stand_where_its_config_says():
    """OPT-350m is post-norm, all other sizes are pre-norm, which is also the library's default."""
    norms = [architectures.of({"model_type": "opt"} | more).norm for more in ({}, {"do_layer_norm_before": False})]
    assert norms == ["pre", "post"]


@pytest.mark.parametrize(
    ("family", "wrong"),
    [("qwen2", {"num_hidden_layers": []}), ("t5", {"vocab_size": [61]}), ("bert", {"type_vocab_size": []})],
)
def test_a_list_of_another_length_than_the_stages_is_refused(family, wrong, saved):
    """Two of 20,000 malformed configs ended in an IndexError."""
    config = rewrite(saved(family)[0], **wrong)
    with pytest.raises(UnsupportedModel):
        list(architectures.of(config).tensors(config))
