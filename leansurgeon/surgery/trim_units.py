"""Choose the heads and MLP units to keep, given that the output projection may compensate (optimal brain surgeon).

Of inputs a (heads side by side, or MLP units) only some stay. With the second moments G of the inputs on calibration
data, H = G + ridge, and the optimal weight W for all inputs, removing a group R and re-solving for the rest costs
exactly

    cost(R) = trace(W_R [(H^-1)_RR]^-1 W_R^T),        W <- W - W_R [(H^-1)_RR]^-1 (H^-1)_R:

(Hassibi and Stork 1993, for whole groups of columns). A unit whose work others can take over is cheap, however large
its weights are. The cheapest are removed first, a few at a time, with costs recomputed in between.

Letters: I inputs, O outputs, S inputs of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 16


@dataclass(frozen=True)
class TrimResult:
    """`kept` groups in their old order, and the `change` (I [+ 1], O) to add to the old weight, which zeroes the
    others.
    """

    kept: list[int]
    change: Tensor


def trim(
    gram: Tensor,
    change: Tensor,
    old: Tensor,
    group: int,
    keep: int,
    ridge: float,
    worth: Tensor,
    shared: int = 1,
    fixed: Sequence[int] = (),
) -> TrimResult:
    """Keep `keep` of the groups of `group` adjacent inputs each.

    `gram` (I [+ 1], I [+ 1]) and `change` (I [+ 1], O) are those of the refit with all inputs, `old` (O, I) is the
    present weight. `shared` is the number of equal sections, each of which keeps the same number (kv heads); an input
    beyond the last group (the constant) always stays. `worth` (O,) weighs the squared error of an output. `fixed` names
    the groups that stay, if they are chosen already (`shared` is 1 then).
    """
    inputs = old.shape[1]
    groups = inputs // group
    h = gram.clone()
    h.diagonal()[:inputs] += ridge * float(gram.diagonal()[:inputs].mean())
    h.diagonal().add_(1e-10 * float(h.diagonal().mean()))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    weight = change.clone()  # (I [+ 1], O): the whole new weight
    weight[:inputs] += old.T.to(weight)
    alive = torch.ones(groups, dtype=torch.bool)
    section = torch.arange(groups) // (groups // shared)
    left = torch.full((shared,), groups // shared)
    to_go = groups - keep
    while to_go:
        scores = group_costs(inverse, weight, group, groups, worth)
        scores[~alive] = torch.inf
        scores[list(fixed)] = torch.inf
        batch = max(1, min(to_go, -(-(groups - keep) // ROUNDS)))
        going = []
        for g in torch.argsort(scores, stable=True).tolist():
            if len(going) == batch:
                break
            if alive[g] and left[section[g]] > keep // shared:
                going.append(g)
                alive[g] = False
                left[section[g]] -= 1
        at = inputs_of(going, group)
        rows = inverse[at]  # (R, I)
        solved = torch.linalg.solve(rows[:, at], torch.cat([weight[at], rows], 1))
        weight = weight - rows.T @ solved[:, : weight.shape[1]]
        inverse = inverse - rows.T @ solved[:, weight.shape[1] :]
        weight[at] = 0
        gone = (~alive).repeat_interleave(group).nonzero()[:, 0]
        inverse[gone] = 0
        inverse[:, gone] = 0
        inverse[gone, gone] = 1.0  # keeps later blocks of it invertible; their weights are zero
        to_go -= len(going)
    new = weight.clone()
    new[:inputs] -= old.T.to(weight)
    return TrimResult(alive.nonzero()[:, 0].tolist(), new)


def inputs_of(groups: Sequence[int], group: int) -> Tensor:
    """Return the indices of the inputs of some groups, each of `group` inputs."""
    return (torch.tensor(groups)[:, None] * group + torch.arange(group)).reshape(-1)


def group_costs(inverse: Tensor, weight: Tensor, group: int, groups: int, worth: Tensor) -> Tensor:
    """Return the cost of removing each group alone; outputs are weighted by `worth` (O,)."""
    inputs, weight = groups * group, weight * worth.to(weight).sqrt()
    if group == 1:
        return weight[:inputs].pow(2).sum(1) / inverse.diagonal()[:inputs]
    at = torch.arange(inputs).reshape(groups, group)
    blocks = inverse[at[:, :, None], at[:, None, :]]  # (groups, S, S)
    w = weight[:inputs].reshape(groups, group, -1)
    return (w * torch.linalg.solve(blocks, w)).sum((1, 2))
