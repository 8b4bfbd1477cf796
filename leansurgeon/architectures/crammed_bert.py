"""Crammed BERT (arXiv 2212.14034): pre-norm encoder without linear biases, gated MLP, sinusoidal positions; our own
module.
"""

from leansurgeon.architectures.base import Architecture, Keys, Tensor
from leansurgeon.architectures.tensors import norm

CRAMMED_BERT = Architecture(
    name="crammed_bert",
    library="leansurgeon",
    model_types=("crammed_bert",),
    keys=Keys(
        "num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="intermediate_size", head_dim="head_dim"
    ),
    prefixes=("encoder.", ""),
    layer="layers.{i}.",
    block=(
        *norm("attention_norm"),
        Tensor("attention.query.weight", "q", "q width"),
        Tensor("attention.key.weight", "k", "kv width"),
        Tensor("attention.value.weight", "v", "kv width"),
        Tensor("attention.output.weight", "o", "width q"),
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
    projection="layers.{i}.attention.output",
    norm="pre",
    positions="none",  # sinusoids are computed, not stored
    tied=("decoder.weight",),
    masked_head=("decoder",),
    modelling="crammed_bert.py",
)
