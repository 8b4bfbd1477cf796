"""The Long Range Arena classifier (paper, Table 3): pre-norm encoder, Nystrom or softmax attention; our own module."""

from leansurgeon.architectures.base import Config, Tensor
from leansurgeon.architectures.facts import Takes
from leansurgeon.architectures.lean import own
from leansurgeon.architectures.nystromformer import LANDMARKS, only_tokens
from leansurgeon.architectures.tensors import linear, norm


def labels(config: Config) -> int:
    """Classes of the head; transformers leaves out id2label where there are two."""
    return len(config.get("id2label") or {0: 0, 1: 1})


NYSTROMFORMER_LRA = own(
    "nystromformer_lra",
    prefixes=("encoder.", ""),
    block=(
        *norm("attention_norm"),
        *linear("attention.query", "q", "q", "width"),
        *linear("attention.key", "k", "kv", "width"),
        *linear("attention.value", "v", "kv", "width"),
        Tensor("attention.conv.weight", "head_param", "heads 1 kernel 1", when="conv_kernel_size"),
        *linear("attention.output", "o", "width", "q"),
        *norm("mlp_norm"),
        *linear("mlp.up", "up", "mlp", "width"),
        *linear("mlp.down", "down", "width", "mlp"),
    ),
    outer=(
        Tensor("token_embeddings.weight", "embedding", "vocab width"),
        Tensor("position_embeddings.weight", "embedding", "positions width"),
        *norm("final_norm"),
        *linear("/classifier_hidden", "head", "classifier", "pooled"),
        *linear("/classifier", "head", "labels", "classifier"),
    ),
    sizes={
        "vocab": "vocab_size",
        "positions": "max_position_embeddings",
        "kernel": "conv_kernel_size",
        "classifier": "classifier_hidden_size",
        "pooled": lambda c: c["hidden_size"] * (4 if c.get("dual_input") else 1),
        "labels": labels,
    },
    # Linear layers start as torch starts them: U(-1/8, 1/8) for a width of 64, whose deviation is 1 / (8 sqrt 3).
    init_std=0.072,
    takes=Takes(only_tokens=only_tokens, second_text="dual_input"),
    plain=False,
    heads_unsplittable=LANDMARKS,
)
