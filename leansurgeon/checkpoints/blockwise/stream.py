"""Hidden states of a list of batches on their way through a model, one block at a time. Imports torch.

What a block is called with (masks, rotary tables, windows) is the library's business: its own forward is run with
stand-ins in place of the blocks, which note their arguments and return what they received. Between the stages of a
pyramid, and for the final norm and head, the library's forward is run again, and the stand-in before that place returns
the hidden states that are at hand.
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

HIDDEN = ("hidden_states", "x", "hidden_state")  # what libraries call a block's first argument


class StopForward(Exception):
    """Ends a run of the library's forward whose rest is not needed."""


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call of a block, the hidden states taken out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str | None  # the name of the hidden states where they came by name

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
        """Hidden states, and the rest of a call."""
        if args:
            return args[0], cls(args[1:], dict(kwargs), None)
        key = next(k for k in HIDDEN if k in kwargs)
        return kwargs[key], cls((), {k: v for k, v in kwargs.items() if k != key}, key)

    def on(self, forward: Callable[..., Any], hidden: Tensor) -> Any:
        """Call a block with the noted arguments and these hidden states."""
        if self.key:
            return forward(**self.kwargs, **{self.key: hidden})
        return forward(hidden, *self.args, **self.kwargs)


class Stream:
    """Hidden states of `batches` before block `at` of a skeleton, which needs its outer weights for it. Their last axis
    are the channels, wherever the library's blocks have them (DaViT's are `(batch, channels, height, width)`).

    A batch is what the model is called with (`labels` are left out; timm takes `pixel_values`). Raises
    `UnsupportedModel` where blocks pass on more than one tensor.
    """

    def __init__(self, skeleton: Skeleton, batches: list[dict[str, Tensor]]) -> None:
        self.skeleton, self.at = skeleton, 0
        self.batches = [{k: v.to(skeleton.device) for k, v in batch.items() if k != "labels"} for batch in batches]
        self.calls: list[list[BlockCall]] = []  # by batch and block
        self.wraps: list[dict[int, Callable[[Tensor], Any]]] = []  # what a block returns of a batch, made from a tensor
        self.beside: list[Tensor] = []  # what blocks give besides hidden states
        self.predicts = False  # whether `head` gives predictions, not hidden states; known behind its first call
        self.channels_first = False
        self.crossings: set[int] = set()  # blocks before which the library does something to the hidden states
        self.hidden: list[Tensor] = [self._record(batch) for batch in self.batches]

    def through(self, skeleton: Skeleton) -> Stream:
        """The same hidden states and calls, made of the blocks of another skeleton of the same model."""
        other = copy(self)
        other.skeleton = skeleton
        return other

    def some(self, chosen: slice) -> Stream:
        """The same for some of the batches."""
        other = copy(self)
        other.batches, other.calls, other.hidden = self.batches[chosen], self.calls[chosen], self.hidden[chosen]
        other.wraps = self.wraps[chosen]
        return other

    # -- through the blocks ----------------------------------------------------------------------

    def call(self, batch: int, hidden: Tensor, layer: int | None = None, *, rounded: bool = True) -> Tensor:
        """The output of a filled block for the hidden states of one batch, with gradients where they are switched
        on. `rounded` False takes products in the numbers of the weights, whatever the skeleton's `cast` says.
        """
        layer = self.at if layer is None else layer
        self.skeleton.work += hidden.numel() // hidden.shape[-1] * (3 if torch.is_grad_enabled() else 1)
        with self.skeleton.cast() if rounded else nullcontext():
            given = self._as_given(hidden)
            out = self.calls[batch][layer].on(self.skeleton.block(layer), given)
        return self._channels_last(out if isinstance(out, Tensor) else out[0])

    @torch.no_grad()
    def run(self, layer: int | None = None, hidden: list[Tensor] | None = None) -> list[Tensor]:
        """Outputs of a filled block (by default the next one) for every batch; nothing moves. `hidden` are other hidden
        states to use than the stream's own.
        """
        states, layer = self.hidden if hidden is None else hidden, self.at if layer is None else layer
        return [self.call(b, state, layer).to(self.skeleton.home) for b, state in enumerate(states)]

    def _channels_last(self, state: Tensor) -> Tensor:
        """A block's hidden states with the channels last."""
        return state.movedim(1, -1) if self.channels_first and state.dim() > 3 else state

    def _as_given(self, hidden: Tensor) -> Tensor:
        """Hidden states as the library's blocks take them, on the device of these."""
        hidden = hidden.to(self.skeleton.device)
        return hidden.movedim(-1, 1) if self.channels_first and hidden.dim() > 3 else hidden

    def advance(self, outputs: list[Tensor]) -> None:
        """Take these outputs of block `at` as the way to the next block, and cross to its stage where one begins."""
        if self.at >= self.skeleton.depth:
            raise LeanSurgeonError(f"The stream has passed all {self.skeleton.depth} blocks.")
        self.at += 1
        if self.at in self.crossings:
            outputs = [self._cross(b, out) for b, out in enumerate(outputs)]
        self.hidden = list(outputs)

    def finish(self) -> list[Tensor]:
        """Logits of every batch by the library's own norm and head; `last_hidden_state` of a model without a head."""
        if self.at != self.skeleton.depth:
            raise LeanSurgeonError(f"The stream stands before block {self.at} of {self.skeleton.depth}.")
        return [self.head(b, hidden) for b, hidden in enumerate(self.hidden)]

    # -- the library's own forward with stand-ins -------------------------------------------------

    @torch.no_grad()
    def _record(self, batch: dict[str, Tensor]) -> Tensor:
        """Note the arguments of every block; returns the hidden states before the first."""
        calls, first, passed = [], [], []
        # What blocks hand on beside hidden states depends on the batch's length; else one batch shows it for all.
        wraps = self.wraps[0] if self.wraps and not self.skeleton.shared else {}

        def stand_in(layer: int, args: tuple, kwargs: dict) -> Any:
            """In place of a block: note its arguments and run it; the last one ends the forward."""
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
            passed[:] = [hidden.detach()]  # an object of its own, known again by the next block
            return wraps[layer](passed[-1])

        self._forward(batch, stand_in)
        if len(calls) != self.skeleton.depth:
            raise UnsupportedModel(f"{self._name} calls {len(calls)} of its {self.skeleton.depth} blocks.")
        self.calls.append(calls)
        self.wraps.append(wraps)
        return self._channels_last(first[0]).to(self.skeleton.home)

    def _cross(self, batch: int, hidden: Tensor) -> Tensor:
        """From the output of block `at - 1` to the input of block `at`.

        Later blocks may be called with what came out of earlier stages (a decoder with the encoder's output), so their
        arguments are noted anew.
        """
        states = []
        hidden = self._as_given(hidden)

        def stand_in(layer: int, args: tuple, kwargs: dict) -> Any:
            """In place of a block: those before `at` pass through, those from it on have their arguments noted."""
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
        """What `finish` gives for one batch, for those who cannot hold the logits of all; `hidden` are outputs of a
        block of the last stage.
        """
        last = self.skeleton.depth - 1
        hidden = self._as_given(hidden)

        def stand_in(layer: int, args: tuple, kwargs: dict) -> Any:
            """In place of a block: the last one gives the hidden states at hand."""
            return self.wraps[batch][layer](hidden if layer == last else BlockCall.of(args, kwargs)[0])

        out = self._forward(self.batches[batch], stand_in)
        if isinstance(out, Tensor):  # timm, whose models without a classifier give features
            self.predicts = getattr(self.skeleton.model, "num_classes", 0) > 0
            return out
        self.predicts = "logits" in out
        return out["logits"] if "logits" in out else out["last_hidden_state"]

    @torch.no_grad()
    def _forward(self, batch: dict[str, Tensor], stand_in: Callable[[int, tuple, dict], Any]) -> Any:
        """One run of the library's forward with `stand_in(layer, args, kwargs)` in place of every block. Only their
        `forward` is replaced: libraries ask blocks for their attributes, too.
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
        """What a block returns as a function of its hidden states: itself, or a tuple around it. `known` are those of
        earlier blocks.

        Found by one call of the first block of a kind (and of a stack, where that makes what all its blocks read), with
        zeros where it is not filled: a table that the stack shares is.
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
        looks = (hidden.shape[-2],) * 2  # attention weights, of every token for every token
        others = not shared and any(t.dim() != 4 or t.shape[-2:] != looks for t in tensors[1:])
        if not tensors or tensors[0].shape != hidden.shape or (several and out[0] is not tensors[0]) or others:
            raise UnsupportedModel(self._passes_on(len(tensors)))
        if not several:
            return lambda value: value
        self.beside += tensors[1:]  # to be looked at; the next block must not ask for them
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
