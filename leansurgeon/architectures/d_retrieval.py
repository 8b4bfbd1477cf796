"""The transformer of generalised D-retrieval: one attention layer read at a class token, no norms; our own module."""

from leansurgeon.architectures.base import Architecture, Keys, Tensor
from leansurgeon.architectures.nystromformer_lra import labels
from leansurgeon.architectures.tensors import linear

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
        *linear("attention.query", "q", "q", "width"),
        *linear("attention.key", "k", "kv", "width"),
        *linear("attention.value", "v", "kv", "width"),
        *linear("attention.output", "o", "width", "q"),
        *linear("mlp.up", "up", "mlp", "width"),
        *linear("mlp.down", "down", "width", "mlp"),
    ),
    outer=(
        *linear("encoder_up", "embedding", "encoder", "input"),
        *linear("encoder_down", "embedding", "width", "encoder"),
        Tensor("class_token", "embedding", "width"),
        *linear("/readout", "head", "labels", "width"),
    ),
    sizes={"encoder": "encoder_size", "input": "input_size", "labels": labels},
    projection="layers.{i}.attention.output",
    norm="pre",
    # Linear layers start as torch starts them: U(-a, a) with a = 1/sqrt(32), whose deviation is a / sqrt 3.
    init_std=0.102,
    modelling="d_retrieval.py",
    plain=False,
)
