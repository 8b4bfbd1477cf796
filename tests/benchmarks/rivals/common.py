"""What every rival stands on: a transformer whose blocks are a list, and hidden states between them.

A rival takes a copy of the model, batches of inputs and the number of layers to lose, and changes the copy in place.
Letters: N tokens, D width, I units of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.surgery.local_fit import products

Batch = dict[str, Tensor]
Batches = Sequence[Batch]
Rival = Callable[[nn.Module, Batches, int], None]
AT_ONCE = 4096  # tokens
RIDGE = 1e-4  # of the mean diagonal, where a paper solves plain least squares of which there may be many solutions
DOWN = (
    "mlp.down_proj",
    "mlp.c_proj",
    "mlp.fc2",
    "mlp.down",
    "output.dense",
)  # what libraries call the MLP's second half
POST_NORM = ("bert", "roberta", "distilbert", "electra", "mpnet", "camembert", "xlm-roberta")


def depth_key(model: nn.Module) -> str:
    """What the config calls the number of blocks."""
    return "n_layer" if hasattr(model.config, "n_layer") else "num_hidden_layers"


def holder(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the list of blocks, and the list's name there."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == getattr(model.config, depth_key(model)):
                return module, name
    raise ValueError(f"no list of blocks in {type(model).__name__}")


def blocks(model: nn.Module) -> nn.ModuleList:
    """The model's blocks."""
    place, name = holder(model)
    return getattr(place, name)


def put_blocks(model: nn.Module, chosen: Iterable[nn.Module]) -> None:
    """These blocks in the place of those that are there."""
    place, name = holder(model)
    setattr(place, name, nn.ModuleList(chosen))
    setattr(model.config, depth_key(model), len(getattr(place, name)))


def keep(model: nn.Module, kept: Iterable[int]) -> None:
    """Only these blocks stay."""
    inside = blocks(model)
    put_blocks(model, [inside[i] for i in kept])


def without_block(model: nn.Module, start: int, count: int) -> None:
    """The blocks `start` to `start + count - 1` go."""
    keep(model, [i for i in range(len(blocks(model))) if not start <= i < start + count])


def down(block: nn.Module) -> nn.Module:
    """The output projection of a block's MLP."""
    for path in DOWN:
        try:
            return block.get_submodule(path)
        except AttributeError:
            continue
    raise ValueError(f"no output projection in {type(block).__name__}")


def run(model: nn.Module, batch: Batch) -> Any:
    """What the model without its head gives; products in bf16 where the processor has them, as in our own cut."""
    given = {key: value for key, value in batch.items() if key != "labels"}
    with products(width(model), model.device.type)():
        return model.base_model(**given, **({"use_cache": False} if "input_ids" in batch and is_causal(model) else {}))


def width(model: nn.Module) -> int:
    """Of the hidden states."""
    return getattr(model.config, "hidden_size", None) or model.config.n_embd


def is_causal(model: nn.Module) -> bool:
    """Whether the model predicts the next token."""
    return type(model).__name__.endswith(("CausalLM", "LMHeadModel"))


def real(batch: Batch, values: Tensor) -> Tensor:
    """(N, D) of the real tokens."""
    mask = batch.get("attention_mask")
    return values.flatten(0, -2) if mask is None or mask.shape != values.shape[:2] else values[mask.bool()]


@torch.no_grad()
def watched(model: nn.Module, batches: Batches, modules: dict[str, tuple[nn.Module, str]]) -> Iterator[dict]:
    """Batch by batch, (N, D) of what enters ("in") or leaves ("out") modules, by name, in fp32 whatever products are
    taken in.
    """
    found: dict[str, Tensor] = {}
    handles = []
    for name, (module, side) in modules.items():

        def before(_: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
            found[name] = args[0] if args else kwargs["hidden_states"]

        def after(_: nn.Module, args: tuple, out: object, name: str = name) -> None:
            found[name] = out[0] if isinstance(out, tuple) else out

        if side == "in":
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after))
    try:
        for batch in batches:
            run(model, batch)
            yield {name: real(batch, value.detach()).float() for name, value in found.items()}
    finally:
        for handle in handles:
            handle.remove()


def seen(model: nn.Module, batches: Batches, modules: dict[str, tuple[nn.Module, str]]) -> dict[str, Tensor]:
    """The same of all batches."""
    parts = list(watched(model, batches, modules))
    return {name: torch.cat([part[name] for part in parts]) for name in modules}


def between(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The places before every block, and behind the last."""
    inside = blocks(model)
    return {str(i): (block, "in") for i, block in enumerate(inside)} | {"end": (inside[-1], "out")}


def means(
    model: nn.Module, batches: Batches, spans: Sequence[tuple[int, int]], what: Callable[[Tensor, Tensor], Tensor]
) -> list[float]:
    """For every span (i, j) the mean over tokens of `what(state before block i, state before block j)`."""
    sums, tokens = [0.0] * len(spans), 0
    for part in watched(model, batches, between(model)):
        h = list(part.values())
        tokens += len(h[0])
        for k, (i, j) in enumerate(spans):
            sums[k] += float(what(h[i], h[j]).double().sum())
    return [total / tokens for total in sums]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(N,) cosines."""
    return nn.functional.cosine_similarity(a, b, dim=-1)


def turn(a: Tensor, b: Tensor) -> Tensor:
    """(N,) angles of two hidden states as a share of pi."""
    return cosine(a.double(), b.double()).clamp(-1, 1).arccos() / torch.pi


def most_alike(model: nn.Module, batches: Batches, count: int, first: int = 0) -> int:
    """Where the block of `count` layers begins, at layer `first` or later, between whose ends the hidden state turns
    least.
    """
    spans = [(i, i + count) for i in range(first, len(blocks(model)) - count + 1)]
    angles = means(model, batches, spans, turn)
    return first + min(range(len(spans)), key=lambda i: angles[i])


def check_adds(model: nn.Module, name: str) -> None:
    """Refuse what folds into the MLP before a cut where a norm stands behind that MLP."""
    if model.config.model_type in POST_NORM:
        raise ValueError(f"{name} is for blocks whose MLP adds to the hidden state; behind this one stands a norm")


def least_squares(a_NI: Tensor, b_ND: Tensor) -> Tensor:
    """(I, D) so that `a @ x` is nearest to `b`; sums in fp64, over some thousand tokens at a time."""
    parts = list(zip(a_NI.split(AT_ONCE), b_ND.split(AT_ONCE), strict=True))
    gram = sum(a.double().T @ a.double() for a, _ in parts)
    cross = sum(a.double().T @ b.double() for a, b in parts)
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
    return torch.linalg.solve(gram, cross).to(a_NI)
