"""mBART with a free head_dim in each stack: transformers' own, its attention rebuilt with heads * head_dim columns.

This file stands alone: it travels inside checkpoints and needs nothing but torch and transformers.

Tensor names are mBART's; a head_dim of None (d_model // heads) gives mBART itself. transformers derives head_dim from
the width and silently ignores one in the config, so heads * head_dim could not differ from the width, nor heads fail to
divide it. Both attentions of a decoder layer have the decoder's heads.
"""

import copy
import math

import torch
from torch import nn
from transformers.models.mbart.configuration_mbart import MBartConfig
from transformers.models.mbart.modeling_mbart import (
    MBartClassificationHead,
    MBartDecoder,
    MBartEncoder,
    MBartForConditionalGeneration,
    MBartForQuestionAnswering,
    MBartForSequenceClassification,
    MBartModel,
    MBartPreTrainedModel,
    MBartScaledWordEmbedding,
)


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


class LeanMBartEncoder(MBartEncoder):
    def __init__(self, config):
        super().__init__(one_head(config))
        self.config = config
        for layer in self.layers:
            rebuild(layer.self_attn, config, config.encoder_attention_heads, config.encoder_head_dim)
        self.post_init()


class LeanMBartDecoder(MBartDecoder):
    def __init__(self, config):
        super().__init__(one_head(config))
        self.config = config
        for layer in self.layers:
            for attention in (layer.self_attn, layer.encoder_attn):
                rebuild(attention, config, config.decoder_attention_heads, config.decoder_head_dim)
        self.post_init()


class LeanMBartModel(MBartModel):
    config_class = LeanMBartConfig

    def __init__(self, config):
        MBartPreTrainedModel.__init__(self, config)
        scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.shared = MBartScaledWordEmbedding(
            config.vocab_size, config.d_model, config.pad_token_id, embed_scale=scale
        )
        self.encoder = LeanMBartEncoder(config)
        self.decoder = LeanMBartDecoder(config)
        self.post_init()


class LeanMBartForConditionalGeneration(MBartForConditionalGeneration):
    config_class = LeanMBartConfig

    def __init__(self, config):
        MBartPreTrainedModel.__init__(self, config)
        self.model = LeanMBartModel(config)
        self.register_buffer("final_logits_bias", torch.zeros((1, config.vocab_size)))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()


class LeanMBartForSequenceClassification(MBartForSequenceClassification):
    config_class = LeanMBartConfig

    def __init__(self, config):
        MBartPreTrainedModel.__init__(self, config)
        self.model = LeanMBartModel(config)
        self.classification_head = MBartClassificationHead(
            config.d_model, config.d_model, config.num_labels, config.classifier_dropout
        )
        self.post_init()


class LeanMBartForQuestionAnswering(MBartForQuestionAnswering):
    config_class = LeanMBartConfig

    def __init__(self, config):
        MBartPreTrainedModel.__init__(self, config)
        config.num_labels = self.num_labels = 2
        self.model = LeanMBartModel(config)
        self.qa_outputs = nn.Linear(config.d_model, config.num_labels)
        self.post_init()


AUTO_MAP = {
    "AutoConfig": "LeanMBartConfig",
    "AutoModel": "LeanMBartModel",
    "AutoModelForSeq2SeqLM": "LeanMBartForConditionalGeneration",
    "AutoModelForSequenceClassification": "LeanMBartForSequenceClassification",
    "AutoModelForQuestionAnswering": "LeanMBartForQuestionAnswering",
}
