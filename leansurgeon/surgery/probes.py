"""Hooks on one block of a built model: capture the inputs of its projections, measure how their output reaches the
block's output, and edit their weights in place. Imports torch.

Letters: N real tokens of a batch, I inputs of a projection, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from leansurgeon.errors import Diverged, UnsupportedModel
from leansurgeon.hooks import Hooks

STRAIGHT = 1e-3  # relative deviation from a scaled identity that counts as rounding


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of a module in a list within the context."""
    inputs = []
    with Hooks() as hooks:
        hooks.before(module, lambda _m, args: inputs.append(args[0].detach()))
        yield inputs


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of a module in a list within the context."""
    outputs = []
    with Hooks() as hooks:
        hooks.after(module, lambda _m, _a, out: outputs.append(out.detach()))
        yield outputs


class StopForward(Exception):
    """Raised by a hook to end a forward pass early."""


def capture_input(module: nn.Module, run: Callable[[], object]) -> Tensor:
    """Return the input of a module while `run` runs, without computing the rest of the pass."""
    inputs = []

    def note(_, args: tuple) -> None:
        """Record the module's input, then end the forward pass."""
        inputs.append(args[0].detach())
        raise StopForward

    with Hooks() as hooks, suppress(StopForward):
        hooks.before(module, note)
        run()
    if not inputs:
        raise UnsupportedModel(f"A block here uses the weight of a {type(module).__name__} without calling it.")
    return inputs[0]


@contextmanager
def change_output(module: nn.Module | None, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make a module, if there is one, return `change(output)` within the context."""
    with Hooks() as hooks:
        if module is not None:
            hooks.after(module, lambda _m, _a, out: change(out))
        yield


def flat(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Flatten `(..., D)` to `(N, D)`; the mask `(batch, tokens)` says which tokens are real."""
    if mask is not None and values.dim() == 3 and mask.shape == values.shape[:2]:
        return values[mask.to(values.device)]
    return values.reshape(-1, values.shape[-1])


def relative_error(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| / |a| for every token."""
    return (a - b).double().norm(dim=-1) / a.double().norm(dim=-1).clamp(min=1e-300)


def check_finite(states: list[Tensor], where: str) -> None:
    """Raise `Diverged` if activations hold NaN or infinity."""
    if not all(bool(torch.isfinite(s).all()) for s in states):
        raise Diverged(
            f"The activations {where} hold NaN or infinity.",
            "Check the weights for NaN or infinity.",
        )


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight as (outputs, inputs); a view, so that edits in place reach the module."""
    if isinstance(module, nn.Linear):
        return module.weight.data
    if any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):  # GPT-2's stores (inputs, outputs)
        return module.weight.data.T
    raise UnsupportedModel(f"An output projection here is a {type(module).__name__}, which cannot be refitted.")


def add_to(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> None:
    """Add (O, I) to the weight and (O,) to the bias of a projection in place."""
    if weight is not None:
        weight_of(module).add_(weight.to(module.weight))
    if bias is not None and module.bias is not None:
        module.bias.data.add_(bias.to(module.bias))


def way_back(*modules: nn.Module) -> Callable[[], None]:
    """Return a function that restores the modules' current values exactly; adding and subtracting would round."""
    kept = [(p, p.detach().clone()) for module in modules for p in module.parameters(recurse=False)]

    def restore() -> None:
        """Copy the saved values back."""
        for parameter, values in kept:
            parameter.data.copy_(values)

    return restore


def reach(module: nn.Module, run: Callable[[], Tensor], freeze: nn.Module | None = None) -> Tensor | None:
    """Return the factor (D,) by which the output of `module` reaches the output of the block; None if it is no plain
    sum.

    The factor is 1 in a pre-norm block, the layer scale if there is one, and None if a norm follows (post-norm). `run`
    runs the block on one batch. Noise is added to the output, and the change of the block's output compared with it.
    `freeze` is a module whose output is held fixed (the MLP behind an attention's projection), so that only the direct
    path counts.
    """
    held = []
    with change_output(freeze, lambda out: held.append(out) or out):
        calm = run()
    generator = torch.Generator().manual_seed(0)
    shaken = []

    def shake(out: Tensor) -> Tensor:
        """Add noise as large as the block's undisturbed output."""
        size = float(calm.double().pow(2).mean().sqrt()) or 1.0
        shaken.append(torch.randn(out.shape, generator=generator).to(out) * size)
        return out + shaken[-1]

    with change_output(module, shake), change_output(freeze, lambda _: held[0]):
        moved = run() - calm
    if len(shaken) != 1 or shaken[0].numel() != moved.numel():
        return None
    d = moved.shape[-1]
    push, moved = shaken[0].reshape(-1, d).double(), moved.reshape(-1, d).double()
    scale = (push * moved).sum(0) / push.pow(2).sum(0)
    size = float(moved.pow(2).sum())
    if not size or float((moved - scale * push).pow(2).sum()) > STRAIGHT**2 * size:
        return None
    return scale.float()


def closing_norm(block: nn.Module, run: Callable[[], Tensor]) -> nn.Module | None:
    """Return the LayerNorm that produces a post-norm block's output; None in other blocks. `run` as in `reach`."""
    made = []
    with Hooks() as hooks:
        for module in block.modules():
            if isinstance(module, nn.LayerNorm):
                hooks.after(module, lambda m, _, out: made.append((m, out)))
        out = run()
    for module, value in reversed(made):
        if value.shape == out.shape and torch.equal(value, out) and module.elementwise_affine:
            return module
    return None
