"""Checkpoints with more tensors, or other ones, than their class would save: cut as the library reads them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from leansurgeon import architectures
from leansurgeon.architectures import infer
from leansurgeon.checkpoints.source import open_source
from leansurgeon.checkpoints.weights import Weights
from leansurgeon.errors import UnsupportedModel
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import unread
from tests.support.command_line import leansurgeon
from tests.support.published import SMALL, TOKENS, load, saved, skipping, with_tensors

IDS = torch.arange(10, 34).reshape(2, 12)


def cut(folder, tmp_path, *more):
    done = leansurgeon("shrink", folder, "--uncalibrated", "-o", tmp_path / "cut", *more)
    assert done.returncode == 0, done.stderr
    return done, tmp_path / "cut"


def count(folder):
    return sum(p.numel() for p in load(folder).parameters())


def printed(done):
    """The number of parameters that the verification names."""
    return int(re.search(r"([\d,]+) parameters, no missing", done.stdout)[1].replace(",", ""))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """As in GLM-4.5: behind the last layer that its config counts, and at the number that its class passes over."""
    config = transformers.Glm4MoeConfig(
        **SMALL, **TOKENS, num_hidden_layers=4, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16,
        n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, num_nextn_predict_layers=1,
    )  # fmt: skip
    folder = saved(transformers.Glm4MoeForCausalLM(config), tmp_path / "glm", num_nextn_predict_layers=1)
    source = load(folder)
    further = {"eh_proj.weight": torch.randn(32, 64), "enorm.weight": torch.randn(32)}
    places = ("model.layers.4.", "model.layers.46.")
    with_tensors(folder, {place + name: t.clone() for place in places for name, t in further.items()})
    done, made = cut(folder, tmp_path, "--keep", "0,1,3")
    assert "4 tensors that Glm4MoeForCausalLM does not read are left out" in done.stderr
    assert printed(done) == count(made)
    by_hand = skipping(source, source.model.layers, {0, 1, 3}, input_ids=IDS)
    with torch.no_grad():
        assert torch.allclose(load(made)(input_ids=IDS)[0], by_hand, atol=1e-5)
    assert json.loads((made / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_an_output_that_is_not_the_embedding_its_config_says_it_is(tmp_path):
    config = transformers.Qwen2Config(
        **SMALL, **TOKENS, num_hidden_layers=4, num_key_value_heads=2, tie_word_embeddings=False
    )
    folder = saved(transformers.Qwen2ForCausalLM(config), tmp_path / "qwen", tie_word_embeddings=True)
    assert not torch.equal(load(folder).lm_head.weight, load(folder).model.embed_tokens.weight)
    done, made = cut(folder, tmp_path, "--keep", "0,1,3")
    source, result = load(folder), load(made)
    assert printed(done) == count(made)
    assert torch.equal(result.lm_head.weight, source.lm_head.weight)
    assert json.loads((made / "config.json").read_text())["tie_word_embeddings"] is False
    by_hand = skipping(source, source.model.layers, {0, 1, 3}, input_ids=IDS)
    with torch.no_grad():
        assert torch.allclose(result(input_ids=IDS)[0], by_hand, atol=1e-5)


def test_parameters_that_are_neither_saved_nor_loaded_stay_as_the_library_makes_them(tmp_path):
    """Marian's positions. The cut by hand is exact, and so is the one here."""
    config = transformers.MarianConfig(
        vocab_size=160, decoder_vocab_size=160, d_model=32, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=3, decoder_layers=4, max_position_embeddings=64,
        decoder_start_token_id=1, forced_eos_token_id=1, **TOKENS,
    )  # fmt: skip
    folder = saved(transformers.MarianMTModel(config), tmp_path / "marian")
    done, made = cut(folder, tmp_path, "--keep", "0,1,2,3,4,6")
    source = load(folder)
    given = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}
    by_hand = skipping(source, source.model.decoder.layers, {0, 1, 3}, **given)
    with torch.no_grad():
        assert torch.allclose(load(made)(**given)[0], by_hand, atol=1e-5)
    assert printed(done) == count(made)


@pytest.mark.parametrize("name", ["Siglip", "Siglip2"])
def test_a_tower_that_the_class_does_not_build_is_not_checked(name, tmp_path):
    size = {"num_patches": 16} if name == "Siglip2" else {"image_size": 32}
    vision = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48} | size
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32000}
    config = getattr(transformers, f"{name}Config")(vision_config=vision | {"patch_size": 8}, text_config=text)
    config.num_labels = 5
    folder = saved(getattr(transformers, f"{name}ForImageClassification")(config), tmp_path / "siglip")
    done, made = cut(folder, tmp_path, "--keep", "0,1,3")
    assert printed(done) == count(made)
    assert json.loads((made / "config.json").read_text())["vision_config"]["num_hidden_layers"] == 3


def test_a_tower_that_is_built_is_checked(tmp_path):
    config = transformers.BertConfig(**SMALL, num_hidden_layers=2)
    folder = saved(transformers.BertModel(config), tmp_path / "bert", vocab_size=32000)
    done = leansurgeon("plan", folder, "--layers", 1)
    assert done.returncode == 3 and "32000" in done.stderr


def test_what_a_class_does_not_read_is_found_without_its_weights(tmp_path):
    """The head of another task beside a classifier's: known before anything is computed."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8
    )
    folder = saved(transformers.ViTForImageClassification(config), tmp_path / "vit")
    with_tensors(folder, {"decoder.0.weight": torch.randn(48, 32, 1, 1)})
    steps = plan(open_source(str(folder)), RequestedShape(layers="3"))
    assert unread(steps) == ("decoder.0.weight",)


def test_a_result_that_would_not_load_is_refused_before_anything_is_computed(tmp_path):
    config = transformers.LlamaConfig(**SMALL, **TOKENS, num_hidden_layers=4)
    folder = saved(transformers.LlamaForCausalLM(config), tmp_path / "llama", attention_bias=True)
    steps = plan(open_source(str(folder)), RequestedShape(layers="3"))
    assert unread(steps) == ()  # the source lacks these biases, too
    whole = open_source(str(saved(transformers.LlamaForCausalLM(config), tmp_path / "whole")))
    other = replace(whole, config=whole.config | {"vocab_size": 200})
    with pytest.raises(UnsupportedModel, match=r"lm_head.*\(2 such"):
        unread(plan(other, RequestedShape(layers="3")))


def test_a_quantisation_that_is_none(tmp_path):
    config = transformers.LlamaConfig(**SMALL, **TOKENS, num_hidden_layers=2)
    folder = saved(transformers.LlamaForCausalLM(config), tmp_path / "llama", quantization_config=None)
    assert leansurgeon("plan", folder, "--layers", 1).returncode == 0


def test_weights_whose_index_is_missing_say_what_is_there(tmp_path):
    config = transformers.LlamaConfig(**SMALL, **TOKENS, num_hidden_layers=2)
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="20KB")
    assert len(Weights.open(folder).files) > 1
    (folder / "model.safetensors.index.json").unlink()
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    with pytest.raises(UnsupportedModel, match=rf"{len(shards)} files.*{shards[0]}.*index") as refused:
        Weights.open(folder)
    assert "index.json" in refused.value.hint
    for name in shards[1:]:
        (folder / name).unlink()
    with pytest.raises(UnsupportedModel, match=shards[0]) as refused:
        Weights.open(folder)
    assert "model.safetensors" in refused.value.hint


@pytest.mark.parametrize("kind", ["MPNet", "Bert"])
def test_a_body_under_the_name_of_a_class_with_a_head_keeps_its_pooler(kind, tmp_path):
    """As all-mpnet-base-v2 lies on the hub."""
    config = getattr(transformers, f"{kind}Config")(**SMALL, num_hidden_layers=4, pad_token_id=1)
    folder = saved(
        getattr(transformers, f"{kind}Model")(config), tmp_path / "body", architectures=[f"{kind}ForMaskedLM"]
    )
    _, made = cut(folder, tmp_path, "--keep", "0,1,3")
    source = transformers.AutoModel.from_pretrained(folder).eval()
    result, info = transformers.AutoModel.from_pretrained(made, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(result.pooler.dense.weight, source.pooler.dense.weight)
    by_hand = skipping(source, source.encoder.layer, {0, 1, 3}, input_ids=IDS)
    with torch.no_grad():
        assert torch.allclose(result.eval()(input_ids=IDS)[0], by_hand, atol=1e-5)
    assert unread(plan(open_source(str(folder)), RequestedShape(layers="3"))) == ()


@pytest.mark.parametrize("command", ["shrink", "plan"])
def test_of_several_towers_one_is_asked_for(command, tmp_path):
    size = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.CLIPConfig(
        vision_config=size | {"num_hidden_layers": 3, "image_size": 32, "patch_size": 8},
        text_config=size | {"num_hidden_layers": 4, "vocab_size": 160},
        projection_dim=32,
    )
    folder = saved(transformers.CLIPModel(config), tmp_path / "clip")
    done = leansurgeon(command, folder, "--layers", 2, cwd=tmp_path)
    assert done.returncode == 2 and "text (4 layers), vision (3 layers)" in done.stderr and "--tower" in done.stderr
    assert leansurgeon("plan", folder, "--layers", 2, "--tower", "vision").returncode == 0


def test_a_cut_that_keeps_the_last_layer_of_gemma_4(tmp_path):
    """Its library makes the last layer one of full attention, whatever the config says of it."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4TextConfig(
        **SMALL, **TOKENS, num_hidden_layers=6, num_key_value_heads=2, head_dim=8, layer_types=kinds, sliding_window=4,
        hidden_size_per_layer_input=0, per_layer_config={2: {"head_dim": 16}, 5: {"head_dim": 16}},
    )  # fmt: skip
    folder = saved(transformers.Gemma4ForCausalLM(config), tmp_path / "gemma")
    refused = leansurgeon("shrink", folder, "--uncalibrated", "--keep", "0,2,3,4", cwd=tmp_path)
    assert refused.returncode == 2 and "Layer 5 has to stay" in refused.stderr
    _, made = cut(folder, tmp_path, "--keep", "0,2,3,5")
    source = load(folder)
    by_hand = skipping(source, source.model.layers, {0, 2, 3, 5}, input_ids=IDS)
    with torch.no_grad():
        assert torch.allclose(load(made)(input_ids=IDS)[0], by_hand, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"], "pooler_hidden_size": 64}
        | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 4},
        {"model_type": "longformer", "attention_window": [512] * 12, "num_hidden_layers": 12},
        {"model_type": "led", "attention_window": [1024] * 12},
        {"model_type": "gemma3n_text"},
        {"model_type": "gemma4_text"},
        {"model_type": "falcon_h1"},
        {"model_type": "bamba", "hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]}
        | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4}
        | {"hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "intermediate_size": 96, "shared_intermediate_size": 96},
        {"model_type": "swin"},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_small_model_with_the_flags_of_this_one_runs(config):
    from leansurgeon.architectures.infer import library
    from leansurgeon.architectures.infer.differences import build_small_config

    with library.quietly():
        full = library.whole(config)
        build_small_config(library.Library.of(full), full)


def test_what_a_library_raises_is_no_text_of_a_refusal():
    """Zamba 2 does not run when it is small; what torch says of that helps nobody."""
    with pytest.raises(UnsupportedModel, match="no small model") as refused:
        architectures.of(infer.complete_config({"model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"]}))
    assert not re.search(r"Error|shape|\[|size of", refused.value.message)


def test_a_padding_token_without_a_row_is_never_fed(tmp_path):
    """As many a Llama has it: `[PAD]` was added to the tokenizer, and no row to the embedding."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    size = SMALL | {"vocab_size": len(words), "max_position_embeddings": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**size, bos_token_id=0, eos_token_id=1, num_labels=2)
    folder = saved(transformers.LlamaForSequenceClassification(config), tmp_path / "llama", pad_token_id=1)
    tokenizer.save_pretrained(folder)
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == len(words) + 1
    rows = (f"{' '.join(f'w{(i * 7 + j) % 60}' for j in range(3 + i % 9))},{i % 2}\n" for i in range(96))
    data = tmp_path / "data.csv"
    data.write_text("text,label\n" + "".join(rows))
    cut_too = leansurgeon("shrink", folder, "--calibrate", data, "--layers", 1, "--heal", "closed", cwd=tmp_path)
    assert cut_too.returncode == 0, cut_too.stderr
    trained = leansurgeon("retrain", folder, "--data", data, "--set", "train.duration=2st", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr


def test_a_patch_of_two_sides(tmp_path):
    """Height and width of a patch as a list are no sizes of two stages."""
    numbers = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.DINOv3ViTConfig(**numbers, image_size=32, patch_size=8)
    folder = saved(transformers.DINOv3ViTModel(config), tmp_path / "dino", patch_size=[8, 8])
    done = leansurgeon("plan", folder, "--layers", 3)
    assert done.returncode == 0, done.stderr


def test_a_result_is_placed_before_the_work_without_data_too(tmp_path):
    """The head of another task is left out and said, and no reload is needed to find it."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8
    )
    folder = saved(transformers.ViTForImageClassification(config), tmp_path / "vit")
    with_tensors(folder, {"decoder.0.weight": torch.randn(48, 32, 1, 1)})
    done, made = cut(folder, tmp_path, "--keep", "0,1,3", "--no-proof")
    assert "does not read" in done.stderr and "decoder.0.weight" not in load_file(made / "model.safetensors")
    assert load(made).config.num_hidden_layers == 3
