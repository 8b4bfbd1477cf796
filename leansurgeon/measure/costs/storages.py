"""Count the memory of live tensors: every storage once, by kind. Imports torch.

    with Storages() as count:
        ...                         # any torch code, on real or fake tensors
    count.peak, count.at_peak       # bytes

A storage counts from the operation that first returns it until it is freed, rounded up to `granule` bytes (torch's CUDA
allocator hands out multiples of 512). Memory used inside a kernel is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRANULE = 512  # bytes; c10/cuda/CUDACachingAllocator.h, kMinBlockSize


class Storages(TorchDispatchMode):
    """Live bytes by kind. New storages get the present `kind`; `tag` can correct it later."""

    def __init__(self, kind: str = "temporary", granule: int = GRANULE) -> None:
        super().__init__()
        self.kind, self.granule = kind, granule
        self.live: Counter[str] = Counter()
        self.peak, self.at_peak, self.peak_label = 0, Counter(), ""
        self.label = ""  # name of the present phase of the program
        self._known: dict[int, tuple[weakref.ref, int, str]] = {}  # id of a storage -> itself, bytes, kind
        self._total = 0

    def __torch_dispatch__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked several times per operation; the usual path is slow
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._see(value)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch wraps the method above, which takes a third of the time

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        key, size = id(storage), -(-storage.nbytes() // self.granule) * self.granule
        self._known[key] = (weakref.ref(storage, lambda _: self._forget(key)), size, self.kind)
        self.live[self.kind] += size
        self._total += size
        if self._total > self.peak:
            self.mark()

    def _forget(self, key: int) -> None:
        _, size, kind = self._known.pop(key)
        self.live[kind] -= size
        self._total -= size

    def tag(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Set the kind of these tensors; those made elsewhere are counted from now on."""
        for tensor in tensors:
            self._see(tensor)
            key = id(tensor.untyped_storage())
            ref, size, old = self._known[key]
            self.live[old] -= size
            self.live[kind] += size
            self._known[key] = (ref, size, kind)

    def mark(self) -> None:
        """Reset the peak to what is live now."""
        self.peak, self.at_peak, self.peak_label = self._total, +self.live, self.label
