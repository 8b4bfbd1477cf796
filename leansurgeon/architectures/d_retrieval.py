"""The transformer of generalised D-retrieval: one attention layer read at a class token, no norms; our own module."""

from leansurgeon.architectures.base import Tensor
from leansurgeon.architectures.lean import own
from leansurgeon.architectures.nystromformer_lra import labels
from leansurgeon.architectures.tensors import attention, linear

D_RETRIEVAL = own(
    "d_retrieval",
    prefixes=("model.", ""),
    block=(
        *attention("attention.", "query key value output"),
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
    # Linear layers start as torch starts them: U(-a, a) with a = 1/sqrt(32), whose deviation is a / sqrt 3.
    init_std=0.102,
    plain=False,
)
