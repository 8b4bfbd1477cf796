"""BERT and RoBERTa: post-norm encoders whose library derives head_dim from width // heads."""

from leansurgeon.architectures.base import Tensor, derive
from leansurgeon.architectures.facts import Takes
from leansurgeon.architectures.lean import lean, of_transformers
from leansurgeon.architectures.tensors import attention, linear, norm

BERT = of_transformers(
    "bert",
    prefixes=("bert.", ""),
    layer="encoder.layer.{i}.",
    block=(
        *attention("attention.", "self.query self.key self.value output.dense"),
        *norm("attention.output.LayerNorm"),
        *linear("intermediate.dense", "up", "mlp", "width"),
        *linear("output.dense", "down", "width", "mlp"),
        *norm("output.LayerNorm"),
    ),
    outer=(
        Tensor("embeddings.word_embeddings.weight", "embedding", "vocab width"),
        Tensor("embeddings.position_embeddings.weight", "embedding", "positions width"),
        Tensor("embeddings.token_type_embeddings.weight", "embedding", "types width"),
        *norm("embeddings.LayerNorm"),
    ),
    sizes={"vocab": "vocab_size", "positions": "max_position_embeddings", "types": "type_vocab_size"},
    projection="encoder.layer.{i}.attention.output.dense",
    tied=(
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "lm_head.decoder.weight",
        "lm_head.decoder.bias",
    ),
    masked_head=("cls",),
    norm="post",
    decoupled="leansurgeon_bert",
    # Pre-training files carry every head; files of the first years name the norms' parameters gamma and beta.
    unused={
        "ForMaskedLM": ("bert.pooler.", "cls.seq_relationship.", "roberta.pooler."),
        "ForSequenceClassification": ("cls.", "lm_head.", "roberta.pooler."),
        "ForTokenClassification": ("cls.", "lm_head.", "bert.pooler.", "roberta.pooler."),
        "ForQuestionAnswering": ("cls.", "lm_head.", "bert.pooler.", "roberta.pooler."),
    },
    renames={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)

ROBERTA = derive(
    BERT,
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert"),
    prefixes=("roberta.", ""),
    masked_head=("lm_head",),
    decoupled="leansurgeon_roberta",
    # The first position stands behind that of the padding token.
    takes=Takes(skipped_positions=lambda c: c.get("pad_token_id", 1) + 1),
)

LEAN_BERT = lean(
    BERT,
    "decoupled_bert.py",
    unknown=("is_decoder", "add_cross_attention"),
    classes={
        "BertModel": "LeanBertModel",
        "BertForMaskedLM": "LeanBertForMaskedLM",
        "BertForPreTraining": "LeanBertForPreTraining",
        "BertForSequenceClassification": "LeanBertForSequenceClassification",
    },
)

LEAN_ROBERTA = lean(
    ROBERTA,
    "decoupled_bert.py",
    unknown=("is_decoder", "add_cross_attention"),
    # XLM-RoBERTa and CamemBERT are RoBERTa with another tokenizer: same tensors, same names.
    classes={
        f"{family}{head}": f"LeanRoberta{head}"
        for family in ("Roberta", "XLMRoberta", "Camembert")
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
    },
)
