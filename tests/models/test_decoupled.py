"""BERT, RoBERTa and GPT-2 with a free head_dim against transformers' own models."""

import pytest
import torch
import transformers as tf

from leansurgeon import architectures
from leansurgeon.models import decoupled_bert, decoupled_gpt2

ENCODER = dict(vocab_size=60, hidden_size=24, num_hidden_layers=2, intermediate_size=40, max_position_embeddings=40)
DECODER = dict(vocab_size=60, n_embd=24, n_layer=2, n_inner=40, n_positions=32, bos_token_id=0, eos_token_id=1)
FAMILIES = {
    "bert": (decoupled_bert, tf.BertConfig, ENCODER, "num_attention_heads"),
    "roberta": (decoupled_bert, tf.RobertaConfig, ENCODER, "num_attention_heads"),
    "gpt2": (decoupled_gpt2, tf.GPT2Config, DECODER, "n_head"),
}
PAIRS = [
    (family, theirs, ours)
    for family in FAMILIES
    for theirs, ours in architectures.load_families()[f"leansurgeon_{family}"].classes.items()
    if not theirs.startswith(("XLM", "Camembert"))
]


def class_of(family, auto):
    """Our class for one of transformers' auto classes."""
    module = FAMILIES[family][0]
    return getattr(module, module.AUTO_MAP.get(f"leansurgeon_{family}", module.AUTO_MAP)[auto])


def config_of(family, *, lean=True, heads=4, **changes):
    _, theirs, numbers, key = FAMILIES[family]
    cls = class_of(family, "AutoConfig") if lean else theirs
    return cls(**numbers, **{key: heads}, pad_token_id=0, num_labels=3, **changes)


def build(family, name, lean=True, **kwargs):
    torch.manual_seed(0)
    implementation = kwargs.pop("attn_implementation", "sdpa")
    config = config_of(family, lean=lean, **kwargs)
    config._attn_implementation = implementation
    model = getattr(FAMILIES[family][0] if lean else tf, name)(config).eval()
    for p in model.parameters():  # away from the small start, biases included
        torch.nn.init.normal_(p, std=0.2)
    return model


def output(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs)[0]


@pytest.fixture
def ids():
    torch.manual_seed(1)
    return torch.randint(2, 60, (2, 9))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("family", "theirs", "ours"), PAIRS)
def test_head_dim_of_the_library_gives_the_library(family, theirs, ours, implementation, ids):
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    library = build(family, theirs, lean=False, attn_implementation=implementation)
    expected = output(library, ids, attention_mask=mask)
    for head_dim in (None, 6):
        lean = build(family, ours, head_dim=head_dim, attn_implementation=implementation)
        assert list(lean.state_dict()) == list(library.state_dict())
        lean.load_state_dict(library.state_dict())
        torch.testing.assert_close(output(lean, ids, attention_mask=mask), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_declared_tensors_are_those_of_the_built_model(family):
    architecture = architectures.load_families()[f"leansurgeon_{family}"]
    model = build(family, class_of(family, "AutoModel").__name__, heads=5, head_dim=7)
    built = {n: tuple(p.shape) for n, p in model.named_parameters() if not n.startswith("pooler")}
    assert built == {spec.name: spec.shape for spec in architecture.tensors(model.config.to_dict(), prefix="")}


def test_generation_with_and_without_cache_agree(ids):
    model = build("gpt2", "LeanGPT2LMHeadModel", heads=5, head_dim=7)
    kwargs = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    assert model.generate(ids, **kwargs).tolist() == model.generate(ids, use_cache=False, **kwargs).tolist()


def test_inverse_layer_scaling_of_gpt2_is_kept(ids):
    changes = dict(scale_attn_by_inverse_layer_idx=True)
    library = build("gpt2", "GPT2LMHeadModel", lean=False, **changes)
    lean = build("gpt2", "LeanGPT2LMHeadModel", head_dim=6, **changes)
    lean.load_state_dict(library.state_dict())
    torch.testing.assert_close(output(lean, ids), output(library, ids), atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_models_start_as_the_librarys(family):
    """The rebuilt projections are initialised by the library's rule, not by torch's."""
    torch.manual_seed(0)
    model = class_of(family, "AutoModel")(config_of(family, heads=40, head_dim=8))
    std = {n: p.std().item() for n, p in model.named_parameters() if p.ndim == 2 and p.numel() > 5000}
    assert len(std) >= 4
    scaled = 0.02 / (2 * 2) ** 0.5  # GPT-2 scales what enters the residual stream by 1 / sqrt(2 * layers)
    for name, value in std.items():
        assert value == pytest.approx(scaled if "c_proj" in name else 0.02, rel=0.05), name


@pytest.mark.parametrize(
    ("family", "flag"), [("bert", "is_decoder"), ("roberta", "is_decoder"), ("gpt2", "add_cross_attention")]
)
def test_what_is_not_supported_is_said(family, flag):
    with pytest.raises(ValueError, match="must be false"):
        build(family, class_of(family, "AutoModel").__name__, **{flag: True})
