"""BART and mBART with a free head_dim in each stack against transformers' own."""

import pytest
import torch
import transformers as tf

from leansurgeon import architectures
from leansurgeon.models import decoupled_bart

NUMBERS = dict(vocab_size=60, d_model=24, max_position_embeddings=40, scale_embedding=True, num_labels=2) | {
    f"{side}_{key}": number for side in ("encoder", "decoder") for key, number in (("layers", 2), ("ffn_dim", 40))
}
LEAN = {family: architectures.load_families()[f"leansurgeon_{family}"] for family in ("bart", "mbart")}
PAIRS = [pair for lean in LEAN.values() for pair in lean.classes.items()]
PREFIX = {"bart": "Bart", "mbart": "MBart"}
ODD = dict(heads=(5, 3), encoder_head_dim=7, decoder_head_dim=9)  # neither divides the width of 24


def build(name, *, heads=(4, 2), **changes):
    """A class of the library or of ours, by its name, with weights far from the small start."""
    torch.manual_seed(0)
    cls = getattr(decoupled_bart if name.startswith("Lean") else tf, name)
    config = cls.config_class(**NUMBERS, encoder_attention_heads=heads[0], decoder_attention_heads=heads[1], **changes)
    model = cls(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


@pytest.fixture
def batch():
    """Two sentences of nine tokens, each with one end; the second is padded."""
    torch.manual_seed(1)
    ids = torch.randint(4, 60, (2, 9))
    ids[0, -1] = ids[1, 5] = 2
    ids[1, 6:] = 1
    return {"input_ids": ids, "attention_mask": (ids != 1).long()}


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=[theirs for theirs, _ in PAIRS])
def test_head_dims_of_the_library_give_the_library(theirs, ours, batch):
    library = build(theirs)
    for head_dims in ({}, {"encoder_head_dim": 6, "decoder_head_dim": 12}):
        lean = build(ours, **head_dims)
        assert list(lean.state_dict()) == list(library.state_dict())
        lean.load_state_dict(library.state_dict())
        for implementation in ("eager", "sdpa"):
            with torch.no_grad():
                for model in (library, lean):
                    model.set_attn_implementation(implementation)
                found, expected = lean(**batch)[0], library(**batch)[0]
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", LEAN)
def test_heads_need_not_divide_the_width(family, batch):
    name = f"{PREFIX[family]}ForConditionalGeneration"
    with pytest.raises(ValueError, match="divisible"):
        build(name, heads=(5, 3))
    model = build(f"Lean{name}", **ODD)
    assert model.model.encoder.layers[0].self_attn.q_proj.weight.shape == (35, 24)
    assert model.model.decoder.layers[1].encoder_attn.out_proj.weight.shape == (24, 27)
    config = model.config.to_dict() | {"architectures": [f"Lean{name}"]}
    built = {n: tuple(p.shape) for n, p in model.named_parameters()} | {"final_logits_bias": (1, 60)}
    assert built == {spec.name: spec.shape for spec in LEAN[family].tensors(config)}
    kwargs = dict(decoder_start_token_id=2, max_new_tokens=8, do_sample=False, num_beams=2)
    with_cache, without = (model.generate(**batch, use_cache=cache, **kwargs) for cache in (True, False))
    assert with_cache.tolist() == without.tolist()


@pytest.mark.parametrize("prefix", PREFIX.values())
def test_fresh_models_start_as_the_librarys(prefix):
    """The rebuilt projections are initialised by the library's rule, not by torch's."""
    cls = getattr(decoupled_bart, f"Lean{prefix}ForConditionalGeneration")
    torch.manual_seed(0)
    model = cls(cls.config_class(**NUMBERS, encoder_attention_heads=40, encoder_head_dim=8))
    attention = model.model.encoder.layers[0].self_attn
    for projection in (attention.q_proj, attention.out_proj):
        assert projection.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not attention.q_proj.bias.any() and not model.final_logits_bias.any()
    assert model.lm_head.weight is model.model.shared.weight is model.model.decoder.embed_tokens.weight
