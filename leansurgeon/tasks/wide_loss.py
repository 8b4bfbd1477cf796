"""Losses of logits that are as wide as a vocabulary, a few rows at a time.

fp32 copies of all logits, with their softmax and its gradient, would cost a CPU more time than several layers, and
any device more memory than these layers.

Shape letters: N rows, C classes or vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# most logits converted to fp32 at once: on a GPU, and on a CPU, where they fit its cache
AT_ONCE = {"gpu": 2**24, "cpu": 2**19}


def sum_over_rows(loss_of: Callable[[Tensor, slice], Tensor], logits_NC: Tensor) -> Tensor:
    """Return the sum of `loss_of(rows, part)`, where `rows` are the fp32 logits `part` of all. Only the logits get a
    gradient.
    """
    if torch.compiler.is_compiling():  # compiled code makes no copies
        return loss_of(logits_NC.float(), slice(None))
    return _SumOverRows.apply(logits_NC, loss_of)


class _SumOverRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NC: Tensor, loss_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
        total, learns = logits_NC.new_zeros((), dtype=torch.float32), ctx.needs_input_grad[0]
        # In fp16 its small entries would be lost, since the scale of the loss is only known in the backward pass.
        dtype = torch.float32 if logits_NC.dtype == torch.float16 else logits_NC.dtype
        gradient_NC = torch.empty_like(logits_NC, dtype=dtype) if learns else None
        step = max(1, AT_ONCE["cpu" if logits_NC.device.type == "cpu" else "gpu"] // logits_NC.shape[-1])
        for start in range(0, len(logits_NC), step):
            part = slice(start, start + step)
            with torch.set_grad_enabled(learns):
                rows = logits_NC[part].detach().float().requires_grad_(learns)
                loss = loss_of(rows, part)
            total += loss.detach()
            if gradient_NC is not None:
                gradient_NC[part] = torch.autograd.grad(loss, rows)[0]
        ctx.save_for_backward(gradient_NC)
        return total

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * above, None
