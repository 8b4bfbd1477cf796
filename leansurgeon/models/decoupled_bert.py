"""BERT and RoBERTa with a free head_dim: transformers' own, their attention rebuilt with heads * head_dim columns.

This file stands alone: it travels inside checkpoints and needs nothing but torch and transformers.

Tensor names are the library's; `head_dim` None (hidden_size // num_attention_heads) gives the library's model itself.
transformers derives head_dim from the width and silently ignores one in the config, so heads * head_dim could not
differ from the width, nor heads fail to divide it.

The library has the two families as twins; what they share here are the `Free...` classes, each put before the class of
the library. XLM-RoBERTa and CamemBERT have RoBERTa's tensors under the same names and become that family when they are
cut.
"""

import copy

from torch import nn
from transformers import PreTrainedModel
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertEncoder,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    BertOnlyMLMHead,
    BertPooler,
    BertPreTrainingHeads,
    BertSelfAttention,
)
from transformers.models.roberta.configuration_roberta import RobertaConfig
from transformers.models.roberta.modeling_roberta import (
    RobertaClassificationHead,
    RobertaEmbeddings,
    RobertaEncoder,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaLMHead,
    RobertaModel,
    RobertaPooler,
    RobertaSelfAttention,
)


class LeanBertConfig(BertConfig):
    """`head_dim` None means hidden_size // num_attention_heads."""

    model_type = "leansurgeon_bert"

    head_dim: int | None = None


class LeanRobertaConfig(RobertaConfig):
    """`head_dim` None means hidden_size // num_attention_heads."""

    model_type = "leansurgeon_roberta"

    head_dim: int | None = None


def one_head(config):
    """A copy with one head, which divides every width: what the library's constructors are given before the attention
    is rebuilt.
    """
    config = copy.copy(config)
    config.num_attention_heads = 1
    return config


class FreeSelfAttention:
    """`(batch, tokens, width)` -> `(batch, tokens, heads * head_dim)`; the forward pass is the library's."""

    def __init__(self, config, layer_idx=None):
        super().__init__(one_head(config), layer_idx=layer_idx)
        self.config = config
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.head_dim or config.hidden_size // config.num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.scaling = self.attention_head_size**-0.5
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)


class FreeEncoder:
    """The library's encoder with an `attention` of these classes in every layer."""

    def __init__(self, config):
        if config.is_decoder or config.add_cross_attention:
            raise ValueError("This model is an encoder: is_decoder and add_cross_attention must be false.")
        super().__init__(one_head(config))
        self.config = config
        for index, layer in enumerate(self.layer):
            attention = self.attention(config, layer_idx=index)
            layer.attention.self = attention
            layer.attention.output.dense = nn.Linear(attention.all_head_size, config.hidden_size)


class FreeModel:
    """The library's model, made of these `parts`: embeddings, encoder, pooler."""

    def __init__(self, config, add_pooling_layer=True):
        PreTrainedModel.__init__(self, config)
        self.gradient_checkpointing = False
        embeddings, encoder, pooler = self.parts
        self.embeddings = embeddings(config)
        self.encoder = encoder(config)
        self.pooler = pooler(config) if add_pooling_layer else None
        self.post_init()


class LeanBertSelfAttention(FreeSelfAttention, BertSelfAttention):
    pass


class LeanBertEncoder(FreeEncoder, BertEncoder):
    attention = LeanBertSelfAttention


class LeanBertModel(FreeModel, BertModel):
    config_class = LeanBertConfig
    parts = (BertEmbeddings, LeanBertEncoder, BertPooler)


class LeanRobertaSelfAttention(FreeSelfAttention, RobertaSelfAttention):
    pass


class LeanRobertaEncoder(FreeEncoder, RobertaEncoder):
    attention = LeanRobertaSelfAttention


class LeanRobertaModel(FreeModel, RobertaModel):
    config_class = LeanRobertaConfig
    parts = (RobertaEmbeddings, LeanRobertaEncoder, RobertaPooler)


class LeanBertForMaskedLM(BertForMaskedLM):
    config_class = LeanBertConfig

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.bert = LeanBertModel(config, add_pooling_layer=False)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()


class LeanBertForPreTraining(BertForPreTraining):
    config_class = LeanBertConfig

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.bert = LeanBertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.post_init()


class LeanBertForSequenceClassification(BertForSequenceClassification):
    config_class = LeanBertConfig

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.bert = LeanBertModel(config)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class LeanRobertaForMaskedLM(RobertaForMaskedLM):
    config_class = LeanRobertaConfig

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.roberta = LeanRobertaModel(config, add_pooling_layer=False)
        self.lm_head = RobertaLMHead(config)
        self.post_init()


class LeanRobertaForSequenceClassification(RobertaForSequenceClassification):
    config_class = LeanRobertaConfig

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.roberta = LeanRobertaModel(config, add_pooling_layer=False)
        self.classifier = RobertaClassificationHead(config)
        self.post_init()


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
