"""What every rival stands on: a decoder of the Llama kind, its blocks, and hidden states between them.

A rival takes a copy of the model, batches of tokens (rows, tokens) and the number of layers to lose, and changes the
copy in place. Letters: N tokens, D width, I units of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

Batches = Sequence[Tensor]
Rival = Callable[[nn.Module, Batches, int], None]
RIDGE = 1e-4  # of the mean diagonal, where a paper solves plain least squares of which there may be many solutions


def blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder's blocks."""
    return model.model.layers


def keep(model: nn.Module, kept: Iterable[int]) -> None:
    """Only these blocks stay."""
    model.model.layers = nn.ModuleList(blocks(model)[i] for i in kept)
    model.config.num_hidden_layers = len(blocks(model))


def without_block(model: nn.Module, start: int, count: int) -> None:
    """The blocks `start` to `start + count - 1` go."""
    keep(model, (i for i in range(len(blocks(model))) if not start <= i < start + count))


@torch.no_grad()
def seen(model: nn.Module, batches: Batches, modules: dict[str, tuple[nn.Module, str]]) -> dict[str, Tensor]:
    """(N, D) of what enters ("in") or leaves ("out") modules, by name."""
    found: dict[str, list[Tensor]] = {name: [] for name in modules}
    handles = []
    for name, (module, side) in modules.items():

        def note(_: nn.Module, args: tuple, kwargs: dict, out: object = None, to: list = found[name]) -> None:
            value = args[0] if out is None and args else kwargs.get("hidden_states") if out is None else out
            value = value[0] if isinstance(value, tuple) else value
            to.append(value.detach().flatten(0, -2))

        def after(module: nn.Module, args: tuple, kwargs: dict, out: object, note: Callable = note) -> None:
            note(module, args, kwargs, out)

        if side == "in":
            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        for ids in batches:
            model.model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def states(model: nn.Module, batches: Batches) -> list[Tensor]:
    """The hidden state (N, D) before every block, and behind the last."""
    inside = blocks(model)
    modules = {str(i): (block, "in") for i, block in enumerate(inside)} | {"end": (inside[-1], "out")}
    return list(seen(model, batches, modules).values())


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(N,) cosines."""
    return nn.functional.cosine_similarity(a, b, dim=-1)


def angle(a: Tensor, b: Tensor) -> float:
    """Mean angle of two hidden states as a share of pi."""
    return float(cosine(a.double(), b.double()).clamp(-1, 1).arccos().mean() / torch.pi)


def most_alike(model: nn.Module, batches: Batches, count: int) -> int:
    """Where the block of `count` layers begins between whose ends the hidden state turns least."""
    h = states(model, batches)
    return min(range(len(blocks(model)) - count + 1), key=lambda i: angle(h[i], h[i + count]))


def least_squares(a_NI: Tensor, b_ND: Tensor) -> Tensor:
    """(I, D) so that `a @ x` is nearest to `b`."""
    a, b = a_NI.double(), b_ND.double()
    gram = a.T @ a
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
    return torch.linalg.solve(gram, a.T @ b).to(a_NI)
