"""Crammed BERT with a free head_dim.

This is the encoder of "Cramming: Training a Language Model on a Single GPU in One Day" (arXiv 2212.14034). The file
stands alone: it travels inside checkpoints and needs only torch and transformers.

Differences from BERT: pre-norm, no bias in any linear layer of a block, a GELU-gated feed-forward part, sinusoidal
positions with one learned scale, a norm after the embeddings and one after the last block, and a decoder that is the
transposed embedding without a bias. Figures come from the code of github.com/JonasGeiping/cramming
(`arch=crammed-bert`); its `intermed_size` 3072 counts both halves of the gated unit, our `intermediate_size` 1536
counts one, as Llama does.

Shape letters: B batch, T tokens, D hidden_size, H heads, d head_dim.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput


class CrammedBertConfig(PreTrainedConfig):
    """`head_dim=None` means hidden_size // num_attention_heads."""

    model_type = "crammed_bert"

    vocab_size: int = 32768
    hidden_size: int = 768
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    head_dim: int | None = None
    intermediate_size: int = 1536
    max_position_embeddings: int = 128
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_hidden_size: int = 1024
    classifier_dropout: float | None = None
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """Return sines in even and cosines in odd columns, `(positions, width)` ("Attention Is All You Need", sec. 3.5)."""
    angle = torch.arange(positions, dtype=torch.float32)[:, None]
    angle = angle * torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]


class CrammedBertEmbeddings(nn.Module):
    """Normed sum of token embeddings and scaled sinusoids: `(B, T)` -> `(B, T, D)`."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_scale = nn.Parameter(torch.full((1,), width**-0.5))
        # Computed from the config, so not saved. `_init_weights` fills it again, since from_pretrained builds on meta.
        self.register_buffer("table", sinusoids(config.max_position_embeddings, width), persistent=False)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids):
        if input_ids.shape[1] > self.table.shape[0]:
            raise ValueError(f"{input_ids.shape[1]} tokens, but max_position_embeddings is {self.table.shape[0]}.")
        x_BTD = self.word_embeddings(input_ids)
        return self.dropout(self.norm(x_BTD + self.position_scale * self.table[: input_ids.shape[1]].to(x_BTD.dtype)))


class CrammedBertAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim or width // self.heads
        inner = self.heads * self.head_dim
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.output = nn.Linear(inner, width, bias=False)
        self.dropout = config.attention_probs_dropout_prob

    def forward(self, x_BTD, mask_B11T=None):
        q, k, v = (
            layer(x_BTD).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        y_BHTd = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11T, dropout_p=dropout)
        return self.output(y_BHTd.transpose(1, 2).flatten(2))


class CrammedBertMLP(nn.Module):
    """down(gelu(gate(x)) * up(x))."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD):
        return self.down(F.gelu(self.gate(x_BTD)) * self.up(x_BTD))


class CrammedBertLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = CrammedBertAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = CrammedBertMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x_BTD, mask_B11T=None):
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), mask_B11T))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class CrammedBertPreTrainedModel(PreTrainedModel):
    config_class = CrammedBertConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _input_embed_layer = "word_embeddings"
    _supports_sdpa = True
    _no_split_modules = ["CrammedBertLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, CrammedBertEmbeddings):
            init.constant_(module.position_scale, self.config.hidden_size**-0.5)
            init.copy_(module.table, sinusoids(self.config.max_position_embeddings, self.config.hidden_size))


class CrammedBertModel(CrammedBertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embeddings = CrammedBertEmbeddings(config)
        self.layers = nn.ModuleList(CrammedBertLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False, **kwargs):
        """`attention_mask` is `(B, T)` with 1 for real tokens.

        Segment ids of a BERT tokenizer are accepted and ignored.
        """
        mask_B11T = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        x_BTD = self.embeddings(input_ids)
        states = [x_BTD]
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask_B11T)
            states.append(x_BTD)
        return BaseModelOutput(
            last_hidden_state=self.final_norm(x_BTD), hidden_states=tuple(states) if output_hidden_states else None
        )


class CrammedBertForMaskedLM(CrammedBertPreTrainedModel):
    _tied_weights_keys = {"decoder.weight": "encoder.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.encoder = CrammedBertModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.decoder

    def set_output_embeddings(self, value):
        self.decoder = value

    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=False, **kwargs):
        """`labels` are `(B, T)` with -100 where nothing is predicted. Logits are `(B, T, vocab)`."""
        out = self.encoder(input_ids, attention_mask, output_hidden_states)
        logits = self.decoder(out.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class CrammedBertForSequenceClassification(CrammedBertPreTrainedModel):
    """First token, Linear(D, classifier_hidden_size), tanh, dropout, Linear(labels): the head of upstream's GLUE."""

    def __init__(self, config):
        super().__init__(config)
        self.encoder = CrammedBertModel(config)
        self.pooler = nn.Linear(config.hidden_size, config.classifier_hidden_size)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.classifier_hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=False, **kwargs):
        out = self.encoder(input_ids, attention_mask, output_hidden_states)
        logits = self.classifier(self.dropout(torch.tanh(self.pooler(out.last_hidden_state[:, 0]))))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


AUTO_MAP = {
    "AutoConfig": "CrammedBertConfig",
    "AutoModel": "CrammedBertModel",
    "AutoModelForMaskedLM": "CrammedBertForMaskedLM",
    "AutoModelForSequenceClassification": "CrammedBertForSequenceClassification",
}
