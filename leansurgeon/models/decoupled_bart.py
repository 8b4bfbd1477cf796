"""BART and mBART with a free head_dim in each stack: transformers' own models, their attention rebuilt with
heads * head_dim columns.

This file stands alone: it travels inside checkpoints and needs nothing but torch and transformers.

Tensor names are the library's; a head_dim of None (d_model // heads) gives the library's model itself. transformers
derives head_dim from the width and silently ignores one in the config, so heads * head_dim could not differ from the
width, nor heads fail to divide it. Both attentions of a decoder layer have the decoder's heads.

The library has the two families as twins; what they share here are the `Free...` classes, each put before the class of
the library.
"""

import copy
import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.bart.configuration_bart import BartConfig
from transformers.models.bart.modeling_bart import (
    BartClassificationHead,
    BartDecoder,
    BartEncoder,
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
    BartScaledWordEmbedding,
)
from transformers.models.mbart.configuration_mbart import MBartConfig
from transformers.models.mbart.modeling_mbart import (
    MBartClassificationHead,
    MBartDecoder,
    MBartEncoder,
    MBartForConditionalGeneration,
    MBartForQuestionAnswering,
    MBartForSequenceClassification,
    MBartModel,
    MBartScaledWordEmbedding,
)


class LeanBartConfig(BartConfig):
    """A head_dim of None means d_model // heads."""

    model_type = "leansurgeon_bart"

    encoder_head_dim: int | None = None
    decoder_head_dim: int | None = None


class LeanMBartConfig(MBartConfig):
    """A head_dim of None means d_model // heads."""

    model_type = "leansurgeon_mbart"

    encoder_head_dim: int | None = None
    decoder_head_dim: int | None = None


def one_head(config):
    """A copy with one head in each stack, which divides every width: what the library's constructors are given before
    the attention is rebuilt.
    """
    config = copy.copy(config)
    config.encoder_attention_heads = config.decoder_attention_heads = 1
    return config


def rebuild(attention, config, heads, head_dim):
    """`(batch, tokens, d_model)` -> `(batch, tokens, heads * head_dim)` -> back; the forward pass is the library's."""
    attention.config = config
    attention.num_heads = heads
    attention.head_dim = head_dim or config.d_model // heads
    attention.scaling = attention.head_dim**-0.5
    inner = heads * attention.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(config.d_model, inner))
    attention.out_proj = nn.Linear(inner, config.d_model)


class FreeEncoder:
    def __init__(self, config):
        super().__init__(one_head(config))
        self.config = config
        for layer in self.layers:
            rebuild(layer.self_attn, config, config.encoder_attention_heads, config.encoder_head_dim)
        self.post_init()


class FreeDecoder:
    def __init__(self, config):
        super().__init__(one_head(config))
        self.config = config
        for layer in self.layers:
            for attention in (layer.self_attn, layer.encoder_attn):
                rebuild(attention, config, config.decoder_attention_heads, config.decoder_head_dim)
        self.post_init()


class FreeModel:
    """The library's model, made of these `parts`: embedding, encoder, decoder."""

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        embedding, encoder, decoder = self.parts
        self.shared = embedding(config.vocab_size, config.d_model, config.pad_token_id, embed_scale=scale)
        self.encoder = encoder(config)
        self.decoder = decoder(config)
        self.post_init()


class FreeForConditionalGeneration:
    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.model = self.body(config)
        self.register_buffer("final_logits_bias", torch.zeros((1, config.vocab_size)))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()


class FreeForSequenceClassification:
    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.model = self.body(config)
        self.classification_head = self.head(
            config.d_model, config.d_model, config.num_labels, config.classifier_dropout
        )
        self.post_init()


class FreeForQuestionAnswering:
    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        config.num_labels = self.num_labels = 2
        self.model = self.body(config)
        self.qa_outputs = nn.Linear(config.d_model, config.num_labels)
        self.post_init()


class LeanBartEncoder(FreeEncoder, BartEncoder):
    pass


class LeanBartDecoder(FreeDecoder, BartDecoder):
    pass


class LeanBartModel(FreeModel, BartModel):
    config_class = LeanBartConfig
    parts = (BartScaledWordEmbedding, LeanBartEncoder, LeanBartDecoder)


class LeanBartForConditionalGeneration(FreeForConditionalGeneration, BartForConditionalGeneration):
    config_class, body = LeanBartConfig, LeanBartModel


class LeanBartForSequenceClassification(FreeForSequenceClassification, BartForSequenceClassification):
    config_class, body, head = LeanBartConfig, LeanBartModel, BartClassificationHead


class LeanBartForQuestionAnswering(FreeForQuestionAnswering, BartForQuestionAnswering):
    config_class, body = LeanBartConfig, LeanBartModel


class LeanMBartEncoder(FreeEncoder, MBartEncoder):
    pass


class LeanMBartDecoder(FreeDecoder, MBartDecoder):
    pass


class LeanMBartModel(FreeModel, MBartModel):
    config_class = LeanMBartConfig
    parts = (MBartScaledWordEmbedding, LeanMBartEncoder, LeanMBartDecoder)


class LeanMBartForConditionalGeneration(FreeForConditionalGeneration, MBartForConditionalGeneration):
    config_class, body = LeanMBartConfig, LeanMBartModel


class LeanMBartForSequenceClassification(FreeForSequenceClassification, MBartForSequenceClassification):
    config_class, body, head = LeanMBartConfig, LeanMBartModel, MBartClassificationHead


class LeanMBartForQuestionAnswering(FreeForQuestionAnswering, MBartForQuestionAnswering):
    config_class, body = LeanMBartConfig, LeanMBartModel


AUTO_MAP = {
    "leansurgeon_bart": {
        "AutoConfig": "LeanBartConfig",
        "AutoModel": "LeanBartModel",
        "AutoModelForSeq2SeqLM": "LeanBartForConditionalGeneration",
        "AutoModelForSequenceClassification": "LeanBartForSequenceClassification",
        "AutoModelForQuestionAnswering": "LeanBartForQuestionAnswering",
    },
    "leansurgeon_mbart": {
        "AutoConfig": "LeanMBartConfig",
        "AutoModel": "LeanMBartModel",
        "AutoModelForSeq2SeqLM": "LeanMBartForConditionalGeneration",
        "AutoModelForSequenceClassification": "LeanMBartForSequenceClassification",
        "AutoModelForQuestionAnswering": "LeanMBartForQuestionAnswering",
    },
}
