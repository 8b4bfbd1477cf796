"""Tiny-Stories GPT (the "GPT-2, 89M" of the paper's Table 2): pre-norm decoder, q, k, v without biases, untied head;
our own module.
"""

from leansurgeon.architectures.base import Architecture, Keys, Tensor
from leansurgeon.architectures.tensors import linear, norm

TINYSTORIES_GPT = Architecture(
    name="tinystories_gpt",
    library="leansurgeon",
    model_types=("tinystories_gpt",),
    keys=Keys(
        "num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="intermediate_size", head_dim="head_dim"
    ),
    prefixes=("model.", ""),
    layer="layers.{i}.",
    block=(
        *norm("attention_norm"),
        Tensor("attention.query.weight", "q", "q width"),
        Tensor("attention.key.weight", "k", "kv width"),
        Tensor("attention.value.weight", "v", "kv width"),
        *linear("attention.output", "o", "width", "q"),
        *norm("mlp_norm"),
        *linear("mlp.up", "up", "mlp", "width"),
        *linear("mlp.down", "down", "width", "mlp"),
    ),
    outer=(
        Tensor("token_embeddings.weight", "embedding", "vocab width"),
        Tensor("position_embeddings.weight", "embedding", "positions width"),
        *norm("final_norm"),
        *linear("/lm_head", "head", "vocab", "width"),
    ),
    sizes={"vocab": "vocab_size", "positions": "max_position_embeddings"},
    projection="layers.{i}.attention.output",
    norm="pre",
    causal=True,
    modelling="tinystories_gpt.py",
    per_head_divides=False,  # 512 // 12 = 42
)
