"""Refine the score forms of split heads on the true softmax, where `low_rank` had to take it as linear. Imports torch.

Only two small matrices a child move (`q' = left q`, `k' = right k` in the basis of the parent's queries and keys), and
what they are fitted to is the child's own part of the parent's output: no labels, nothing runs through the model.

Shape letters: B batch, T tokens, Q queries, H heads, D head_dim, M children of a head, R head_dim of a child.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from leansurgeon.surgery.layer.score_forms import Forms, roots
from leansurgeon.surgery.layer.split_factors import Torch, moment, output_roots, parts, real_tokens, some, tensor
from leansurgeon.surgery.refit.local_fit import order, schedule

RATE = 0.03  # of Adam, relative to the root mean square of the entries
QUERIES = 64  # of a sequence that one step looks at, at most
ROWS = 2**20  # numbers in the attention matrices of one step at most


def refine(
    parent: Torch,
    forms: Forms,
    scale: float,
    inputs: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    steps: int,
    seed: int = 0,
) -> Forms:
    """Adam on both factors for some steps, one piece of a batch each, from `forms`; `scale` is the children's.

    Lowers the mean over real queries of `|sum_j (a'_ij - a_ij) W_o v_j|^2`, summed over children. Works in the basis in
    which queries and keys have unit moments, so that one rate suits all directions.
    """
    heads, children = forms.left.shape[:2]
    pieces = list(parts(inputs, masks, heads * children, ROWS, QUERIES))
    with torch.no_grad():
        enough = parts(*some(inputs, masks), heads)
        c_query, c_key = (sum(m) for m in zip(*(plain_moments(parent, x, mask) for x, mask in enough), strict=True))
    (q_root, q_inverse), (k_root, k_inverse) = roots(c_query.numpy()), roots(c_key.numpy())
    left, right = tensor(forms.left @ q_root[:, None]), tensor(forms.right @ k_root[:, None])
    q_white, k_white = tensor(q_inverse), tensor(k_inverse)
    count = sum(float(real_tokens(x, mask).sum()) for x, mask in zip(*some(inputs, masks), strict=True)) ** 0.5
    # Moments were sums: in the basis of means the entries are of the size that they have in a step.
    left, right, q_white, k_white = left / count, right / count, q_white * count, k_white * count
    sizes = [float(x.square().mean().sqrt()) for x in (left, right)]
    factors = [f.mT for f in output_roots(parent, children)]
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        left.requires_grad_(True), right.requires_grad_(True)
        groups = [{"params": [x], "size": size} for x, size in zip((left, right), sizes, strict=True)]
        optimizer = torch.optim.Adam(groups, lr=RATE)
        for step, number in zip(range(steps), order(len(pieces), seed), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = RATE * group["size"] * schedule(step, steps)
            x, mask = pieces[number]
            chosen = torch.randperm(x.shape[1], generator=generator)[:QUERIES].sort().values
            with torch.no_grad():
                q, k, v = parent.project(x)
                q = q[:, :, chosen]
                wanted = parent.weights(q, k, mask, chosen)
                values = by_child(v, factors)
                q, k = q @ q_white, k @ k_white
            q_child = (q[:, :, None] @ left.mT).flatten(1, 2)  # (B, H*M, Q, R)
            k_child = (k[:, :, None] @ right.mT).flatten(1, 2)
            attention = replace(parent, scale=scale).weights(q_child, k_child, mask, chosen)
            wrong = (attention.unflatten(1, (heads, children)) - wanted[:, :, None]) @ values
            loss = (wrong.square().sum((1, 2, 4)) * mask[:, chosen]).sum() / mask[:, chosen].sum().clamp_min(1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    left, right = (x.detach().double().numpy() for x in (left, right))
    return replace(forms, left=left @ q_inverse[:, None] * count, right=right @ k_inverse[:, None] * count)


def plain_moments(parent: Torch, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments of queries and keys over the real tokens, one matrix for each head."""
    q, k, _ = parent.project(x)
    return moment(q, mask.float()), moment(k, mask.float())


def by_child(v: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Each child's values as the output sees them, `(B, H, M, T, R)`, zeros behind where a child has fewer."""
    columns = np.array_split(np.arange(v.shape[-1]), len(factors))
    seen = [v[..., own] @ factor for own, factor in zip(columns, factors, strict=True)]
    width = max(s.shape[-1] for s in seen)
    return torch.stack([torch.nn.functional.pad(s, (0, width - s.shape[-1])) for s in seen], dim=2)
