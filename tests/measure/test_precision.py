"""In which precision products are taken."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from leansurgeon.measure.costs.precision import autocast


def test_attention_that_learns_over_short_sequences_stays_in_fp32_on_a_cpu():
    draw = torch.Generator().manual_seed(0)
    q, k, v, bias = (torch.randn(2, 3, 5, width, generator=draw).bfloat16() for width in (8, 8, 8, 5))
    q.requires_grad_()
    with autocast("bf16", "cpu"):
        learned = F.scaled_dot_product_attention(q, k, value=v, attn_mask=bias)
        assert F.linear(q, q[0, 0]).dtype == torch.bfloat16
        long = torch.ones(1, 1, 513, 8, dtype=torch.bfloat16, requires_grad=True)
        assert F.scaled_dot_product_attention(long, long, long).dtype == torch.bfloat16
        with torch.no_grad():
            assert F.scaled_dot_product_attention(k, k, v).dtype == torch.bfloat16
    assert torch.equal(learned, F.scaled_dot_product_attention(q.float(), k.float(), v.float(), bias.float()))


def test_what_the_backward_pass_recomputes_is_as_it_was():
    layer = torch.nn.Linear(8, 8)

    def attention(x: torch.Tensor) -> torch.Tensor:
        q = layer(x)
        return F.scaled_dot_product_attention(q, q, q)

    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with autocast("bf16", "cpu", recomputes=True):
        out = checkpoint(attention, x, use_reentrant=False)
    out.float().sum().backward()  # torch compares dtypes
    assert x.grad is not None
