"""Tiny-Stories GPT (the "GPT-2, 89M" of the paper's Table 2): pre-norm decoder, q, k, v without biases, untied head;
our own module.
"""

from leansurgeon.architectures.base import Architecture, Keys, Tensor

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
        Tensor("attention_norm.weight", "norm", "width"),
        Tensor("attention_norm.bias", "norm", "width"),
        Tensor("attention.query.weight", "q", "q width"),
        Tensor("attention.key.weight", "k", "kv width"),
        Tensor("attention.value.weight", "v", "kv width"),
        Tensor("attention.output.weight", "o", "width q"),
        Tensor("attention.output.bias", "o", "width"),
        Tensor("mlp_norm.weight", "norm", "width"),
        Tensor("mlp_norm.bias", "norm", "width"),
        Tensor("mlp.up.weight", "up", "mlp width"),
        Tensor("mlp.up.bias", "up", "mlp"),
        Tensor("mlp.down.weight", "down", "width mlp"),
        Tensor("mlp.down.bias", "down", "width"),
    ),
    outer=(
        Tensor("token_embeddings.weight", "embedding", "vocab width"),
        Tensor("position_embeddings.weight", "embedding", "positions width"),
        Tensor("final_norm.weight", "norm", "width"),
        Tensor("final_norm.bias", "norm", "width"),
        Tensor("/lm_head.weight", "head", "vocab width"),
        Tensor("/lm_head.bias", "head", "vocab"),
    ),
    sizes={"vocab": "vocab_size", "positions": "max_position_embeddings"},
    projection="layers.{i}.attention.output",
    norm="pre",
    causal=True,
    modelling="tinystories_gpt.py",
    per_head_divides=False,  # 512 // 12 = 42
)
