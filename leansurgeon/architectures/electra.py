"""ELECTRA: BERT's blocks behind embeddings that may be narrower than the model."""

from leansurgeon.architectures.base import Tensor, derive
from leansurgeon.architectures.bert import BERT
from leansurgeon.architectures.tensors import linear, norm

ELECTRA = derive(
    BERT,
    name="electra",
    model_types=("electra",),
    prefixes=("electra.", ""),
    outer=(
        Tensor("embeddings.word_embeddings.weight", "embedding", "vocab embedding"),
        Tensor("embeddings.position_embeddings.weight", "embedding", "positions embedding"),
        Tensor("embeddings.token_type_embeddings.weight", "embedding", "types embedding"),
        *norm("embeddings.LayerNorm", "embedding"),
        *linear("embeddings_project", "embedding", "width", "embedding", when="projected"),
    ),
    sizes={**BERT.sizes, "embedding": "embedding_size"},
    switches={"projected": lambda c: c["embedding_size"] != c["hidden_size"]},
    tied=("generator_lm_head.weight",),
    masked_head=("generator_predictions", "generator_lm_head"),
    decoupled=None,
)
