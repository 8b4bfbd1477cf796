"""GPT-NeoX (Pythia): attention and MLP side by side, rotary positions in a part of each head, q, k and v interleaved
head by head in one matrix.
"""

from leansurgeon.architectures.base import Architecture, Keys, Tensor

GPT_NEOX = Architecture(
    name="gpt_neox",
    library="transformers",
    model_types=("gpt_neox",),
    keys=Keys("num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="intermediate_size"),
    prefixes=("gpt_neox.", ""),
    layer="layers.{i}.",
    block=(
        Tensor("input_layernorm.weight", "norm", "width"),
        Tensor("input_layernorm.bias", "norm", "width"),
        Tensor("attention.query_key_value.weight", "qkv", "heads*qkv width"),
        Tensor("attention.query_key_value.bias", "qkv", "heads*qkv", when="attention_bias"),
        Tensor("attention.dense.weight", "o", "width q"),
        Tensor("attention.dense.bias", "o", "width", when="attention_bias"),
        Tensor("post_attention_layernorm.weight", "norm", "width"),
        Tensor("post_attention_layernorm.bias", "norm", "width"),
        Tensor("mlp.dense_h_to_4h.weight", "up", "mlp width"),
        Tensor("mlp.dense_h_to_4h.bias", "up", "mlp"),
        Tensor("mlp.dense_4h_to_h.weight", "down", "width mlp"),
        Tensor("mlp.dense_4h_to_h.bias", "down", "width"),
    ),
    outer=(
        Tensor("embed_in.weight", "embedding", "vocab width"),
        Tensor("final_layer_norm.weight", "norm", "width"),
        Tensor("final_layer_norm.bias", "norm", "width"),
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
