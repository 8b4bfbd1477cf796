"""The transformer of generalised D-retrieval, without normalisation.

Tokens are encoded one by one, a class token reads them through attention, and a small network maps it to a number. The
file stands alone: it travels inside checkpoints and needs only torch and transformers.

One layer is the model class of the theory (encoder P, attention of h heads read at c_0, network F): y = F(c_0 + W_O
concat_i sum_t softmax(q_i k_it) v_it). The class token is a query and never a key. With more layers the tokens are
queries as well, in all but the last.

Shape letters: B batch, T tokens, d input_size, D hidden_size, H heads, n head_dim.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput


class DRetrievalConfig(PreTrainedConfig):
    """`head_dim=None` means hidden_size // num_attention_heads; `encoder_size` is the encoder's hidden width."""

    model_type = "d_retrieval"

    input_size: int = 4
    encoder_size: int = 32
    hidden_size: int = 32
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    head_dim: int | None = 8
    intermediate_size: int = 32
    num_labels: int = 1


class DRetrievalAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim or width // self.heads
        inner = self.heads * self.head_dim
        self.query = nn.Linear(width, inner)
        self.key = nn.Linear(width, inner)
        self.value = nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)

    def forward(self, queries_BSD, tokens_BTD):
        def heads(x):
            return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

        q, k, v = heads(self.query(queries_BSD)), heads(self.key(tokens_BTD)), heads(self.value(tokens_BTD))
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DRetrievalMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BSD):
        return self.down(F.gelu(self.up(x_BSD)))


class DRetrievalLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.attention = DRetrievalAttention(config)
        self.mlp = DRetrievalMLP(config)

    def forward(self, queries_BSD, tokens_BTD):
        x_BSD = queries_BSD + self.attention(queries_BSD, tokens_BTD)
        return x_BSD + self.mlp(x_BSD)


class DRetrievalPreTrainedModel(PreTrainedModel):
    config_class = DRetrievalConfig
    base_model_prefix = "model"
    main_input_name = "input_values"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DRetrievalLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module):
        """Initialise linear layers as torch does, U(-1/sqrt(fan_in), 1/sqrt(fan_in)), and the class token with 0.

        Without norms, a normal distribution of 0.02 leaves a model of this width nearly inactive.
        """
        if isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, DRetrievalModel):
            init.zeros_(module.class_token)


class DRetrievalModel(DRetrievalPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.encoder_up = nn.Linear(config.input_size, config.encoder_size)
        self.encoder_down = nn.Linear(config.encoder_size, config.hidden_size)
        self.class_token = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList(DRetrievalLayer(config) for _ in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_values, **kwargs):
        """Map `(B, T, d)` to the class token after the last layer, `(B, D)`."""
        x_BTD = self.encoder_down(F.gelu(self.encoder_up(input_values)))
        c_B1D = self.class_token.expand(len(x_BTD), 1, -1)
        for layer in self.layers[:-1]:
            both = layer(torch.cat((c_B1D, x_BTD), dim=1), x_BTD)
            c_B1D, x_BTD = both[:, :1], both[:, 1:]
        return self.layers[-1](c_B1D, x_BTD)[:, 0]


class DRetrievalForSequenceClassification(DRetrievalPreTrainedModel):
    """One number per sequence (`num_labels` 1), by a linear read-out of the class token."""

    def __init__(self, config):
        super().__init__(config)
        self.model = DRetrievalModel(config)
        self.readout = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_values, labels=None, **kwargs):
        """Map `(B, T, input_size)` to logits `(B, num_labels)`; the loss is the mean squared error."""
        logits = self.readout(self.model(input_values))
        loss = None if labels is None else F.mse_loss(logits.squeeze(-1), labels.to(logits.dtype))
        return SequenceClassifierOutput(loss=loss, logits=logits)


AUTO_MAP = {
    "AutoConfig": "DRetrievalConfig",
    "AutoModel": "DRetrievalModel",
    "AutoModelForSequenceClassification": "DRetrievalForSequenceClassification",
}
