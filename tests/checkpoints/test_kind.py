"""Which head a model has: what config.json names, against what the library itself finds missing while it loads."""

import json

import pytest
import torch
import transformers

from leansurgeon.checkpoints import kind
from leansurgeon.checkpoints.source import open_source

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
PAIRS = [  # the class that was saved, the class that config.json names, other keys
    ("BertModel", "BertForMaskedLM", {}),
    ("BertForPreTraining", "BertForMaskedLM", {}),
    ("BertForMaskedLM", "BertForSequenceClassification", {"num_labels": 3}),
    ("BertForSequenceClassification", "BertForSequenceClassification", {"num_labels": 3}),
    ("Qwen2Model", "Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    ("Qwen2Model", "Qwen2ForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("GPT2Model", "GPT2LMHeadModel", {}),
    ("ViTModel", "ViTForImageClassification", {"image_size": 16, "patch_size": 8}),
    ("ViTForImageClassification", "ViTForImageClassification", {"image_size": 16, "patch_size": 8}),
]


@pytest.mark.parametrize(("saved", "named", "keys"), PAIRS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_head_is_there_where_the_library_misses_none_of_it(saved, named, keys, tmp_path):
    cls = getattr(transformers, saved)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64} if "GPT2" in saved else SMALL
    cls(cls.config_class(**sizes, **keys)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    _, info = getattr(transformers, named).from_pretrained(tmp_path, output_loading_info=True)
    lacks = [name for name in info["missing_keys"] if "bias" not in name and "norm" not in name.lower()]
    source = open_source(str(tmp_path))
    assert source.has_head == (not lacks)
    body = saved.replace("ForMaskedLM", "Model").replace("ForCausalLM", "Model")
    assert kind.class_name(source.used_config) == (body if lacks else named)
    heads = {"Seq": "sequence-classification", "Image": "image-classification", "Masked": "masked-lm"}
    head = next((head for word, head in heads.items() if word in named), "causal-lm")
    assert source.head == ("features" if lacks and head.endswith("lm") else head)
    classifies = "Classification" in named and not lacks
    assert source.outputs == (source.config.get("num_labels") or len(config.get("id2label", "01")) if classifies else 0)


def test_modules_json_makes_a_complete_language_model_an_embedder(tmp_path):
    """As Qwen3-Embedding lies on the hub: its output is tied to the embedding, so that no tensor is missing."""
    config = transformers.Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    assert open_source(str(tmp_path)).head == "causal-lm"
    for last, head in (("SpladePooling", "causal-lm"), ("Pooling", "features")):
        modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
        modules += [{"idx": 1, "path": "1_Pooling", "type": f"sentence_transformers.models.{last}"}]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        source = open_source(str(tmp_path))
        assert source.head == head and source.has_head == (head == "causal-lm")


def test_asking_draws_no_random_numbers(tmp_path):
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    source, before = open_source(str(tmp_path)), torch.get_rng_state()
    config = source.config | {"architectures": ["BertForMaskedLM"]}
    lacking, body, _ = kind.random_weights(tmp_path, config, source.architecture)
    assert body == "BertModel" and lacking == ("cls.predictions.transform.dense.weight",)
    assert torch.get_rng_state().equal(before)
