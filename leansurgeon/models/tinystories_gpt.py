"""Tiny-Stories GPT: the decoder behind the "GPT-2, 89M" row of the paper's Table 2, with a free head_dim.

This file stands alone: it travels inside checkpoints and needs only torch and transformers.

It is not GPT-2: heads need not divide the width (512 // 12 = 42, inner width 504), q, k and v have no bias, the
activation is ReLU, and the output layer is untied and has a bias. Figures come from
github.com/PraveenRaja42/Tiny-Stories-GPT (`gpt.py`). `qk_norm`, an RMS norm on queries and keys of every head as in
Qwen3, is not in the original.

Shape letters: B batch, T tokens, D hidden_size, H heads, d head_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class TinyStoriesConfig(PreTrainedConfig):
    """`head_dim=None` means hidden_size // num_attention_heads, rounded down."""

    model_type = "tinystories_gpt"

    vocab_size: int = 50257
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    head_dim: int | None = None
    intermediate_size: int = 2048
    max_position_embeddings: int = 64
    hidden_dropout_prob: float = 0.2
    attention_probs_dropout_prob: float = 0.2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    use_cache: bool = False
    qk_norm: bool = False


def normed(x_BHTd, norm):
    """Apply an RMS norm in the dtype of `x_BHTd`, which under autocast is half of the weight's precision."""
    return F.rms_norm(x_BHTd, norm.normalized_shape, norm.weight.to(x_BHTd.dtype), norm.eps)


class TinyStoriesAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim or width // self.heads
        inner = self.heads * self.head_dim
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.output = nn.Linear(inner, width)
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(self.head_dim, eps=config.layer_norm_eps)
            self.key_norm = nn.RMSNorm(self.head_dim, eps=config.layer_norm_eps)
        self.norms = config.qk_norm
        self.dropout = config.attention_probs_dropout_prob

    def forward(self, x_BTD, mask_B1TT=None):
        q, k, v = (
            layer(x_BTD).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.norms:
            q, k = normed(q, self.query_norm), normed(k, self.key_norm)
        dropout = self.dropout if self.training else 0.0
        causal = mask_B1TT is None
        y_BHTd = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT, dropout_p=dropout, is_causal=causal)
        return self.output(y_BHTd.transpose(1, 2).flatten(2))


class TinyStoriesMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTD):
        return self.down(F.relu(self.up(x_BTD)))


class TinyStoriesLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = TinyStoriesAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = TinyStoriesMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x_BTD, mask_B1TT=None):
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), mask_B1TT))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class TinyStoriesPreTrainedModel(PreTrainedModel):
    config_class = TinyStoriesConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "token_embeddings"
    _supports_sdpa = True
    _no_split_modules = ["TinyStoriesLayer"]  # noqa: RUF012


class TinyStoriesModel(TinyStoriesPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.token_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(TinyStoriesLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False, **kwargs):
        """`attention_mask` is `(B, T)` with 1 for real tokens; every token sees itself and earlier real tokens."""
        tokens = input_ids.shape[1]
        if tokens > self.config.max_position_embeddings:
            raise ValueError(f"{tokens} tokens, but max_position_embeddings is {self.config.max_position_embeddings}.")
        mask_B1TT = None
        if attention_mask is not None:
            past_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=input_ids.device).tril()
            # A token always sees itself: a padding row without any key would give NaN.
            itself_TT = torch.eye(tokens, dtype=torch.bool, device=input_ids.device)
            mask_B1TT = (attention_mask[:, None, None, :].bool() & past_TT) | itself_TT
        x_BTD = self.token_embeddings(input_ids) + self.position_embeddings.weight[:tokens]
        states = [x_BTD]
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask_B1TT)
            states.append(x_BTD)
        return BaseModelOutput(
            last_hidden_state=self.final_norm(x_BTD), hidden_states=tuple(states) if output_hidden_states else None
        )


class TinyStoriesForCausalLM(TinyStoriesPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyStoriesModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        """Keep no cache and only the last max_position_embeddings tokens, as upstream does."""
        window = self.config.max_position_embeddings
        mask = None if attention_mask is None else attention_mask[:, -window:]
        return {"input_ids": input_ids[:, -window:], "attention_mask": mask}

    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=False, **kwargs):
        """`labels` are the `(B, T)` ids themselves (shifted here); -100 is not scored. Logits are `(B, T, vocab)`."""
        out = self.model(input_ids, attention_mask, output_hidden_states)
        logits = self.lm_head(out.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


AUTO_MAP = {
    "AutoConfig": "TinyStoriesConfig",
    "AutoModel": "TinyStoriesModel",
    "AutoModelForCausalLM": "TinyStoriesForCausalLM",
}
