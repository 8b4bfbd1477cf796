"""GPT-2 with a free head_dim: transformers' own GPT-2 with attentions of heads * head_dim columns.

This file stands alone: it travels inside checkpoints and needs only torch and transformers.

Tensor names and layout are GPT-2's (fused qkv, transposed weights); with `head_dim=None` (n_embd // n_head) the model
is GPT-2 itself.
"""

import copy

from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import (
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
)
from transformers.pytorch_utils import Conv1D


class LeanGPT2Config(GPT2Config):
    """`head_dim=None` means n_embd // n_head."""

    model_type = "leansurgeon_gpt2"

    head_dim: int | None = None


def rebuild(block, config):
    """Replace the projections: width -> 3 * heads * head_dim, and back.

    The forward pass, with its cache, is the library's.
    """
    attention, width = block.attn, config.hidden_size
    attention.num_heads = config.num_attention_heads
    attention.head_dim = config.head_dim or width // config.num_attention_heads
    attention.split_size = attention.num_heads * attention.head_dim
    attention.scaling = attention.head_dim**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        attention.scaling /= attention.layer_idx + 1
    attention.c_attn = Conv1D(3 * attention.split_size, width)
    attention.c_proj = Conv1D(width, attention.split_size)
    attention._is_hf_initialized = False  # lets GPT-2 apply its smaller initialisation of residual projections again


class Free:
    """Mixin placed before a class of the library."""

    def __init__(self, config):
        if config.add_cross_attention:
            raise ValueError("Decoupled GPT-2 has no cross-attention: add_cross_attention must be false.")
        config, heads = copy.copy(config), config.num_attention_heads
        config.num_attention_heads = 1  # divides every width, so the library's constructors accept it
        super().__init__(config)
        config.num_attention_heads = heads
        for block in self.base_model.h:
            rebuild(block, config)
        self.post_init()

    @classmethod
    def is_custom_code(cls):
        """Return False: for custom code the library skips modules without own parameters, such as attentions."""
        return False


class LeanGPT2Model(Free, GPT2Model):
    config_class = LeanGPT2Config


class LeanGPT2LMHeadModel(Free, GPT2LMHeadModel):
    config_class = LeanGPT2Config


class LeanGPT2ForSequenceClassification(Free, GPT2ForSequenceClassification):
    config_class = LeanGPT2Config


AUTO_MAP = {
    "AutoConfig": "LeanGPT2Config",
    "AutoModel": "LeanGPT2Model",
    "AutoModelForCausalLM": "LeanGPT2LMHeadModel",
    "AutoModelForSequenceClassification": "LeanGPT2ForSequenceClassification",
}
