"""BERT and RoBERTa: post-norm encoders whose library derives head_dim from width // heads."""

from dataclasses import replace

from leansurgeon.architectures.base import Architecture, Keys, Tensor, derive
from leansurgeon.architectures.facts import Takes

BERT = Architecture(
    name="bert",
    library="transformers",
    model_types=("bert",),
    keys=Keys("num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="intermediate_size"),
    prefixes=("bert.", ""),
    layer="encoder.layer.{i}.",
    block=(
        Tensor("attention.self.query.weight", "q", "q width"),
        Tensor("attention.self.query.bias", "q", "q"),
        Tensor("attention.self.key.weight", "k", "kv width"),
        Tensor("attention.self.key.bias", "k", "kv"),
        Tensor("attention.self.value.weight", "v", "kv width"),
        Tensor("attention.self.value.bias", "v", "kv"),
        Tensor("attention.output.dense.weight", "o", "width q"),
        Tensor("attention.output.dense.bias", "o", "width"),
        Tensor("attention.output.LayerNorm.weight", "norm", "width"),
        Tensor("attention.output.LayerNorm.bias", "norm", "width"),
        Tensor("intermediate.dense.weight", "up", "mlp width"),
        Tensor("intermediate.dense.bias", "up", "mlp"),
        Tensor("output.dense.weight", "down", "width mlp"),
        Tensor("output.dense.bias", "down", "width"),
        Tensor("output.LayerNorm.weight", "norm", "width"),
        Tensor("output.LayerNorm.bias", "norm", "width"),
    ),
    outer=(
        Tensor("embeddings.word_embeddings.weight", "embedding", "vocab width"),
        Tensor("embeddings.position_embeddings.weight", "embedding", "positions width"),
        Tensor("embeddings.token_type_embeddings.weight", "embedding", "types width"),
        Tensor("embeddings.LayerNorm.weight", "norm", "width"),
        Tensor("embeddings.LayerNorm.bias", "norm", "width"),
    ),
    sizes={"vocab": "vocab_size", "positions": "max_position_embeddings", "types": "type_vocab_size"},
    projection="encoder.layer.{i}.attention.output.dense",
    tied=(
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "lm_head.decoder.weight",
        "lm_head.decoder.bias",
    ),
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
    decoupled="leansurgeon_roberta",
    # The first position stands behind that of the padding token.
    takes=Takes(skipped_positions=lambda c: c.get("pad_token_id", 1) + 1),
)

LEAN_BERT = derive(
    BERT,
    name="leansurgeon_bert",
    library="leansurgeon",
    model_types=("leansurgeon_bert",),
    keys=replace(BERT.keys, head_dim="head_dim"),
    decoupled=None,
    modelling="decoupled_bert.py",
    unknown=("is_decoder", "add_cross_attention"),
    classes={
        "BertModel": "LeanBertModel",
        "BertForMaskedLM": "LeanBertForMaskedLM",
        "BertForPreTraining": "LeanBertForPreTraining",
        "BertForSequenceClassification": "LeanBertForSequenceClassification",
    },
)

LEAN_ROBERTA = derive(
    ROBERTA,
    name="leansurgeon_roberta",
    library="leansurgeon",
    model_types=("leansurgeon_roberta",),
    keys=replace(ROBERTA.keys, head_dim="head_dim"),
    decoupled=None,
    modelling="decoupled_bert.py",
    unknown=("is_decoder", "add_cross_attention"),
    # XLM-RoBERTa and CamemBERT are RoBERTa with another tokenizer: same tensors, same names.
    classes={
        f"{family}{head}": f"LeanRoberta{head}"
        for family in ("Roberta", "XLMRoberta", "Camembert")
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
    },
)
