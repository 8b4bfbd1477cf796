"""Count the memory of tensors while they live: every storage once, by the kind of thing that it is. Imports torch.

    with Storages() as count:
        ...                         # any torch code, on real or fake tensors
    count.peak, count.at_peak       # bytes

A storage is counted from the operation that first returns it until nobody holds it any more, rounded up to `granule`
bytes (torch's CUDA allocator hands out multiples of 512). What a kernel uses inside itself is not seen.
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
    """Live bytes by kind. `kind` is what a storage that appears now is taken for; `tag` says it better later."""

    def __init__(self, kind: str = "temporary", granule: int = GRANULE) -> None:
        super().__init__()
        self.kind, self.granule = kind, granule
        self.live: Counter[str] = Counter()
        self.peak, self.at_peak, self.peak_label = 0, Counter(), ""
        self.label = ""  # of the present stretch of the program
        self._known: dict[int, tuple[weakref.ref, int, str]] = {}  # id of a storage -> itself, bytes, kind
        self._total = 0

    def __torch_dispatch__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for several times in every operation; the long way takes as long as one
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._see(value)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method above, which would take a third of the time

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
        """Say what these tensors are; those that were made elsewhere are counted from now on."""
        for tensor in tensors:
            self._see(tensor)
            key = id(tensor.untyped_storage())
            ref, size, old = self._known[key]
            self.live[old] -= size
            self.live[kind] += size
            self._known[key] = (ref, size, kind)

    def mark(self) -> None:
        """Start the peak anew at what lives now."""
        self.peak, self.at_peak, self.peak_label = self._total, +self.live, self.label
