"""Emulate CUDA's memory behavior on fake CPU tensors, to predict what a model would need on a GPU.

torch's autocast for CUDA has its own list of functions that compute in fp32; dropout keeps one byte per entry where the
CPU keeps a float; and fused attention keeps queries, keys, values, the output and one fp32 number per row where the
CPU, which cannot drop attention weights in its fused kernel, keeps score matrices. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Functions of torch.autocast("cuda") that compute in fp32, as far as transformers call them
# (docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32").
FP32 = {
    "layer_norm", "group_norm", "softmax", "log_softmax", "softmin", "softplus", "cross_entropy", "nll_loss",
    "mse_loss", "l1_loss", "cosine_similarity", "exp", "expm1", "log", "log2", "log10", "log1p", "pow", "__pow__",
    "__rpow__", "rsqrt", "reciprocal", "norm", "sum", "cumsum", "cumprod", "prod", "cosh", "sinh", "tan",
}  # fmt: skip
# head_dims of the fused kernels are multiples of 8; others are padded (F.scaled_dot_product_attention does so).
MULTIPLE = 8
# Backward accumulates the gradient of the queries in fp32, rows in blocks of 128, head_dim in blocks of 32.
ROWS, COLUMNS = 128, 32


class CudaRules(TorchFunctionMode):
    """Run torch functions so that they keep what torch on CUDA would keep. `fused` False means eager attention."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused

    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return attention(*args, **kwargs, fused=self.fused)
        if name == "dropout":
            return dropout(*args, **kwargs)
        if name in FP32 and torch.is_autocast_enabled("cpu"):
            args = [widen_half(a) for a in args]
            kwargs = {key: widen_half(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def widen_half(value: object) -> object:
    """Convert a half-precision tensor to fp32; return anything else unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply CUDA's dropout, which keeps a mask of one byte per entry."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *_: Any,
    fused: bool,
    **__: Any,
) -> Tensor:
    """Emulate the memory of `F.scaled_dot_product_attention` on `(batch, heads, tokens, head_dim)`."""
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # the kernels add a mask in the queries' precision
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        attn_mask = attn_mask.to(query.dtype)
    if not fused:
        return compute_attention(query, key, value, attn_mask, dropout_p)
    head_dim = value.shape[-1]
    missing = -head_dim % MULTIPLE
    if missing:
        query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))
    return Fused.apply(query, key, value, attn_mask)[..., :head_dim]


def compute_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Compute attention with its score matrices, softmax in fp32. A separate function, because tensors that its caller
    still holds would count as memory.
    """
    if key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)
    scores = scores if mask is None else scores + mask
    weights = F.softmax(scores.float(), dim=-1).to(query.dtype)
    return dropout(weights, p) @ value


class Fused(torch.autograd.Function):
    """Take, allocate and keep the same tensors as a flash or memory-efficient kernel, without computing anything."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None):
        """Return the output (batch, heads, tokens, head_dim), saving what CUDA's kernel saves for backward."""
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        row_sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, row_sums, mask)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor):
        """Return gradients of queries, keys and values, with the scratch memory of CUDA's kernel."""
        query, key, value, _, row_sums, mask = ctx.saved_tensors
        delta = torch.empty_like(row_sums)
        wide = None
        if query.dtype != torch.float32:
            batch, heads, tokens, head_dim = query.shape
            rows, columns = -(-tokens // ROWS) * ROWS, -(-head_dim // COLUMNS) * COLUMNS
            wide = query.new_empty(batch, heads, rows, columns, dtype=torch.float32)
        grads = [x.new_empty(x.shape[0], x.shape[2], query.shape[1], x.shape[3]) for x in (query, key, value)]
        del delta, wide
        if key.shape[1] != query.shape[1]:  # grouped heads: one gradient per query head, then summed
            grouped = [g.unflatten(2, (key.shape[1], -1)).sum(3) for g in grads[1:]]
            grads = [grads[0], *grouped]
        of_mask = mask.new_empty(mask.shape) if ctx.needs_input_grad[3] else None
        return (*(g.transpose(1, 2) for g in grads), of_mask)
