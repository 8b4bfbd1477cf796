"""Encoder and decoder as two stages: what T5 and BART have that other families do not, against transformers' own
models. What all families share is tested over `FAMILIES`.
"""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.inspection import inspect
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.transfer import apply
from tests.conftest import FAMILIES, build, example
from tests.surgery.cuts import cut, logits

TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


@pytest.fixture
def flan(saved):
    """T5 v1.1 as it was published: gated, a shorter decoder, an output of its own, and copies that no class reads."""
    folder, _ = saved("t5", feed_forward_proj="gated-gelu", num_decoder_layers=3)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(61, 32)
    tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    tensors[f"decoder.{TABLE.replace('layer.0.SelfAttention', 'layer.1.EncDecAttention')}"] = torch.randn(32, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite(folder, ("scale_decoder_outputs", "is_gated_act", "dense_act_fn"), tie_word_embeddings=False)
    return folder


def count(model):
    return sum(p.numel() for p in model.parameters())


def rewrite(folder, drop=(), **changes):
    """Change the config of a folder."""
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in drop} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_an_output_of_its_own_stays_apart_and_is_counted(flan, tmp_path):
    model = transformers.T5ForConditionalGeneration.from_pretrained(flan)
    assert model.lm_head.weight is not model.shared.weight and not model.config.scale_decoder_outputs
    source = open_source(str(flan))
    assert source.parameters.total == count(model)
    cut(flan, tmp_path / "wide", heads="7")
    wide = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "wide")
    assert torch.equal(wide.lm_head.weight, model.lm_head.weight)
    before, after = logits(model, example(model)), logits(wide, example(model))
    assert (before - after).abs().max() < 1e-5 * before.std()
    with pytest.raises(UsageError, match=r"\bt5\b.*--init fresh-attention"):
        plan(source, RequestedShape(heads="8", init="fresh"))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("t5", "T5EncoderModel"),
        ("t5", "T5ForTokenClassification"),
        ("t5", "T5ForSequenceClassification"),
        ("bart", "BartModel"),
        ("bart", "BartForSequenceClassification"),
    ],
)
def test_other_classes_of_the_family_have_roles_and_reload(family, name, monkeypatch, saved, tmp_path):
    monkeypatch.setitem(FAMILIES, family, (FAMILIES[family][0], name, FAMILIES[family][2]))
    folder, model = saved(family)
    source = open_source(str(folder))
    assert source.parameters.total == count(model)
    assert len(source.shape.stages) == (1 if name in ("T5EncoderModel", "T5ForTokenClassification") else 2)
    steps, _ = cut(folder, tmp_path / "cut", layers="2")
    made = load(tmp_path / "cut").model
    assert (type(made).__name__, count(made)) == (name, steps.parameters_after.total)


@pytest.mark.parametrize(
    ("family", "keys"),
    [("t5", ("num_layers", "num_decoder_layers")), ("bart", ("encoder_layers", "decoder_layers"))],
)
def test_each_side_has_a_depth_of_its_own(family, keys, saved, tmp_path):
    steps, _ = cut(saved(family)[0], tmp_path / "lean", layers="3,1", mlp_dim="24")
    model = load(tmp_path / "lean").model
    assert steps.layers == (0, 1, 3, 4) and count(model) == steps.parameters_after.total
    assert [getattr(model.config, key) for key in keys] == [3, 1]


def test_a_decoder_as_deep_as_the_encoder_may_go_unsaid(saved):
    """t5-small's own config has no num_decoder_layers."""
    folder, model = saved("t5")
    config = rewrite(folder, drop=("num_decoder_layers",))
    source = open_source(str(folder))
    assert source.shape.column("depth") == "4,4" and source.parameters.total == count(model)
    shorter = source.architecture.with_shape(config, plan(source, RequestedShape(layers="3,2")).after)
    assert (shorter["num_layers"], shorter["num_decoder_layers"]) == (3, 2)


def test_other_names_for_the_encoders_numbers_do_not_outlive_them(saved, tmp_path):
    """bart-base's own config says num_hidden_layers, too, which the library would read last."""
    folder, _ = saved("bart")
    rewrite(folder, num_hidden_layers=4)
    cut(folder, tmp_path / "lean", layers="2,3")
    config = load(tmp_path / "lean").model.config
    assert (config.encoder_layers, config.decoder_layers) == (2, 3)


def test_one_number_for_both_sides_of_t5_and_two_for_bart(saved, tmp_path):
    t5 = open_source(str(saved("t5")[0]))
    for wanted, says in (
        (RequestedShape(heads="8,4"), r"\bt5\b.*num_heads.*\b8\b.*\b4\b"),
        (RequestedShape(mlp_dim="24,48"), r"\bt5\b.*\bd_ff\b"),
    ):
        with pytest.raises(UsageError, match=says):
            plan(t5, wanted)
    cut(saved("bart")[0], tmp_path / "split", heads="8,2", init="fresh-attention")
    model = load(tmp_path / "split").model.model
    decoder = model.decoder.layers[3]
    assert model.encoder.layers[3].self_attn.num_heads == 8
    assert decoder.self_attn.num_heads == decoder.encoder_attn.num_heads == 2


def test_layers_of_t5_keep_the_same_heads_since_they_share_a_table(saved, tmp_path):
    folder, model = saved("t5")
    _, record = cut(folder, tmp_path / "few", heads="2")
    kept = record.decided.kept_heads
    encoder, decoder = kept["0"], kept["4"]
    assert all(kept[str(i)] == (encoder if i < 4 else decoder) for i in range(8))
    strength = sum(b.layer[0].SelfAttention.o.weight.reshape(32, 4, 8).norm(dim=(0, 2)) for b in model.encoder.block)
    assert list(encoder) == strength.topk(2).indices.sort().values.tolist()
    # The reference: the library's model with the other heads silenced; cross-attention chooses for every layer.
    parts = {str(i): b.layer[0].SelfAttention for i, b in enumerate((*model.encoder.block, *model.decoder.block))}
    parts |= {f"{i}.1": b.layer[1].EncDecAttention for i, b in enumerate(model.decoder.block, 4)}
    with torch.no_grad():
        for name, attention in parts.items():
            for h in set(range(4)) - set(kept[name]):
                attention.o.weight[:, h * 8 : h * 8 + 8] = 0
    few, inputs = load(tmp_path / "few").model, example(model)
    assert torch.allclose(logits(model, inputs), logits(few, inputs), atol=1e-4)


def test_the_table_stays_when_its_layer_goes(saved, tmp_path):
    """Every layer reads the table that the first one holds, so leaving that layer out must not lose the table."""
    folder, model = saved("t5")
    source = open_source(str(folder))
    steps = replace(plan(source, RequestedShape(layers="2")), layers=(1, 3, 5, 6))
    (tmp_path / "moved").mkdir()
    apply(steps, tmp_path / "moved")
    moved, inputs = load(tmp_path / "moved").model, example(model)
    # The reference: the library's layers in a shorter list, their table given to the first of them.
    for stack, kept in ((model.encoder, (1, 3)), (model.decoder, (1, 2))):
        first = stack.block[0].layer[0].SelfAttention
        stack.block = torch.nn.ModuleList(stack.block[i] for i in kept)
        heir = stack.block[0].layer[0].SelfAttention
        heir.relative_attention_bias, heir.has_relative_attention_bias = first.relative_attention_bias, True
    assert torch.allclose(logits(model, inputs), logits(moved, inputs), atol=1e-5)


def test_new_queries_of_t5_start_as_the_librarys(tmp_path):
    """T5 does not divide scores by the root of d_kv; the library draws queries so much smaller."""
    model = build("t5", d_model=64, d_kv=16)
    model.save_pretrained(tmp_path / "source")
    cut(tmp_path / "source", tmp_path / "wide", heads="40")
    new = load_file(tmp_path / "wide/model.safetensors")
    name = "encoder.block.1.layer.0.SelfAttention.{}.weight"
    drawn = {part: new[name.format(part)][64:].std().item() for part in "qkv"}
    torch.manual_seed(0)
    library = transformers.T5Model(transformers.T5Config(**model.config.to_dict() | {"num_heads": 40}))
    attention = library.encoder.block[1].layer[0].SelfAttention
    for part in "qkv":
        assert drawn[part] == pytest.approx(getattr(attention, part).weight.std().item(), rel=0.05)


def test_an_edit_of_heads_shows_in_t5s_table_and_in_nothing_of_bart(saved):
    folder, _ = saved("t5")
    rewrite(folder, num_heads=8, d_kv=4)
    with pytest.raises(UnsupportedModel, match=r"relative_attention_bias.weight' is \[32, 4\]"):
        open_source(str(folder))
    found = inspect(open_source(str(saved("bart")[0]))).findings
    assert "encoder_attention_heads or decoder_attention_heads" in found[0].says
