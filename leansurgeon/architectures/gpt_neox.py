"""GPT-NeoX (Pythia): attention and MLP side by side, rotary positions in a part of each head, q, k and v interleaved
head by head in one matrix.
"""

from leansurgeon.architectures.base import Tensor
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import linear, norm

GPT_NEOX = of_transformers(
    "gpt_neox",
    prefixes=("gpt_neox.", ""),
    layer="layers.{i}.",
    block=(
        *norm("input_layernorm"),
        *linear("attention.query_key_value", "qkv", "heads*qkv", "width", bias="attention_bias"),
        *linear("attention.dense", "o", "width", "q", bias="attention_bias"),
        *norm("post_attention_layernorm"),
        *linear("mlp.dense_h_to_4h", "up", "mlp", "width"),
        *linear("mlp.dense_4h_to_h", "down", "width", "mlp"),
    ),
    outer=(
        Tensor("embed_in.weight", "embedding", "vocab width"),
        *norm("final_layer_norm"),
        Tensor("/embed_out.weight", "head", "vocab width", when="!tie_word_embeddings"),
    ),
    sizes={"vocab": "vocab_size"},
    defaults={"attention_bias": True},
    projection="layers.{i}.attention.dense",
    tied=("embed_out.weight",),
    norm="pre",
    causal=True,
    positions="rope",
)
