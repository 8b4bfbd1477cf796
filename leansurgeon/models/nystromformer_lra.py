"""The small Long Range Arena classifier (paper, Table 3): Nystromformer or softmax attention with a free head_dim.

This file stands alone: it travels inside checkpoints and needs only torch and transformers.

Figures and formulas come from github.com/mlpen/Nystromformer (`LRA/code`) and "Nystromformer" (arXiv 2102.03902,
section 3). That code pads every sequence to the length of its position table; here the same numbers result without
padding:

* a landmark is the mean of `max_position_embeddings / num_landmarks` consecutive positions, and positions without a
  token count as zeros;
* `pooling="padded_mean"` divides the sum over real tokens by `max_position_embeddings` (`"mean"` divides by their
  number instead).

So a sequence gives the same logits however it is padded. One difference is deliberate: the start of the iterative
pseudo-inverse is scaled per sequence and head, whereas upstream takes one maximum over the whole batch, so that the
other sequences of a batch change a result.

Shape letters: B batch, T tokens, D hidden_size, H heads, d head_dim, L landmarks.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput


class NystromformerLraConfig(PreTrainedConfig):
    """`head_dim=None` means hidden_size // num_attention_heads; `conv_kernel_size=None` means no convolution.

    `attention` is "nystrom" or "softmax".
    """

    model_type = "nystromformer_lra"

    vocab_size: int = 32
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    head_dim: int | None = None
    intermediate_size: int = 128
    classifier_hidden_size: int = 128
    max_position_embeddings: int = 2048
    dual_input: bool = False
    attention: str = "nystrom"
    num_landmarks: int = 64
    pinv_iterations: int = 6
    conv_kernel_size: int | None = None
    pooling: str = "padded_mean"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = None


def iterative_pinv(matrix: torch.Tensor, iterations: int = 6) -> torch.Tensor:
    """Approximate the pseudo-inverse of row-stochastic matrices `(..., L, L)`.

    Uses the third-order iteration of Razavi et al. (arXiv 2102.03902, eq. 15).
    """
    identity = torch.eye(matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)
    # Rows sum to one, so the largest column sum bounds the spectral norm and the iteration converges.
    inverse = matrix.mT / matrix.sum(dim=-2).amax(dim=-1)[..., None, None]
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = 0.25 * inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
    return inverse


def landmarks(x_BHTd: torch.Tensor, segment: int, count: int) -> torch.Tensor:
    """Return the means of consecutive segments, `(B, H, count, d)`; segments after the last token are zero."""
    tokens = x_BHTd.shape[2]
    x_BHTd = F.pad(x_BHTd, (0, 0, 0, -tokens % segment))
    means = x_BHTd.unflatten(2, (-1, segment)).mean(dim=3)
    return F.pad(means, (0, 0, 0, count - means.shape[2]))


def nystrom_attention(q, k, v, mask_BT, segment: int, count: int, iterations: int) -> torch.Tensor:
    """Compute softmax(q k~') pinv(softmax(q~ k~')) softmax(q~ k') v with landmarks q~, k~.

    q, k, v and the result are `(B, H, T, d)`; `mask_BT` is 1 for real tokens.
    """
    scale = q.shape[-1] ** -0.25
    if mask_BT is not None:
        keep = mask_BT[:, None, :, None].to(q.dtype)
        q, k = q * keep, k * keep
    q, k = q * scale, k * scale
    q_land, k_land = landmarks(q, segment, count), landmarks(k, segment, count)
    mask = None if mask_BT is None else mask_BT[:, None, None, :].bool()
    context_BHLd = F.scaled_dot_product_attention(q_land, k, v, attn_mask=mask, scale=1.0)
    between = torch.softmax(q_land @ k_land.mT, dim=-1)
    spread = torch.softmax(q @ k_land.mT, dim=-1)
    return spread @ (iterative_pinv(between, iterations) @ context_BHLd)


class NystromformerLraAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.attention not in ("nystrom", "softmax"):
            raise ValueError(f'attention is "nystrom" or "softmax", not {config.attention!r}.')
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim or width // self.heads
        inner = self.heads * self.head_dim
        self.query = nn.Linear(width, inner)
        self.key = nn.Linear(width, inner)
        self.value = nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)
        kernel = config.conv_kernel_size
        self.conv = None
        if kernel:
            size, pad = (kernel, 1), (kernel // 2, 0)
            self.conv = nn.Conv2d(self.heads, self.heads, size, padding=pad, bias=False, groups=self.heads)
        self.dropout = config.attention_probs_dropout_prob
        self.iterations = config.pinv_iterations
        self.count = config.num_landmarks
        self.segment = -(-config.max_position_embeddings // self.count)
        # With as many landmarks as positions the approximation is exact.
        self.nystrom = config.attention == "nystrom" and self.count < config.max_position_embeddings

    def forward(self, x_BTD, mask_BT=None):
        q, k, v = (
            layer(x_BTD).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.nystrom:
            # The pseudo-inverse needs full precision; upstream disables autocast here as well.
            with torch.autocast(device_type=x_BTD.device.type, enabled=False):
                parts = (q.float(), k.float(), v.float())
                y_BHTd = nystrom_attention(*parts, mask_BT, self.segment, self.count, self.iterations).to(v.dtype)
        else:
            mask = None if mask_BT is None else mask_BT[:, None, None, :].bool()
            dropout = self.dropout if self.training else 0.0
            y_BHTd = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        if self.conv is not None:
            y_BHTd = y_BHTd + self.conv(v if mask_BT is None else v * mask_BT[:, None, :, None].to(v.dtype))
        return self.output(y_BHTd.transpose(1, 2).flatten(2))


class NystromformerLraMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x_BTD):
        return self.down(self.dropout(F.gelu(self.up(x_BTD))))


class NystromformerLraLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = NystromformerLraAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = NystromformerLraMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x_BTD, mask_BT=None):
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), mask_BT))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class NystromformerLraPreTrainedModel(PreTrainedModel):
    config_class = NystromformerLraConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["NystromformerLraLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module):
        """Initialise as upstream: embeddings N(0, initializer_range), the rest U(+-1/sqrt(fan_in)), torch's own."""
        if isinstance(module, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(module.weight[0].numel())
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.uniform_(module.bias, -bound, bound)
        else:
            super()._init_weights(module)


class NystromformerLraModel(NystromformerLraPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.token_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(NystromformerLraLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.token_embeddings

    def set_input_embeddings(self, value):
        self.token_embeddings = value

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False, **kwargs):
        tokens = input_ids.shape[1]
        if tokens > self.config.max_position_embeddings:
            raise ValueError(f"{tokens} tokens, but max_position_embeddings is {self.config.max_position_embeddings}.")
        x_BTD = self.dropout(self.token_embeddings(input_ids) + self.position_embeddings.weight[:tokens])
        states = [x_BTD]
        for layer in self.layers:
            x_BTD = layer(x_BTD, attention_mask)
            states.append(x_BTD)
        return BaseModelOutput(
            last_hidden_state=self.final_norm(x_BTD), hidden_states=tuple(states) if output_hidden_states else None
        )


class NystromformerLraForSequenceClassification(NystromformerLraPreTrainedModel):
    """Pooled tokens -> Linear -> ReLU -> Linear.

    With `dual_input` two texts a, b share the encoder, and [a, b, a * b, a - b] is classified.
    """

    def __init__(self, config):
        super().__init__(config)
        if config.pooling not in ("padded_mean", "mean"):
            raise ValueError(f'pooling is "padded_mean" or "mean", not {config.pooling!r}.')
        self.encoder = NystromformerLraModel(config)
        pooled = config.hidden_size * (4 if config.dual_input else 1)
        self.classifier_hidden = nn.Linear(pooled, config.classifier_hidden_size)
        self.classifier = nn.Linear(config.classifier_hidden_size, config.num_labels)
        self.post_init()

    def pool(self, x_BTD, mask_BT):
        if mask_BT is None:
            total, count = x_BTD.sum(dim=1), x_BTD.shape[1]
        else:
            total, count = (x_BTD * mask_BT[..., None]).sum(dim=1), mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return total / (count if self.config.pooling == "mean" else self.config.max_position_embeddings)

    def forward(
        self,
        input_ids,
        attention_mask=None,
        input_ids_2=None,
        attention_mask_2=None,
        labels=None,
        output_hidden_states=False,
        **kwargs,
    ):
        """Take `(B, T)` ids and masks (1 = real token), the second pair for `dual_input`. Logits are `(B, labels)`."""
        if self.config.dual_input != (input_ids_2 is not None):
            raise ValueError(f"dual_input is {self.config.dual_input}: input_ids_2 must be given exactly then.")
        out = self.encoder(input_ids, attention_mask, output_hidden_states)
        pooled = self.pool(out.last_hidden_state, attention_mask)
        if input_ids_2 is not None:
            other = self.pool(self.encoder(input_ids_2, attention_mask_2).last_hidden_state, attention_mask_2)
            pooled = torch.cat((pooled, other, pooled * other, pooled - other), dim=-1)
        logits = self.classifier(F.relu(self.classifier_hidden(pooled)))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


AUTO_MAP = {
    "AutoConfig": "NystromformerLraConfig",
    "AutoModel": "NystromformerLraModel",
    "AutoModelForSequenceClassification": "NystromformerLraForSequenceClassification",
}
