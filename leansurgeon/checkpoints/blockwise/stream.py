"""Hidden states of a list of batches on their way through a model, one block at a time. Imports torch.

The library decides what a block is called with (masks, rotary tables, windows). So its own forward is run with
stand-ins for the blocks, which record their arguments and return what they received. Between the stages of a pyramid,
and for the final norm and head, the library's forward is run again, and the stand-in before that point returns the
current hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.blockwise.skeleton import Skeleton
from leansurgeon.checkpoints.model import tower_around
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel

HIDDEN = ("hidden_states", "x", "hidden_state")  # names of a block's first argument in the libraries


class StopForward(Exception):
    """Stops the library's forward when the rest is not needed."""


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call of a block, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str | None  # the keyword of the hidden states, if they were passed by keyword

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
        """Split the arguments of a call into the hidden states and the rest."""
        if args:
            return args[0], cls(args[1:], dict(kwargs), None)
        key = next(k for k in HIDDEN if k in kwargs)
        return kwargs[key], cls((), {k: v for k, v in kwargs.items() if k != key}, key)

    def on(self, forward: Callable[..., Any], hidden: Tensor) -> Any:
        """Call a block with the recorded arguments and the given hidden states."""
        if self.key:
            return forward(**self.kwargs, **{self.key: hidden})
        return forward(hidden, *self.args, **self.kwargs)


class Stream:
    """Hidden states of `batches` before block `at` of a skeleton, whose outer weights must be filled.

    Channels are always the last axis here, wherever the library's blocks have them (DaViT uses `(batch, channels,
    height, width)`). A batch holds the arguments of the model (`labels` are left out; timm takes `pixel_values`).
    Raises `UnsupportedModel` if blocks pass on more than one tensor.
    """

    def __init__(self, skeleton: Skeleton, batches: list[dict[str, Tensor]]) -> None:
        self.skeleton, self.at = skeleton, 0
        self.batches = [{k: v.to(skeleton.device) for k, v in batch.items() if k != "labels"} for batch in batches]
        self.calls: list[list[BlockCall]] = []  # by batch and block
        self.wraps: list[dict[int, Callable[[Tensor], Any]]] = []  # wraps a tensor as each block returns it
        self.beside: list[Tensor] = []  # other tensors that blocks return besides the hidden states
        self.predicts = False  # whether `head` returns predictions rather than hidden states; set by its first call
        self.channels_first = False
        self.crossings: set[int] = set()  # blocks before which the library changes the hidden states
        self.hidden: list[Tensor] = [self._record(batch) for batch in self.batches]

    def through(self, skeleton: Skeleton) -> Stream:
        """Return the same hidden states and calls for the blocks of another skeleton of the same model."""
        other = copy(self)
        other.skeleton = skeleton
        return other

    def some(self, chosen: slice) -> Stream:
        """Return the stream of some of the batches."""
        other = copy(self)
        other.batches, other.calls, other.hidden = self.batches[chosen], self.calls[chosen], self.hidden[chosen]
        other.wraps = self.wraps[chosen]
        return other

    # -- through the blocks ----------------------------------------------------------------------

    def call(self, batch: int, hidden: Tensor, layer: int | None = None, *, rounded: bool = True) -> Tensor:
        """Return the output of a filled block for the hidden states of one batch, with gradients if they are enabled.

        `rounded=False` computes in the precision of the weights, ignoring the skeleton's `cast`.
        """
        layer = self.at if layer is None else layer
        self.skeleton.work += hidden.numel() // hidden.shape[-1] * (3 if torch.is_grad_enabled() else 1)
        with self.skeleton.cast() if rounded else nullcontext():
            out = self.calls[batch][layer].on(self.skeleton.block(layer), self._as_given(hidden))
        return self._channels_last(out if isinstance(out, Tensor) else out[0])

    @torch.no_grad()
    def run(self, layer: int | None = None, hidden: list[Tensor] | None = None) -> list[Tensor]:
        """Return the outputs of a filled block (by default the next one) for every batch, without advancing the stream.

        `hidden` replaces the stream's own hidden states.
        """
        states, layer = self.hidden if hidden is None else hidden, self.at if layer is None else layer
        return [self.call(b, state, layer).to(self.skeleton.home) for b, state in enumerate(states)]

    def _channels_last(self, state: Tensor) -> Tensor:
        """Move the channels of a block's hidden states to the last axis."""
        return state.movedim(1, -1) if self.channels_first and state.dim() > 3 else state

    def _as_given(self, hidden: Tensor) -> Tensor:
        """Return hidden states in the layout of the library's blocks, on the skeleton's device."""
        hidden = hidden.to(self.skeleton.device)
        return hidden.movedim(-1, 1) if self.channels_first and hidden.dim() > 3 else hidden

    def advance(self, outputs: list[Tensor]) -> None:
        """Advance to the next block with these outputs of block `at`, crossing to the next stage if it starts there."""
        if self.at >= self.skeleton.depth:
            raise LeanSurgeonError(f"The stream has passed all {self.skeleton.depth} blocks.")
        self.at += 1
        if self.at in self.crossings:
            outputs = [self._cross(b, out) for b, out in enumerate(outputs)]
        self.hidden = list(outputs)

    def finish(self) -> list[Tensor]:
        """Return every batch's logits by the library's norm and head, or `last_hidden_state` of a headless model."""
        if self.at != self.skeleton.depth:
            raise LeanSurgeonError(f"The stream stands before block {self.at} of {self.skeleton.depth}.")
        return [self.head(b, hidden) for b, hidden in enumerate(self.hidden)]

    # -- the library's own forward with stand-ins -------------------------------------------------

    @torch.no_grad()
    def _record(self, batch: dict[str, Tensor]) -> Tensor:
        """Record the arguments of every block; return the hidden states before the first one."""
        calls, first, passed = [], [], []
        # With shared tables, what blocks pass on depends on the batch's length; otherwise one batch stands for all.
        wraps = self.wraps[0] if self.wraps and not self.skeleton.shared else {}

        def stand_in(layer: int, args: tuple, kwargs: dict) -> Any:
            """Replace a block: record its arguments and wrap its input; the last block stops the forward."""
            hidden, call = BlockCall.of(args, kwargs)
            if layer != len(calls):
                raise UnsupportedModel(f"{self._name} calls block {layer} where block {len(calls)} is due.")
            given = (*call.args, *call.kwargs.values())
            if not self.skeleton.shared and any(value is other for value in given for other in self.beside):
                raise UnsupportedModel(self._passes_on(1 + len(self.beside)))
            calls.append(call)
            width = self.skeleton.shape.stages[self.skeleton.shape.stage_of(layer)].width
            self.channels_first |= hidden.dim() > 3 and hidden.shape[1] == width != hidden.shape[-1]
            if not layer:
                first.append(hidden)
            elif hidden is not passed[-1]:
                self.crossings.add(layer)
            if layer not in wraps:
                wraps[layer] = self._wrap(layer, call, hidden, wraps)
            if layer == self.skeleton.depth - 1:
                raise StopForward
            passed[:] = [hidden.detach()]  # a new object, so that the next block can recognise it
            return wraps[layer](passed[-1])

        self._forward(batch, stand_in)
        if len(calls) != self.skeleton.depth:
            raise UnsupportedModel(f"{self._name} calls {len(calls)} of its {self.skeleton.depth} blocks.")
        self.calls.append(calls)
        self.wraps.append(wraps)
        return self._channels_last(first[0]).to(self.skeleton.home)

    def _cross(self, batch: int, hidden: Tensor) -> Tensor:
        """Turn the output of block `at - 1` into the input of block `at`.

        Later blocks may receive the output of earlier stages (a decoder gets the encoder's output), so their arguments
        are recorded again.
        """
        states = []
        hidden = self._as_given(hidden)

        def stand_in(layer: int, args: tuple, kwargs: dict) -> Any:
            """Replace a block: those before `at` pass their input through, the others have their arguments recorded."""
            state, call = BlockCall.of(args, kwargs)
            if layer >= self.at:
                states.append(state)
                self.calls[batch][layer] = call
            if layer == self.skeleton.depth - 1:
                raise StopForward
            return self.wraps[batch][layer](hidden if layer == self.at - 1 else state)

        self._forward(self.batches[batch], stand_in)
        return self._channels_last(states[0]).to(self.skeleton.home)

    def head(self, batch: int, hidden: Tensor) -> Tensor:
        """Return what `finish` returns, for one batch, so that the logits of all batches need not fit in memory.

        `hidden` are outputs of a block of the last stage.
        """
        last = self.skeleton.depth - 1
        hidden = self._as_given(hidden)

        def stand_in(layer: int, args: tuple, kwargs: dict) -> Any:
            """Replace a block: the last one returns the given hidden states."""
            return self.wraps[batch][layer](hidden if layer == last else BlockCall.of(args, kwargs)[0])

        out = self._forward(self.batches[batch], stand_in)
        if isinstance(out, Tensor):  # timm models without a classifier return features
            self.predicts = getattr(self.skeleton.model, "num_classes", 0) > 0
            return out
        self.predicts = "logits" in out
        return out["logits"] if "logits" in out else out["last_hidden_state"]

    @torch.no_grad()
    def _forward(self, batch: dict[str, Tensor], stand_in: Callable[[int, tuple, dict], Any]) -> Any:
        """Run the library's forward once with `stand_in(layer, args, kwargs)` in place of every block.

        Only the blocks' `forward` is replaced, because libraries also read their attributes.
        """
        path = tower_around(self.skeleton.blocks[0], self.skeleton.model, self.skeleton.architecture)
        model = self.skeleton.model.get_submodule(path)
        blocks = [self.skeleton.block(i) for i in range(self.skeleton.depth)]
        for i, block in enumerate(blocks):
            block.forward = lambda *args, _i=i, **kwargs: stand_in(_i, args, kwargs)
        try:
            if self.skeleton.architecture.library == "timm":
                return model(batch["pixel_values"] if "pixel_values" in batch else next(iter(batch.values())))
            return model(**batch)
        except StopForward:
            return None
        finally:
            for block in blocks:
                del block.forward

    def _wrap(self, layer: int, call: BlockCall, hidden: Tensor, known: dict[int, Callable]) -> Callable[[Tensor], Any]:
        """Return a function that wraps hidden states as the block does: the tensor itself, or a tuple around it.

        `known` are the functions of earlier blocks. The form is found by calling the first block of a kind (and of a
        stack, if that block computes what all its blocks read). A block that is not filled is run with zeros; a table
        that the stack shares is filled already.
        """
        block, shared = self.skeleton.block(layer), bool(self.skeleton.shared)
        stage_of = self.skeleton.shape.stage_of
        same = (i for i in known if not shared or stage_of(i) == stage_of(layer))
        alike = next((i for i in same if type(self.skeleton.block(i)) is type(block)), None)
        if alike is not None and not isinstance(block, nn.Sequential):
            return known[alike]
        empty = not self.skeleton.is_filled(layer)
        if empty:
            self.skeleton.fill_zeros(layer)
        try:
            out = call.on(lambda *args, **kwargs: type(block).forward(block, *args, **kwargs), hidden)
        finally:
            if empty:
                self.skeleton.empty(layer)
        several = isinstance(out, tuple | list)
        tensors = [part for part in out if isinstance(part, Tensor)] if several else [out]
        looks = (hidden.shape[-2],) * 2  # shape of attention weights: every token to every token
        others = not shared and any(t.dim() != 4 or t.shape[-2:] != looks for t in tensors[1:])
        if not tensors or tensors[0].shape != hidden.shape or (several and out[0] is not tensors[0]) or others:
            raise UnsupportedModel(self._passes_on(len(tensors)))
        if not several:
            return lambda value: value
        self.beside += tensors[1:]  # checked in `_record`: the next block must not use them
        kind, rest = type(out), tuple(out[1:])
        return lambda value: kind((value, *rest))

    def _passes_on(self, count: int) -> str:
        return (
            f"A block of {self._name} passes on {count} tensors of other sizes or meanings than the one it receives, "
            "so the model cannot be run block by block."
        )

    @property
    def _name(self) -> str:
        return type(self.skeleton.model).__name__
