"""Operations in closed form against torch's FlopCounterMode on the libraries' own models."""

from __future__ import annotations

import pytest

from leansurgeon.checkpoints.family import convert_config
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.costs import flops
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.conftest import FAMILIES, example, output

PLAIN = sorted(set(FAMILIES) - {"nystromformer", "siglip_vision_model"})  # landmarks; a pooling head with attention


@pytest.mark.parametrize("family", PLAIN)
def test_closed_form_is_what_torch_counts(family, saved):
    """On the meta device torch counts what the library's forward pass really multiplies, in fused attention too."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    folder, model = saved(family)
    source = open_source(str(folder))
    inputs = {key: value for key, value in example(model).items() if key != "attention_mask"}
    if "decoder_input_ids" in inputs:
        inputs["decoder_input_ids"] = inputs["input_ids"]  # as long as the encoder's
    model.set_attn_implementation("eager")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FlopCounterMode(display=False) as counter:
        fake = {key: mode.from_tensor(value) for key, value in inputs.items()}
        output(model, fake)
    found = flops.closed_form(source.specs, source.shape, source.config, source.architecture, 12)
    assert found.total == counter.get_total_flops() / 3  # three samples
    assert flops.count_flops(source.config, source.architecture, 12) == found.total


def test_a_bart_with_added_heads_is_counted_in_closed_form_too(saved):
    """Six heads, which need not divide the width."""
    source = open_source(str(saved("bart")[0]))
    steps = plan(source, RequestedShape(heads="6", head_dim="keep"))
    assert steps.architecture.name == "leansurgeon_bart"
    config = steps.architecture.with_shape(
        convert_config(source.config, source.architecture, steps.architecture), steps.after
    )
    assert steps.flops_after.total == flops.count_flops(config, steps.architecture)


PRESETS = ["vit-b", "bert-crammed", "gpt2-tinystories", "deit-l"]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_and_their_cuts_are_what_torch_counts(preset):
    """The source and a shape with other heads, fewer layers and another MLP, which a family of ours may hold."""
    source = open_source(preset)
    steps = plan(source, RequestedShape(heads="2x", layers="3", mlp_ratio="2"))
    config = steps.architecture.with_shape(source.config, steps.after)
    if steps.architecture.name != source.architecture.name:
        config = steps.architecture.with_shape(
            convert_config(source.config, source.architecture, steps.architecture), steps.after
        )
    assert steps.flops_after.total == flops.count_flops(config, steps.architecture)
    assert sum(steps.flops_saved_by.values()) == steps.flops_before.total - steps.flops_after.total


def test_vit_b_and_bert_large_have_the_operations_that_are_published():
    """17.56 GMAC of timm's table for vit_base_patch16_224 (2 operations each); 12 D^2 + 2 N D for a block otherwise."""
    source = open_source("vit-b")
    found = flops.closed_form(source.specs, source.shape, source.config, source.architecture)
    assert found.total / 2e9 == pytest.approx(17.56, abs=0.02)
    assert found.tokens == 197
    blocks = 12 * (2 * 197 * 12 * 768**2 + 4 * 197**2 * 768)
    assert found.attention + found.scores + found.mlp == blocks


def test_a_causal_classifier_scores_every_token(saved, tmp_path):
    """GPT-2's picks the last token's scores after it has made all of them, as torch counts."""
    from transformers import GPT2ForSequenceClassification

    GPT2ForSequenceClassification(saved("gpt2")[1].config).save_pretrained(tmp_path / "classifier")
    source = open_source(str(tmp_path / "classifier"))
    found = flops.closed_form(source.specs, source.shape, source.config, source.architecture, 12)
    assert found.outside == 2 * 12 * source.shape.stages[0].width * 2  # two labels
    assert found.total == flops.count_flops(source.config, source.architecture, 12)


def test_families_without_a_closed_form_have_none_and_are_counted():
    source = open_source("xcit-m")
    assert flops.closed_form(source.specs, source.shape, source.config, source.architecture) is None
    assert plan(source, RequestedShape(layers="10")).flops_before is None
    counted = flops.count_flops(source.config, source.architecture)
    assert counted / 2e9 == pytest.approx(16.08, abs=0.1)  # 16.2 GMAC in timm's table, with what is no matrix product
