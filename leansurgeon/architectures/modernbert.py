"""ModernBERT: pre-norm encoder with rotary positions, a gated MLP in one matrix, and windows in two of three layers.

The first layer has no norm before its attention. The library's rotary part would read a `head_dim` from the config and
its attention would not, so none is ever written.
"""

from leansurgeon.architectures.base import Config, Tensor
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import linear, norm


def layer_types(config: Config) -> list[str]:
    """Which layers see everything, where a file gives only the interval."""
    every = config.get("global_attn_every_n_layers", 3)
    return ["sliding_attention" if i % every else "full_attention" for i in range(config["num_hidden_layers"])]


MODERNBERT = of_transformers(
    "modernbert",
    prefixes=("model.", ""),
    layer="layers.{i}.",
    block=(
        *norm("attn_norm", bias="norm_bias", in_first=False),
        *linear("attn.Wqkv", "qkv", "q+kv+kv", "width", bias="attention_bias"),
        *linear("attn.Wo", "o", "width", "q", bias="attention_bias"),
        *norm("mlp_norm", bias="norm_bias"),
        *linear("mlp.Wi", "up", "mlp+mlp", "width", bias="mlp_bias"),
        *linear("mlp.Wo", "down", "width", "mlp", bias="mlp_bias"),
    ),
    outer=(
        Tensor("embeddings.tok_embeddings.weight", "embedding", "vocab width"),
        *norm("embeddings.norm", bias="norm_bias"),
        *norm("final_norm", bias="norm_bias"),
    ),
    sizes={"vocab": "vocab_size"},
    projection="layers.{i}.attn.Wo",
    tied=("decoder.weight",),
    masked_head=("head", "decoder"),
    norm="pre",
    positions="rope",
    per_layer=("layer_types",),
    defaults={"layer_types": layer_types},
)
