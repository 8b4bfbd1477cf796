"""BERT, RoBERTa, GPT-2, BART and mBART with a free head_dim against transformers' own models."""

import pytest
import torch
import transformers as tf

from leansurgeon import architectures
from leansurgeon.models import decoupled_bart, decoupled_bert, decoupled_gpt2

ENCODER = dict(vocab_size=60, hidden_size=24, num_hidden_layers=2, intermediate_size=40, max_position_embeddings=40)
DECODER = dict(vocab_size=60, n_embd=24, n_layer=2, n_inner=40, n_positions=32, bos_token_id=0, eos_token_id=2)
BOTH = dict(vocab_size=60, d_model=24, max_position_embeddings=40, scale_embedding=True) | {
    f"{side}_{key}": number for side in ("encoder", "decoder") for key, number in (("layers", 2), ("ffn_dim", 40))
}
ONE = ("num_attention_heads", "head_dim")
TWO = ("encoder_attention_heads", "decoder_attention_heads", "encoder_head_dim", "decoder_head_dim")
# family: file, config, keys of heads and of their sizes, name of its classes, ending of one with an output
FAMILIES = {
    "bert": (decoupled_bert, ENCODER, ONE, "Bert", "ForMaskedLM"),
    "roberta": (decoupled_bert, ENCODER, ONE, "Roberta", "ForMaskedLM"),
    "gpt2": (decoupled_gpt2, DECODER, ("n_head", "head_dim"), "GPT2", "LMHeadModel"),
    "bart": (decoupled_bart, BOTH, TWO, "Bart", "ForConditionalGeneration"),
    "mbart": (decoupled_bart, BOTH, TWO, "MBart", "ForConditionalGeneration"),
}
LEAN = {family: architectures.load_families()[f"leansurgeon_{family}"] for family in FAMILIES}
PAIRS = [
    (family, theirs, ours)
    for family, lean in LEAN.items()
    for theirs, ours in lean.classes.items()
    if not theirs.startswith(("XLM", "Camembert"))
]


def fresh(family, name, heads=(4, 2), sizes=(None, None), **changes):
    """A class of the library or of ours, by its name; heads of one stack are the first."""
    file, numbers, keys, *_ = FAMILIES[family]
    cls = getattr(file if name.startswith("Lean") else tf, name)
    stacks = len(keys) // 2
    chosen = [*heads[:stacks], *(sizes[:stacks] if name.startswith("Lean") else ())]
    torch.manual_seed(0)
    numbers = numbers | dict(zip(keys, chosen, strict=False)) | {"pad_token_id": 1, "num_labels": 3}
    return cls(cls.config_class(**numbers | changes)).eval()


def build(family, name, *arguments, **changes):
    """Away from the small start, biases included."""
    model = fresh(family, name, *arguments, **changes)
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


def assert_same(lean, library, batch):
    assert list(lean.state_dict()) == list(library.state_dict())
    lean.load_state_dict(library.state_dict())
    for implementation in ("eager", "sdpa"):
        for model in (library, lean):
            model.set_attn_implementation(implementation)
        with torch.no_grad():
            found, expected = lean(**batch)[0], library(**batch)[0]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("family", "theirs", "ours"), PAIRS)
def test_head_dim_of_the_library_gives_the_library(family, theirs, ours, batch):
    library = build(family, theirs)
    for sizes in ((None, None), (6, 12)):
        assert_same(build(family, ours, (4, 2), sizes), library, batch)


def test_inverse_layer_scaling_of_gpt2_is_kept(batch):
    scaled = {"scale_attn_by_inverse_layer_idx": True}
    assert_same(build("gpt2", "LeanGPT2LMHeadModel", **scaled), build("gpt2", "GPT2LMHeadModel", **scaled), batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_need_not_divide_the_width(family, batch):
    """The declaration counts such a model, and decoders give the same words with a cache and without."""
    *_, short, ending = FAMILIES[family]
    model = build(family, f"Lean{short}{ending}", (5, 3), (7, 9))
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    declared = {spec.name: spec.shape for spec in LEAN[family].tensors(config)}
    heads = ("cls.", "lm_head.")
    built = {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith(heads)}
    assert built.items() <= declared.items() and len(built) > 20
    if ending != "ForMaskedLM":
        asked = {"decoder_start_token_id": 2} if model.config.is_encoder_decoder else {}
        said = [model.generate(**batch, **asked, max_new_tokens=8, use_cache=cache) for cache in (True, False)]
        assert said[0].tolist() == said[1].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_models_start_as_the_librarys(family):
    """The rebuilt projections are initialised by the library's rule, not by torch's."""
    model = fresh(family, f"Lean{FAMILIES[family][3]}Model", (40, 40), (8, 8))
    std = {n: p.std().item() for n, p in model.named_parameters() if p.ndim == 2 and p.numel() > 5000}
    assert len(std) >= 4
    scaled = 0.02 / (2 * 2) ** 0.5  # GPT-2 scales what enters the residual stream by 1 / sqrt(2 * layers)
    for name, value in std.items():
        assert value == pytest.approx(scaled if "c_proj" in name else 0.02, rel=0.05), name
    assert not any(p.any() for n, p in model.named_parameters() if "attn" in n and "bias" in n)


@pytest.mark.parametrize(
    ("family", "flag"), [("bert", "is_decoder"), ("roberta", "is_decoder"), ("gpt2", "add_cross_attention")]
)
def test_what_is_not_supported_is_said(family, flag):
    with pytest.raises(ValueError, match="must be false"):
        build(family, f"Lean{FAMILIES[family][3]}Model", **{flag: True})
