"""Crammed BERT (arXiv 2212.14034): pre-norm encoder without linear biases, gated MLP, sinusoidal positions; our own
module.
"""

from leansurgeon.architectures.base import Tensor
from leansurgeon.architectures.lean import own
from leansurgeon.architectures.tensors import attention, norm

CRAMMED_BERT = own(
    "crammed_bert",
    prefixes=("encoder.", ""),
    block=(
        *norm("attention_norm"),
        *attention("attention.", "query key value output", bias=False),
        *norm("mlp_norm"),
        Tensor("mlp.up.weight", "up", "mlp width"),
        Tensor("mlp.gate.weight", "gate", "mlp width"),
        Tensor("mlp.down.weight", "down", "width mlp"),
    ),
    outer=(
        Tensor("embeddings.word_embeddings.weight", "embedding", "vocab width"),
        Tensor("embeddings.position_scale", "embedding", "1"),
        *norm("embeddings.norm"),
        *norm("final_norm"),
    ),
    sizes={"vocab": "vocab_size"},
    positions="none",  # sinusoids are computed, not stored
    tied=("decoder.weight",),
    masked_head=("decoder",),
)
