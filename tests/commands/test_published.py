"""Checkpoints with more tensors, or other ones, than their class would save: cut as the library reads them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from leansurgeon import architectures
from leansurgeon.architectures import infer
from leansurgeon.checkpoints.source import open_source
from leansurgeon.checkpoints.weights import Weights
from leansurgeon.errors import UnsupportedModel
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import unread
from tests.cli.answers import read, typed, works
from tests.support.published import SMALL, TOKENS, load, saved, skipping, with_tensors

VISION = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.arange(10, 34).reshape(2, 12)


def cut(folder, tmp_path, more):
    done = works(f"shrink {folder} --uncalibrated -o {tmp_path}/cut {more}")
    return done, tmp_path / "cut"


def equals_cut_by_hand(source, made, layers, keep, tolerance=1e-5, **given):
    by_hand = skipping(source, layers, keep, **given)
    with torch.no_grad():
        assert torch.allclose(load(made)(**given)[0], by_hand, atol=tolerance)


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
    done, made = cut(folder, tmp_path, "--keep 0,1,3")
    assert "4 tensors that Glm4MoeForCausalLM does not read are left out" in done.stderr
    assert printed(done) == count(made)
    equals_cut_by_hand(source, made, source.model.layers, {0, 1, 3}, input_ids=IDS)
    assert read(made / "config.json")["num_nextn_predict_layers"] == 0


def test_an_output_that_is_not_the_embedding_its_config_says_it_is(tmp_path):
    config = transformers.Qwen2Config(
        **SMALL, **TOKENS, num_hidden_layers=4, num_key_value_heads=2, tie_word_embeddings=False
    )
    folder = saved(transformers.Qwen2ForCausalLM(config), tmp_path / "qwen", tie_word_embeddings=True)
    assert not torch.equal(load(folder).lm_head.weight, load(folder).model.embed_tokens.weight)
    done, made = cut(folder, tmp_path, "--keep 0,1,3")
    source, result = load(folder), load(made)
    assert printed(done) == count(made)
    assert torch.equal(result.lm_head.weight, source.lm_head.weight)
    assert read(made / "config.json")["tie_word_embeddings"] is False
    equals_cut_by_hand(source, made, source.model.layers, {0, 1, 3}, input_ids=IDS)


def test_parameters_that_are_neither_saved_nor_loaded_stay_as_the_library_makes_them(tmp_path):
    """Marian's positions. The cut by hand is exact, and so is the one here."""
    config = transformers.MarianConfig(
        vocab_size=160, decoder_vocab_size=160, d_model=32, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=3, decoder_layers=4, max_position_embeddings=64,
        decoder_start_token_id=1, forced_eos_token_id=1, **TOKENS,
    )  # fmt: skip
    folder = saved(transformers.MarianMTModel(config), tmp_path / "marian")
    done, made = cut(folder, tmp_path, "--keep 0,1,2,3,4,6")
    source = load(folder)
    given = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}
    equals_cut_by_hand(source, made, source.model.decoder.layers, {0, 1, 3}, **given)
    assert printed(done) == count(made)


def test_a_tower_that_the_class_does_not_build_is_not_checked(tmp_path):
    vision = VISION | {"num_patches": 16, "patch_size": 8}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32000}
    config = transformers.Siglip2Config(vision_config=vision, text_config=text, num_labels=5)
    folder = saved(transformers.Siglip2ForImageClassification(config), tmp_path / "siglip")
    done, made = cut(folder, tmp_path, "--keep 0,1,3")
    assert printed(done) == count(made)
    assert read(made / "config.json")["vision_config"]["num_hidden_layers"] == 3


def test_a_tower_that_is_built_is_checked(tmp_path):
    config = transformers.BertConfig(**SMALL, num_hidden_layers=2)
    folder = saved(transformers.BertModel(config), tmp_path / "bert", vocab_size=32000)
    done = typed(f"plan {folder} --layers 1")
    assert done.returncode == 3 and "32000" in done.stderr


def test_what_a_class_does_not_read_is_found_before_the_work_and_left_out(tmp_path):
    """The head of another task beside a classifier's: said, and no reload is needed to find it."""
    config = transformers.ViTConfig(**VISION, image_size=16, patch_size=8)
    folder = saved(transformers.ViTForImageClassification(config), tmp_path / "vit")
    with_tensors(folder, {"decoder.0.weight": torch.randn(48, 32, 1, 1)})
    steps = plan(open_source(str(folder)), RequestedShape(layers="3"))
    assert unread(steps) == ("decoder.0.weight",)
    done, made = cut(folder, tmp_path, "--keep 0,1,3 --no-proof")
    assert "does not read" in done.stderr and "decoder.0.weight" not in load_file(made / "model.safetensors")
    assert load(made).config.num_hidden_layers == 3


def test_a_result_that_would_not_load_is_refused_before_anything_is_computed(tmp_path):
    config = transformers.LlamaConfig(**SMALL, **TOKENS, num_hidden_layers=4)
    folder = saved(transformers.LlamaForCausalLM(config), tmp_path / "llama", attention_bias=True)
    steps = plan(open_source(str(folder)), RequestedShape(layers="3"))
    assert unread(steps) == ()  # the source lacks these biases, too
    whole = open_source(str(saved(transformers.LlamaForCausalLM(config), tmp_path / "whole")))
    other = replace(whole, config=whole.config | {"vocab_size": 200})
    with pytest.raises(UnsupportedModel, match=r"lm_head.*\(2 such"):
        unread(plan(other, RequestedShape(layers="3")))


def test_settings_that_mean_nothing_do_not_stop_a_cut(tmp_path):
    """A quantisation that is none; and height and width of a patch as a list, which are no sizes of two stages."""
    config = transformers.LlamaConfig(**SMALL, **TOKENS, num_hidden_layers=2)
    llama = saved(transformers.LlamaForCausalLM(config), tmp_path / "llama", quantization_config=None)
    config = transformers.DINOv3ViTConfig(**VISION, image_size=32, patch_size=8)
    dino = saved(transformers.DINOv3ViTModel(config), tmp_path / "dino", patch_size=[8, 8])
    for folder in (llama, dino):
        works(f"plan {folder} --layers 1")


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


def test_of_several_towers_one_is_asked_for(tmp_path):
    config = transformers.CLIPConfig(
        vision_config=VISION | {"num_hidden_layers": 3, "image_size": 32, "patch_size": 8},
        text_config=VISION | {"vocab_size": 160},
        projection_dim=32,
    )
    folder = saved(transformers.CLIPModel(config), tmp_path / "clip")
    for command in ("shrink", "plan"):
        done = typed(f"{command} {folder} --layers 2", cwd=tmp_path)
        assert done.returncode == 2 and "text (4 layers), vision (3 layers)" in done.stderr and "--tower" in done.stderr
    assert typed(f"plan {folder} --layers 2 --tower vision").returncode == 0


def test_a_cut_that_keeps_the_last_layer_of_gemma_4(tmp_path):
    """Its library makes the last layer one of full attention, whatever the config says of it."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4TextConfig(
        **SMALL, **TOKENS, num_hidden_layers=6, num_key_value_heads=2, head_dim=8, layer_types=kinds, sliding_window=4,
        hidden_size_per_layer_input=0, per_layer_config={2: {"head_dim": 16}, 5: {"head_dim": 16}},
    )  # fmt: skip
    folder = saved(transformers.Gemma4ForCausalLM(config), tmp_path / "gemma")
    refused = typed(f"shrink {folder} --uncalibrated --keep 0,2,3,4", cwd=tmp_path)
    assert refused.returncode == 2 and "Layer 5 has to stay" in refused.stderr
    _, made = cut(folder, tmp_path, "--keep 0,2,3,5")
    source = load(folder)
    equals_cut_by_hand(source, made, source.model.layers, {0, 2, 3, 5}, tolerance=1e-4, input_ids=IDS)


def test_what_a_library_raises_is_no_text_of_a_refusal():
    """Zamba 2 does not run when it is small; what torch says of that helps nobody."""
    with pytest.raises(UnsupportedModel, match="no small model") as refused:
        architectures.of(infer.complete_config({"model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"]}))
    assert not re.search(r"Error|shape|\[|size of", refused.value.message)


def test_a_padding_token_without_a_row_is_never_fed(tmp_path):
    """As many a Llama has it: `[PAD]` was added to the tokenizer, and no row to the embedding."""
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
    works(f"shrink {folder} --calibrate {data} --layers 1 --heal closed", cwd=tmp_path)
    works(f"retrain {folder} --data {data} --set train.duration=2st", cwd=tmp_path)
