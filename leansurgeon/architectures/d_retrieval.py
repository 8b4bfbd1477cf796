"""The transformer of generalised D-retrieval: one attention layer read at a class token, no norms; our own module."""

from leansurgeon.architectures.base import Architecture, Keys, Tensor
from leansurgeon.architectures.nystromformer_lra import labels

D_RETRIEVAL = Architecture(
    name="d_retrieval",
    library="leansurgeon",
    model_types=("d_retrieval",),
    keys=Keys(
        "num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="intermediate_size", head_dim="head_dim"
    ),
    prefixes=("model.", ""),
    layer="layers.{i}.",
    block=(
        Tensor("attention.query.weight", "q", "q width"),
        Tensor("attention.query.bias", "q", "q"),
        Tensor("attention.key.weight", "k", "kv width"),
        Tensor("attention.key.bias", "k", "kv"),
        Tensor("attention.value.weight", "v", "kv width"),
        Tensor("attention.value.bias", "v", "kv"),
        Tensor("attention.output.weight", "o", "width q"),
        Tensor("attention.output.bias", "o", "width"),
        Tensor("mlp.up.weight", "up", "mlp width"),
        Tensor("mlp.up.bias", "up", "mlp"),
        Tensor("mlp.down.weight", "down", "width mlp"),
        Tensor("mlp.down.bias", "down", "width"),
    ),
    outer=(
        Tensor("encoder_up.weight", "embedding", "encoder input"),
        Tensor("encoder_up.bias", "embedding", "encoder"),
        Tensor("encoder_down.weight", "embedding", "width encoder"),
        Tensor("encoder_down.bias", "embedding", "width"),
        Tensor("class_token", "embedding", "width"),
        Tensor("/readout.weight", "head", "labels width"),
        Tensor("/readout.bias", "head", "labels"),
    ),
    sizes={"encoder": "encoder_size", "input": "input_size", "labels": labels},
    projection="layers.{i}.attention.output",
    norm="pre",
    # Linear layers start as torch starts them: U(-a, a) with a = 1/sqrt(32), whose deviation is a / sqrt 3.
    init_std=0.102,
    modelling="d_retrieval.py",
    plain=False,
)
