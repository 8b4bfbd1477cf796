"""Crammed BERT (arXiv 2212.14034): pre-norm encoder without linear biases, gated MLP, sinusoidal positions; our own
module.
"""

from leansurgeon.architectures.base import Architecture, Keys, Tensor

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
        Tensor("attention_norm.weight", "norm", "width"),
        Tensor("attention_norm.bias", "norm", "width"),
        Tensor("attention.query.weight", "q", "q width"),
        Tensor("attention.key.weight", "k", "kv width"),
        Tensor("attention.value.weight", "v", "kv width"),
        Tensor("attention.output.weight", "o", "width q"),
        Tensor("mlp_norm.weight", "norm", "width"),
        Tensor("mlp_norm.bias", "norm", "width"),
        Tensor("mlp.up.weight", "up", "mlp width"),
        Tensor("mlp.gate.weight", "gate", "mlp width"),
        Tensor("mlp.down.weight", "down", "width mlp"),
    ),
    outer=(
        Tensor("embeddings.word_embeddings.weight", "embedding", "vocab width"),
        Tensor("embeddings.position_scale", "embedding", "1"),
        Tensor("embeddings.norm.weight", "norm", "width"),
        Tensor("embeddings.norm.bias", "norm", "width"),
        Tensor("final_norm.weight", "norm", "width"),
        Tensor("final_norm.bias", "norm", "width"),
    ),
    sizes={"vocab": "vocab_size"},
    projection="layers.{i}.attention.output",
    norm="pre",
    positions="none",  # sinusoids are computed, not stored
    tied=("decoder.weight",),
    modelling="crammed_bert.py",
)
