"""FlattenGPT (arXiv 2602.08858): neighbouring layers stand side by side in one of twice the width, whose heads and MLP
units are then pruned to the old width, with a closed-form repair of what reads them.

Which pairs: those whose inputs are most alike. Which heads and units: those of the largest ridge leverage on the
calibration tokens, whole key/value groups; the projections behind are solved for by least squares. Its code is not
public, so this is the description's method and not its authors' program.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.benchmarks.rivals.common import Batches, blocks, cosine, keep, least_squares, means, put_blocks, seen
from tests.benchmarks.rivals.dropping import few

TOKENS = 16_384  # of the closed forms, which want twelve passes and the units of two MLPs for every pair
LEVERAGE = 1e-2  # ridge of the scores, of the mean diagonal


def flattengpt(model: nn.Module, batches: Batches, count: int) -> None:
    if not hasattr(blocks(model)[0], "post_attention_layernorm"):
        raise ValueError("FlattenGPT is rebuilt for blocks of the Llama kind")
    near = means(model, batches, [(i, i + 1) for i in range(len(blocks(model)) - 1)], cosine)
    alike = sorted(range(len(near)), key=lambda i: -near[i])
    pairs: list[int] = []
    for i in alike:
        if len(pairs) < count and not {i - 1, i, i + 1} & set(pairs):
            pairs.append(i)
    if len(pairs) < count:
        raise ValueError(f"{count} of {len(blocks(model))} layers cannot go by pairs")
    for i in sorted(pairs):
        flatten(model, few(batches, TOKENS), i)
    keep(model, [i for i in range(len(blocks(model))) if i - 1 not in pairs])


@torch.no_grad()
def flatten(model: nn.Module, batches: Batches, at: int) -> None:
    """Layers `at` and the next in the place of `at`; the other is left where it is, to be dropped."""
    whole = list(blocks(model))
    a, b = whole[at], whole[at + 1]
    put_blocks(model, whole[: at + 2])  # what stands behind is not asked
    found = seen(model, batches, {
        "a.o": (a.self_attn.o_proj, "in"), "b.o": (b.self_attn.o_proj, "in"), "a.sa": (a.self_attn, "out"),
        "b.sa": (b.self_attn, "out"), "a.mlp": (a.mlp, "out"), "b.mlp": (b.mlp, "out"),
        "a.down": (a.mlp.down_proj, "in"), "b.down": (b.mlp.down_proj, "in"),
    })  # fmt: skip
    config = model.config
    size = a.self_attn.head_dim * config.num_attention_heads // config.num_key_value_heads
    groups = prune(torch.cat([found["a.o"], found["b.o"]], 1), size, config.num_key_value_heads)
    units = prune(torch.cat([found["a.down"], found["b.down"]], 1), 1, config.intermediate_size)
    for name, rows in (("q_proj", size), ("k_proj", a.self_attn.head_dim), ("v_proj", a.self_attn.head_dim)):
        take(getattr(a.self_attn, name), getattr(b.self_attn, name), a.input_layernorm, b.input_layernorm, groups, rows)
    for name in ("gate_proj", "up_proj"):
        one, other = getattr(a.mlp, name), getattr(b.mlp, name)
        take(one, other, a.post_attention_layernorm, b.post_attention_layernorm, units, 1)
    for norm in (a.input_layernorm, a.post_attention_layernorm):
        norm.weight.fill_(1.0)
    for projection, goal in ((a.self_attn.o_proj, "sa"), (a.mlp.down_proj, "mlp")):  # on what now enters them
        entering = seen(model, batches, {"in": (projection, "in")})["in"]
        projection.weight.copy_(least_squares(entering, found[f"a.{goal}"] + found[f"b.{goal}"]).T)
    put_blocks(model, whole)


def prune(entering_NI: Tensor, size: int, left: int) -> Tensor:
    """The groups of `size` inputs that have the largest ridge leverage, in their order."""
    gram = entering_NI.double().T @ entering_NI.double()
    ridge = LEVERAGE * float(gram.diagonal().mean()) * torch.eye(len(gram)).to(gram)
    leverage = torch.linalg.solve(gram + ridge, gram).diagonal().reshape(-1, size).sum(1)
    return leverage.topk(left).indices.sort().values


def take(one: nn.Linear, other: nn.Linear, first: nn.Module, second: nn.Module, groups: Tensor, size: int) -> None:
    """The rows of `groups` of both projections, the gains of the norms before them multiplied in."""
    both = torch.cat([one.weight * first.weight, other.weight * second.weight])
    one.weight.copy_(both.reshape(-1, size, both.shape[1])[groups].flatten(0, 1))
