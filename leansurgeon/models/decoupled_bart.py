"""BART and mBART with a free head_dim in each stack.

These are transformers' own models with attentions of heads * head_dim columns. The file stands alone: it travels inside
checkpoints and needs only torch and transformers.

Tensor names are the library's; without a head_dim (d_model // heads) the model is the library's. transformers derives
head_dim from the width and silently ignores one in the config, so heads * head_dim could not differ from the width, and
heads would have to divide it. Both attentions of a decoder layer have the decoder's heads.
"""

import copy

from torch import nn
from transformers.models.bart.configuration_bart import BartConfig
from transformers.models.bart.modeling_bart import (
    BartAttention,
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
)
from transformers.models.mbart.configuration_mbart import MBartConfig
from transformers.models.mbart.modeling_mbart import (
    MBartAttention,
    MBartForConditionalGeneration,
    MBartForQuestionAnswering,
    MBartForSequenceClassification,
    MBartModel,
)


class LeanBartConfig(BartConfig):
    """`encoder_head_dim=None` and `decoder_head_dim=None` mean d_model // heads."""

    model_type = "leansurgeon_bart"

    encoder_head_dim: int | None = None
    decoder_head_dim: int | None = None


class LeanMBartConfig(MBartConfig):
    """`encoder_head_dim=None` and `decoder_head_dim=None` mean d_model // heads."""

    model_type = "leansurgeon_mbart"

    encoder_head_dim: int | None = None
    decoder_head_dim: int | None = None


def rebuild(attention, config, heads, head_dim):
    """Replace the projections: d_model -> heads * head_dim -> d_model. The forward pass is the library's."""
    attention.num_heads = heads
    attention.head_dim = head_dim or config.d_model // heads
    attention.scaling = attention.head_dim**-0.5
    inner = heads * attention.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(config.d_model, inner))
    attention.out_proj = nn.Linear(inner, config.d_model)


class Free:
    """Mixin placed before a class of the library."""

    def __init__(self, config):
        config = copy.copy(config)
        encoder, decoder = config.encoder_attention_heads, config.decoder_attention_heads
        # One head divides every width, so the library's constructors accept it.
        config.encoder_attention_heads = config.decoder_attention_heads = 1
        super().__init__(config)
        config.encoder_attention_heads, config.decoder_attention_heads = encoder, decoder
        for module in self.modules():
            if isinstance(module, BartAttention | MBartAttention):
                own = (decoder, config.decoder_head_dim) if module.is_decoder else (encoder, config.encoder_head_dim)
                rebuild(module, config, *own)
        self.post_init()


class LeanBartModel(Free, BartModel):
    config_class = LeanBartConfig


class LeanBartForConditionalGeneration(Free, BartForConditionalGeneration):
    config_class = LeanBartConfig


class LeanBartForSequenceClassification(Free, BartForSequenceClassification):
    config_class = LeanBartConfig


class LeanBartForQuestionAnswering(Free, BartForQuestionAnswering):
    config_class = LeanBartConfig


class LeanMBartModel(Free, MBartModel):
    config_class = LeanMBartConfig


class LeanMBartForConditionalGeneration(Free, MBartForConditionalGeneration):
    config_class = LeanMBartConfig


class LeanMBartForSequenceClassification(Free, MBartForSequenceClassification):
    config_class = LeanMBartConfig


class LeanMBartForQuestionAnswering(Free, MBartForQuestionAnswering):
    config_class = LeanMBartConfig


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
