"""The decoder family with head_dim and grouped key/value heads: Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 3, SmolLM3,
OLMo2, GLM-4.

One block serves them all: biases and QK norms are present or absent by config. Where norms stand differs: OLMo2 has
them behind each part, Gemma 3 and GLM-4 around it. Layers of SmolLM3, Gemma 3 and Qwen differ
in position encoding and window, so the lists that say so are re-indexed with the layers that are kept.
"""

from dataclasses import replace

from leansurgeon.architectures.base import Config, Tensor, derive
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import HEAD_DIM_KEYS, attention

ATTENTION = attention("self_attn.", "q_proj k_proj v_proj o_proj", bias=False)
BIASES = (
    Tensor("self_attn.q_proj.bias", "q", "q"),
    Tensor("self_attn.k_proj.bias", "k", "kv"),
    Tensor("self_attn.v_proj.bias", "v", "kv"),
)
OPTIONAL_QKV_BIASES = tuple(replace(bias, when="attention_bias") for bias in BIASES)
OPTIONAL_BIASES = (*OPTIONAL_QKV_BIASES, Tensor("self_attn.o_proj.bias", "o", "width", when="attention_bias"))
QK_NORMS = (
    Tensor("self_attn.q_norm.weight", "qk_norm", "head_dim"),
    Tensor("self_attn.k_norm.weight", "qk_norm", "head_dim"),
)
QK_NORMS_ALL = (
    Tensor("self_attn.q_norm.weight", "qk_norm_all", "q"),
    Tensor("self_attn.k_norm.weight", "qk_norm_all", "kv"),
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


def norms(*places: str) -> tuple[Tensor, ...]:
    """Norms by the places that they have in their names."""
    return tuple(Tensor(f"{place}_layernorm.weight", "norm", "width") for place in places)


NORMS = norms("input", "post_attention")
BEHIND = ("post_attention", "post_feedforward")

# What a file leaves out: layers of another kind, which the library then counts by their places.


def windows_from_above(c: Config) -> list[str]:
    """Qwen's windows, which only layers from a number on have."""
    if not c.get("use_sliding_window") or c.get("sliding_window", 4096) is None:
        return []
    first = c.get("max_window_layers", 28)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(c["num_hidden_layers"])]


def windows_by_pattern(c: Config) -> list[str]:
    """Gemma 3's windows, in all but every so many-th layer."""
    every = c.get("sliding_window_pattern", 6)
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(c["num_hidden_layers"])]


def rotary_by_interval(c: Config) -> list[int]:
    """SmolLM3's layers with rotary positions (1), all but every so many-th."""
    every = c.get("no_rope_layer_interval", 4)
    return [int((i + 1) % every != 0) for i in range(c["num_hidden_layers"])]


LLAMA = of_transformers(
    "llama",
    keys=replace(HEAD_DIM_KEYS, kv_heads="num_key_value_heads"),
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
QWEN2 = derive(
    MISTRAL,
    name="qwen2",
    model_types=("qwen2",),
    block=(*ATTENTION, *BIASES, *MLP, *NORMS),
    defaults={"layer_types": windows_from_above},
)
QWEN3 = derive(
    QWEN2, name="qwen3", model_types=("qwen3",), block=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *MLP, *NORMS)
)
GEMMA = derive(
    MISTRAL,
    name="gemma",
    model_types=("gemma",),
    block=(*ATTENTION, *OPTIONAL_BIASES, *MLP, *NORMS),
)
SMOLLM3 = derive(
    LLAMA,
    name="smollm3",
    model_types=("smollm3",),
    per_layer=("layer_types", "no_rope_layers"),
    defaults={"no_rope_layers": rotary_by_interval},
    heads_divide_width=False,
)
GEMMA3_TEXT = derive(
    GEMMA,
    name="gemma3_text",
    model_types=("gemma3_text",),
    block=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *MLP, *norms("input", *BEHIND, "pre_feedforward")),
    norm="around",
    heads_divide_width=True,
    defaults={"layer_types": windows_by_pattern},
)
OLMO2 = derive(
    MISTRAL,
    name="olmo2",
    model_types=("olmo2",),
    block=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS_ALL, *MLP, *norms(*BEHIND)),
    norm="behind",
    per_layer=(),
)
GLM4 = derive(
    MISTRAL,
    name="glm4",
    model_types=("glm4",),
    block=(
        *ATTENTION,
        *OPTIONAL_QKV_BIASES,
        Tensor("mlp.gate_up_proj.weight", "up", "mlp+mlp width"),
        Tensor("mlp.down_proj.weight", "down", "width mlp"),
        *norms("input", "post_attention", "post_self_attn", "post_mlp"),
    ),
    norm="around",
    per_layer=(),
)
