"""GPT-2: pre-norm decoder, fused qkv in a transposed Conv1D, head_dim derived from width // heads."""

from leansurgeon.architectures.base import Keys, Tensor
from leansurgeon.architectures.lean import lean, of_transformers
from leansurgeon.architectures.tensors import norm

GPT2 = of_transformers(
    "gpt2",
    keys=Keys("n_layer", "n_head", "n_embd", mlp_dim="n_inner"),
    prefixes=("transformer.", ""),
    layer="h.{i}.",
    block=(
        *norm("ln_1"),
        Tensor("attn.c_attn.weight", "qkv", "width q+kv+kv"),
        Tensor("attn.c_attn.bias", "qkv", "q+kv+kv"),
        Tensor("attn.c_proj.weight", "o", "q width"),
        Tensor("attn.c_proj.bias", "o", "width"),
        *norm("ln_2"),
        Tensor("mlp.c_fc.weight", "up", "width mlp"),
        Tensor("mlp.c_fc.bias", "up", "mlp"),
        Tensor("mlp.c_proj.weight", "down", "mlp width"),
        Tensor("mlp.c_proj.bias", "down", "width"),
    ),
    outer=(
        Tensor("wte.weight", "embedding", "vocab width"),
        Tensor("wpe.weight", "embedding", "positions width"),
        *norm("ln_f"),
    ),
    sizes={"vocab": "vocab_size", "positions": "n_positions"},
    projection="h.{i}.attn.c_proj",
    tied=("lm_head.weight",),
    norm="pre",
    causal=True,
    decoupled="leansurgeon_gpt2",
    depends_on_index=("scale_attn_by_inverse_layer_idx",),
    score_scale=lambda c: 1.0 if c.get("scale_attn_weights") is False else None,
)

LEAN_GPT2 = lean(
    GPT2,
    "decoupled_gpt2.py",
    unknown=("add_cross_attention",),
    classes={
        "GPT2Model": "LeanGPT2Model",
        "GPT2LMHeadModel": "LeanGPT2LMHeadModel",
        "GPT2ForSequenceClassification": "LeanGPT2ForSequenceClassification",
    },
)
