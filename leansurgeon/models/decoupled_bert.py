"""BERT and RoBERTa with a free head_dim: transformers' own models with attentions of heads * head_dim columns.

This file stands alone: it travels inside checkpoints and needs only torch and transformers.

Tensor names are the library's; with `head_dim=None` (hidden_size // num_attention_heads) the model is the library's.
transformers derives head_dim from the width and silently ignores one in the config, so heads * head_dim could not
differ from the width, and heads would have to divide it.

In the library the two families are twins. XLM-RoBERTa and CamemBERT have RoBERTa's tensors under the same names and
become RoBERTa when they are cut.
"""

import copy

from torch import nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
)
from transformers.models.roberta.configuration_roberta import RobertaConfig
from transformers.models.roberta.modeling_roberta import (
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)


class LeanBertConfig(BertConfig):
    """`head_dim=None` means hidden_size // num_attention_heads."""

    model_type = "leansurgeon_bert"

    head_dim: int | None = None


class LeanRobertaConfig(RobertaConfig):
    """`head_dim=None` means hidden_size // num_attention_heads."""

    model_type = "leansurgeon_roberta"

    head_dim: int | None = None


def rebuild(attention, config):
    """Replace the projections: width -> heads * head_dim -> width. The forward pass is the library's."""
    inside, width = attention.self, config.hidden_size
    inside.num_attention_heads = config.num_attention_heads
    inside.attention_head_size = config.head_dim or width // config.num_attention_heads
    inside.all_head_size = inside.num_attention_heads * inside.attention_head_size
    inside.scaling = inside.attention_head_size**-0.5
    for name in ("query", "key", "value"):
        setattr(inside, name, nn.Linear(width, inside.all_head_size))
    attention.output.dense = nn.Linear(inside.all_head_size, width)


class Free:
    """Mixin placed before a class of the library."""

    def __init__(self, config, *args, **kwargs):
        if config.is_decoder or config.add_cross_attention:
            raise ValueError("This model is an encoder: is_decoder and add_cross_attention must be false.")
        config, heads = copy.copy(config), config.num_attention_heads
        config.num_attention_heads = 1  # divides every width, so the library's constructors accept it
        super().__init__(config, *args, **kwargs)
        config.num_attention_heads = heads
        for layer in self.base_model.encoder.layer:
            rebuild(layer.attention, config)
        self.post_init()


class LeanBertModel(Free, BertModel):
    config_class = LeanBertConfig


class LeanBertForMaskedLM(Free, BertForMaskedLM):
    config_class = LeanBertConfig


class LeanBertForPreTraining(Free, BertForPreTraining):
    config_class = LeanBertConfig


class LeanBertForSequenceClassification(Free, BertForSequenceClassification):
    config_class = LeanBertConfig


class LeanRobertaModel(Free, RobertaModel):
    config_class = LeanRobertaConfig


class LeanRobertaForMaskedLM(Free, RobertaForMaskedLM):
    config_class = LeanRobertaConfig


class LeanRobertaForSequenceClassification(Free, RobertaForSequenceClassification):
    config_class = LeanRobertaConfig


AUTO_MAP = {
    "leansurgeon_bert": {
        "AutoConfig": "LeanBertConfig",
        "AutoModel": "LeanBertModel",
        "AutoModelForPreTraining": "LeanBertForPreTraining",
        "AutoModelForMaskedLM": "LeanBertForMaskedLM",
        "AutoModelForSequenceClassification": "LeanBertForSequenceClassification",
    },
    "leansurgeon_roberta": {
        "AutoConfig": "LeanRobertaConfig",
        "AutoModel": "LeanRobertaModel",
        "AutoModelForMaskedLM": "LeanRobertaForMaskedLM",
        "AutoModelForSequenceClassification": "LeanRobertaForSequenceClassification",
    },
}
