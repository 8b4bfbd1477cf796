"""What a model computes, by hand in float64: norms, linear maps and blocks from tensors by their names."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

Array = np.ndarray


def softmax(x: Array) -> Array:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


class Numbers:
    """Tensors by name."""

    def __init__(self, tensors: Mapping[str, Array | torch.Tensor], eps: float = 1e-5) -> None:
        self.t, self.eps = {name: np.asarray(values, np.float64) for name, values in tensors.items()}, eps

    def norm(self, x: Array, name: str) -> Array:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + self.eps)
        return x * self.t[name + ".weight"] + self.t[name + ".bias"]

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.t[name + ".weight"].T + self.t.get(name + ".bias", 0)

    def block(self, x: Array, prefix: str, heads: int, attend: Callable[..., Array], activation: Callable) -> Array:
        """A pre-norm block of `(tokens, width)`; `attend(head, q, k, v)` is the attention of one head."""
        y = self.norm(x, prefix + "attention_norm")
        parts = [np.split(self.linear(y, f"{prefix}attention.{n}"), heads, 1) for n in ("query", "key", "value")]
        outs = [attend(head, *one) for head, one in enumerate(zip(*parts, strict=True))]
        x = x + self.linear(np.concatenate(outs, 1), prefix + "attention.output")
        up = activation(self.linear(self.norm(x, prefix + "mlp_norm"), prefix + "mlp.up"))
        return x + self.linear(up, prefix + "mlp.down")
