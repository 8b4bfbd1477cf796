"""DistilBERT: a post-norm encoder with names of its own; the library derives head_dim from dim // n_heads."""

from leansurgeon.architectures.base import Keys, Tensor
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import attention, linear, norm

DISTILBERT = of_transformers(
    "distilbert",
    keys=Keys("n_layers", "n_heads", "dim", mlp_dim="hidden_dim"),
    prefixes=("distilbert.", ""),
    layer="transformer.layer.{i}.",
    block=(
        *attention("attention.", "q_lin k_lin v_lin out_lin"),
        *norm("sa_layer_norm"),
        *linear("ffn.lin1", "up", "mlp", "width"),
        *linear("ffn.lin2", "down", "width", "mlp"),
        *norm("output_layer_norm"),
    ),
    outer=(
        Tensor("embeddings.word_embeddings.weight", "embedding", "vocab width"),
        Tensor("embeddings.position_embeddings.weight", "embedding", "positions width"),
        *norm("embeddings.LayerNorm"),
    ),
    sizes={"vocab": "vocab_size", "positions": "max_position_embeddings"},
    projection="transformer.layer.{i}.attention.out_lin",
    tied=("vocab_projector.weight",),
    masked_head=("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
    norm="post",
)
