"""The decoder family with head_dim and grouped key/value heads: Llama, Mistral, Qwen2, Qwen3, Gemma, SmolLM3.

One block serves them all: biases and QK norms are present or absent by config. Layers of SmolLM3 and Qwen differ in
position encoding and window, so the lists that say so are re-indexed with the layers that are kept.
"""

from leansurgeon.architectures.base import Architecture, Keys, Tensor, derive

ATTENTION = (
    Tensor("self_attn.q_proj.weight", "q", "q width"),
    Tensor("self_attn.k_proj.weight", "k", "kv width"),
    Tensor("self_attn.v_proj.weight", "v", "kv width"),
    Tensor("self_attn.o_proj.weight", "o", "width q"),
)
BIASES = (
    Tensor("self_attn.q_proj.bias", "q", "q"),
    Tensor("self_attn.k_proj.bias", "k", "kv"),
    Tensor("self_attn.v_proj.bias", "v", "kv"),
)
OPTIONAL_BIASES = (
    *(Tensor(b.name, b.role, b.axes, when="attention_bias") for b in BIASES),
    Tensor("self_attn.o_proj.bias", "o", "width", when="attention_bias"),
)
QK_NORMS = (
    Tensor("self_attn.q_norm.weight", "qk_norm", "head_dim"),
    Tensor("self_attn.k_norm.weight", "qk_norm", "head_dim"),
)
MLP = (
    Tensor("mlp.gate_proj.weight", "gate", "mlp width"),
    Tensor("mlp.up_proj.weight", "up", "mlp width"),
    Tensor("mlp.down_proj.weight", "down", "width mlp"),
)
MLP_BIASES = (
    Tensor("mlp.gate_proj.bias", "gate", "mlp", when="mlp_bias"),
    Tensor("mlp.up_proj.bias", "up", "mlp", when="mlp_bias"),
    Tensor("mlp.down_proj.bias", "down", "width", when="mlp_bias"),
)
NORMS = (
    Tensor("input_layernorm.weight", "norm", "width"),
    Tensor("post_attention_layernorm.weight", "norm", "width"),
)

LLAMA = Architecture(
    name="llama",
    library="transformers",
    model_types=("llama",),
    keys=Keys(
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        mlp_dim="intermediate_size",
        head_dim="head_dim",
        kv_heads="num_key_value_heads",
    ),
    prefixes=("model.", ""),
    layer="layers.{i}.",
    block=(*ATTENTION, *OPTIONAL_BIASES, *MLP, *MLP_BIASES, *NORMS),
    outer=(
        Tensor("embed_tokens.weight", "embedding", "vocab width"),
        Tensor("norm.weight", "norm", "width"),
        Tensor("/lm_head.weight", "head", "vocab width", when="!tie_word_embeddings"),
    ),
    sizes={"vocab": "vocab_size"},
    projection="layers.{i}.self_attn.o_proj",
    tied=("lm_head.weight",),
    norm="pre",
    causal=True,
    positions="rope",
    # LlamaConfig (transformers 5) refuses hidden_size % heads != 0 even where head_dim is set.
    heads_divide_width=True,
)
MISTRAL = derive(
    LLAMA,
    name="mistral",
    model_types=("mistral",),
    block=(*ATTENTION, *MLP, *NORMS),
    per_layer=("layer_types",),
    heads_divide_width=False,
)
QWEN2 = derive(MISTRAL, name="qwen2", model_types=("qwen2",), block=(*ATTENTION, *BIASES, *MLP, *NORMS))
QWEN3 = derive(
    MISTRAL, name="qwen3", model_types=("qwen3",), block=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *MLP, *NORMS)
)
GEMMA = derive(
    MISTRAL,
    name="gemma",
    model_types=("gemma",),
    block=(*ATTENTION, *OPTIONAL_BIASES, *MLP, *NORMS),
    norm_offset=1.0,
)
SMOLLM3 = derive(
    LLAMA,
    name="smollm3",
    model_types=("smollm3",),
    per_layer=("layer_types", "no_rope_layers"),
    heads_divide_width=False,
)
