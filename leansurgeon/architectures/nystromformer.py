"""Nystromformer of transformers (the LRA classifier of the paper is `nystromformer_lra`): BERT's names, a depthwise
convolution per head, two spare rows in the position table.
"""

from leansurgeon.architectures.base import Tensor, derive
from leansurgeon.architectures.bert import BERT
from leansurgeon.architectures.facts import Config, Takes

LANDMARKS = "attends by way of landmarks, not from token to token"


def only_tokens(config: Config) -> int | None:
    """The length that segments are cut for; with as many landmarks as tokens the attention is an ordinary one."""
    tokens = config.get("segment_means_seq_len")
    return None if tokens == config.get("num_landmarks") else tokens


NYSTROMFORMER = derive(
    BERT,
    name="nystromformer",
    model_types=("nystromformer",),
    prefixes=("nystromformer.", ""),
    block=(
        *BERT.block,
        Tensor("attention.self.conv.weight", "head_param", "heads 1 kernel 1", when="conv_kernel_size"),
    ),
    sizes={
        **BERT.sizes,
        "positions": lambda c: c["max_position_embeddings"] + 2,
        "kernel": "conv_kernel_size",
    },
    decoupled=None,
    takes=Takes(only_tokens=only_tokens),
    plain=False,
    heads_unsplittable=LANDMARKS,
)
