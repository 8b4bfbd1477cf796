"""BART with a free head_dim in each stack: transformers' own BART, its attention rebuilt with heads * head_dim columns.

This file stands alone: it travels inside checkpoints and needs nothing but torch and transformers.

Tensor names are BART's; a head_dim of None (d_model // heads) gives BART itself. transformers derives head_dim from the
width and silently ignores one in the config, so heads * head_dim could not differ from the width, nor heads fail to
divide it. Both attentions of a decoder layer have the decoder's heads.
"""

import copy
import math

import torch
from torch import nn
from transformers.models.bart.configuration_bart import BartConfig
from transformers.models.bart.modeling_bart import (
    BartClassificationHead,
    BartDecoder,
    BartEncoder,
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
    BartPreTrainedModel,
    BartScaledWordEmbedding,
)


class LeanBartConfig(BartConfig):
    """A head_dim of None means d_model // heads."""

    model_type = "leansurgeon_bart"

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


class LeanBartEncoder(BartEncoder):
    def __init__(self, config):
        super().__init__(one_head(config))
        self.config = config
        for layer in self.layers:
            rebuild(layer.self_attn, config, config.encoder_attention_heads, config.encoder_head_dim)
        self.post_init()


class LeanBartDecoder(BartDecoder):
    def __init__(self, config):
        super().__init__(one_head(config))
        self.config = config
        for layer in self.layers:
            for attention in (layer.self_attn, layer.encoder_attn):
                rebuild(attention, config, config.decoder_attention_heads, config.decoder_head_dim)
        self.post_init()


class LeanBartModel(BartModel):
    config_class = LeanBartConfig

    def __init__(self, config):
        BartPreTrainedModel.__init__(self, config)
        scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.shared = BartScaledWordEmbedding(config.vocab_size, config.d_model, config.pad_token_id, embed_scale=scale)
        self.encoder = LeanBartEncoder(config)
        self.decoder = LeanBartDecoder(config)
        self.post_init()


class LeanBartForConditionalGeneration(BartForConditionalGeneration):
    config_class = LeanBartConfig

    def __init__(self, config):
        BartPreTrainedModel.__init__(self, config)
        self.model = LeanBartModel(config)
        self.register_buffer("final_logits_bias", torch.zeros((1, config.vocab_size)))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()


class LeanBartForSequenceClassification(BartForSequenceClassification):
    config_class = LeanBartConfig

    def __init__(self, config):
        BartPreTrainedModel.__init__(self, config)
        self.model = LeanBartModel(config)
        self.classification_head = BartClassificationHead(
            config.d_model, config.d_model, config.num_labels, config.classifier_dropout
        )
        self.post_init()


class LeanBartForQuestionAnswering(BartForQuestionAnswering):
    config_class = LeanBartConfig

    def __init__(self, config):
        BartPreTrainedModel.__init__(self, config)
        config.num_labels = self.num_labels = 2
        self.model = LeanBartModel(config)
        self.qa_outputs = nn.Linear(config.d_model, config.num_labels)
        self.post_init()


AUTO_MAP = {
    "AutoConfig": "LeanBartConfig",
    "AutoModel": "LeanBartModel",
    "AutoModelForSeq2SeqLM": "LeanBartForConditionalGeneration",
    "AutoModelForSequenceClassification": "LeanBartForSequenceClassification",
    "AutoModelForQuestionAnswering": "LeanBartForQuestionAnswering",
}
