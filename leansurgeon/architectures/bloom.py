"""BLOOM: a decoder without positions but for slopes (ALiBi), which follow from the number of heads; q, k and v are
interleaved head by head in one matrix.
"""

from leansurgeon.architectures.base import Keys, Tensor, derive
from leansurgeon.architectures.gpt_neox import GPT_NEOX

BLOOM = derive(
    GPT_NEOX,
    name="bloom",
    model_types=("bloom",),
    keys=Keys("n_layer", "n_head", "hidden_size"),
    prefixes=("transformer.", ""),
    layer="h.{i}.",
    block=tuple(
        Tensor(t.name.replace("attention.", "self_attention.", t.name.startswith("attention")), t.role, t.axes)
        for t in GPT_NEOX.block
    ),
    outer=(
        Tensor("word_embeddings.weight", "embedding", "vocab width"),
        Tensor("word_embeddings_layernorm.weight", "norm", "width"),
        Tensor("word_embeddings_layernorm.bias", "norm", "width"),
        Tensor("ln_f.weight", "norm", "width"),
        Tensor("ln_f.bias", "norm", "width"),
    ),
    projection="h.{i}.self_attention.dense",
    tied=("lm_head.weight",),
    positions="none",
    refused={"heads": "its slopes (ALiBi) follow from their number"},
)
