"""Tiny-Stories GPT (the "GPT-2, 89M" of the paper's Table 2): pre-norm decoder, q, k, v without biases, untied head;
our own module.
"""

from leansurgeon.architectures.base import Tensor
from leansurgeon.architectures.lean import own
from leansurgeon.architectures.tensors import attention, linear, norm

TINYSTORIES_GPT = own(
    "tinystories_gpt",
    prefixes=("model.", ""),
    block=(
        *norm("attention_norm"),
        *attention("attention.", "query key value output", bias=False, o_bias=True),
        Tensor("attention.query_norm.weight", "qk_norm", "head_dim", when="qk_norm"),
        Tensor("attention.key_norm.weight", "qk_norm", "head_dim", when="qk_norm"),
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
    causal=True,
    per_head_divides=False,  # 512 // 12 = 42
)
