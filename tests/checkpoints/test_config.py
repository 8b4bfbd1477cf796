"""Values of a config.json: of the right kind for every family, and of a size that the weights bear out."""

import json

import pytest

from leansurgeon import architectures
from leansurgeon.checkpoints.config import KINDS, check_kinds, check_sizes
from leansurgeon.checkpoints.family import convert_config
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel
from tests import conftest

WRONG = [
    {"rms_norm_eps": {}},
    {"architectures": "BertModel"},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": True},
    {"layer_norm_eps": float("inf")},
    {"id2label": ["a"]},
    {"sliding_window": [8, 8]},  # of a pyramid each stage may have a number; of these nothing has several
    {"max_position_embeddings": 64.5},
    {"relative_attention_max_distance": -(2**63)},
    {"num_labels": 10**9},  # a library would make a name for each
    {"vision_config": {"backbone_config": {"hidden_size": "x"}}},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_value_of_the_wrong_kind_is_named(change):
    with pytest.raises(UnsupportedModel) as refused:
        check_kinds({"model_type": "bert", "hidden_size": 32} | change)
    key = next(iter(change))
    assert key in refused.value.message and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "change",
    [
        {"max_position_embeddings": 1200.0},  # MusicFlamingo
        {"qkv_bias": [True, True, True]},  # CvT
        {"model_args": {"depth": [[2, 3, 0]]}},  # CrossViT: branches beside each other, one of which has no block
        {"model_args": {"mlp_ratios": [4, [4, 3, 3]]}},  # EfficientFormerV2
        {"down_ops": [["Subsample", 16, 8], ["Subsample", 16, 12]]},  # LeViT
    ],
    ids=str,
)
def test_what_some_libraries_write_is_of_the_right_kind(change):
    check_kinds({"model_type": "bert", "hidden_size": 32} | change)
    check_sizes(change, [(3000,)] * 5)
    with pytest.raises(UnsupportedModel):
        check_sizes({"depth": [[2, 3, 0], [1]]}, [(3000,)] * 5)


@pytest.mark.parametrize("family", conftest.FAMILIES)
def test_what_a_library_writes_is_of_the_right_kind(family):
    import transformers

    config_class, _, numbers = conftest.FAMILIES[family]
    config = getattr(transformers, config_class)(**numbers).to_dict()
    check_kinds(config)
    assert KINDS.keys() & config.keys()


def test_a_size_that_the_weights_do_not_bear_out_is_refused(saved):
    folder, model = saved("llama")
    config = json.loads((folder / "config.json").read_text())
    check_sizes(config, [tuple(p.shape) for p in model.parameters()])
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        (folder / "config.json").write_text(json.dumps(config | {key: 9_999}))
        with pytest.raises(UnsupportedModel, match="9999"):
            open_source(str(folder))


def test_words_of_pictures_need_no_tensor():
    """A published BEiT that tells 1,000 classes: 8,192 words, of which it has none."""
    config = {"model_type": "beit", "architectures": ["BeitForImageClassification"], "num_hidden_layers": 1}
    check_sizes(config | {"vocab_size": 8192, "image_size": 224, "hidden_size": 768}, [(768, 3072), (1000, 768)])


@pytest.mark.parametrize("key, value", [("num_hidden_layers", 9_999), ("hidden_size", 33)])
def test_sizes_of_a_part_of_a_model_are_looked_at_too(key, value):
    shapes = [(32, 16), (32,)]
    check_sizes({"text_config": {"num_hidden_layers": 2, "hidden_size": 32}}, shapes)
    with pytest.raises(UnsupportedModel, match=rf"\btext_config\.{key}\b.*\b{value}\b"):
        check_sizes({"text_config": {key: value}}, shapes)


def test_a_library_that_refuses_a_config_is_one_sentence(saved):
    from leansurgeon.checkpoints.model import load

    folder, _ = saved("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "no-such-function"}))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*no-such-function"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "flag"), [("bert", "is_decoder"), ("roberta", "add_cross_attention"), ("gpt2", "add_cross_attention")]
)
def test_flags_that_the_form_with_a_head_dim_does_not_know_are_refused(family, flag):
    """They were found when the result was reloaded, and the user was asked to report it."""
    source = architectures.of({"model_type": family})
    target = architectures.decoupled_form_of(source)
    with pytest.raises(UnsupportedModel, match=flag):
        convert_config({"model_type": family, flag: True}, source, target)
    convert_config({"model_type": family, flag: False}, source, target)
