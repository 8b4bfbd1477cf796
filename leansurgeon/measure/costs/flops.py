"""Count floating-point operations of one forward pass: in closed form without torch, and by torch on the library's
model as a cross-check.

A multiply-add counts as two operations, as usual. A training step costs three times as much: once forward, twice
backward. Only matrix products and convolutions count; norms, softmax and the like are small by comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from leansurgeon.architectures.base import Architecture, Config, TensorSpec
from leansurgeon.errors import UnsupportedModel
from leansurgeon.measure.data import inputs
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import Shape

ATTENTION = ("q", "k", "v", "qk", "qkv", "vkq", "o")
MLP = ("up", "gate", "down")
TABLES = ("vocab", "positions", "types", "tokens", "registers", "1")  # first axes of lookup tables: no products
WORDS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class Flops:
    """Forward operations of one sample by part. `attention` covers the projections, `scores` the two token-by-token
    products, `outside` embeddings and heads.
    """

    attention: int
    scores: int
    mlp: int
    outside: int
    tokens: int  # of a sample, special ones included

    @property
    def total(self) -> int:
        """Operations of one forward pass."""
        return self.attention + self.scores + self.mlp + self.outside

    def as_dict(self) -> JsonObject:
        """Return operations by part and in total, for JSON."""
        return asdict(self) | {"total": self.total}


def closed_form(
    specs: Iterable[TensorSpec], shape: Shape, config: Config, architecture: Architecture, tokens: int | None = None
) -> Flops | None:
    """Compute the operations from the sizes of the tensors alone; None for families that are not plain (pyramids,
    windows, landmarks, class attention), which only torch counts.

    A matrix of an attention or MLP is multiplied with every token: 2 * rows * columns * N. Queries with keys and
    weights with values: 4 * N^2 * heads * head_dim for every attention (a causal mask does not reduce the count).
    """
    if not architecture.plain:
        return None
    specs, flat, patches = list(specs), architecture.flat(config), 0
    if not inputs.takes_images(config, architecture):
        n = tokens or inputs.sample_tokens(None, config, architecture)
    else:
        _, height, width = inputs.image_size(config, architecture)
        down, right = next((s.shape[-2:] for s in specs if s.role == "embedding" and len(s.shape) == 4), (0, 0))
        if not (down and right):
            raise UnsupportedModel(
                "The config says that the model takes images, and the weights have no patch embedding."
            )
        patches = (height // down) * (width // right)
        n = patches + architecture.takes.special_tokens(flat)
    # Patch embedding, projections of embeddings, and the head: on every token if the model outputs words, else on one;
    # a causal classifier scores every token and picks the last one.
    name = (config.get("architectures") or [""])[0]
    words = name.endswith(WORDS)
    rows = n if words or (architecture.causal and name.endswith("ForSequenceClassification")) else 1
    parts = dict.fromkeys(("attention", "scores", "mlp", "outside"), 0)
    for spec in specs:
        matrix = len(spec.shape) == 2
        if spec.layer is None:
            if spec.role in ("embedding", "head") and len(spec.shape) == 4:
                parts["outside"] += 2 * spec.size * patches
            elif matrix and spec.role == "embedding" and spec.axes[0] not in TABLES:
                parts["outside"] += 2 * spec.size * n
            elif matrix and spec.role == "head" and spec.shape[0] != flat.get("vocab_size"):
                parts["outside"] += 2 * spec.size * rows
        elif matrix and spec.role in ATTENTION:
            parts["attention"] += 2 * spec.size * n
            parts["scores"] += 4 * n * n * shape.stages[spec.stage].inner if spec.role == "o" else 0
        elif matrix and spec.role in MLP:
            parts["mlp"] += 2 * spec.size * n
    if words:  # the output layer, tied to the embedding or not
        table = next((s for s in specs if s.axes[:1] == ("vocab",) and len(s.shape) == 2), None)
        parts["outside"] += 2 * table.size * n if table else 0
    return Flops(**parts, tokens=n)


def count_flops(config: Config, architecture: Architecture, tokens: int | None = None) -> int | None:
    """Count forward operations of one sample with torch's own counter on the library's model, without memory. Attention
    is computed explicitly, since the counter ignores fused kernels on a CPU. Returns None if the model reads tensor
    values, which do not exist here.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from leansurgeon.measure.costs.cuda_rules import CudaRules
    from leansurgeon.measure.costs.memory import choose_attention, fake_model, leaving_no_fakes

    mode, counter = FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)
    model = fake_model(config, architecture, mode)
    # The counter's hooks ask for the gradient of a module's inputs, which a bare parameter (CaiT's class token) does
    # not have here.
    model.requires_grad_(False)
    choose_attention(model, "sdpa")
    tokens = tokens or inputs.sample_tokens(None, config, architecture)
    try:
        with leaving_no_fakes(model), mode, counter, CudaRules(fused=False), torch.no_grad():
            inputs.run(model, inputs.make(config, architecture, 1, tokens, "cpu"))
    except RuntimeError:  # raised by torch in that case, and by libraries that require a mask
        return None
    except (ValueError, AttributeError):
        if architecture.section:  # the other towers need inputs of their own
            return None
        raise
    return counter.get_total_flops()
