"""GPUs that are none: every tensor keeps its numbers in host memory, and those that were sent to "cuda" say so.

    with pretend_gpu.plugged_in(monkeypatch):
        ...                                     # code that asks `torch.cuda.is_available()` finds a GPU (or `count`)

What Python asks of a tensor (`.device`, `.numpy()`, `.to("cpu")`) is answered as for a tensor on a GPU, and an
operation on tensors here and there raises, as it does there. Numbers are those of the CPU. Not seen: what the kernels
can do (data types, backends of attention), time, memory, and what happens inside of one C++ call, such as a backward
pass. torch.compile does not see through it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PLAIN = torch.Generator
READS = ("numpy", "__array__")  # need a tensor on the CPU
WAITS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "nonzero", "equal")
ELSEWHERE = ("copy_", "__set__", "_has_compatible_shallow_copy_type")  # take a tensor of another device
TOGETHER = ("cat", "stack", "concat", "hstack", "vstack")  # take no number of another device, either


class Mixed(RuntimeError):
    """Tensors of two devices in one operation."""


class PretendGpu(TorchFunctionMode):
    """`waits` counts what would have the host wait for the device, `calls` what was asked of `torch.cuda`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._there: dict[int, tuple[weakref.ref, int]] = {}  # storages by their id, and on which GPU

    def has(self, tensor: torch.Tensor) -> bool:
        return self.number(tensor) is not None

    def number(self, tensor: torch.Tensor) -> int | None:
        """Of the GPU where a tensor is."""
        with torch._C.DisableTorchFunction():
            return self._there.get(id(tensor.untyped_storage()), (None, None))[1]

    def _sent(self, found: Any, number: int) -> Any:
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor) and not self.has(value):
                storage = value.untyped_storage()
                key = id(storage)
                self._there[key] = weakref.ref(storage, lambda _, key=key: self._there.pop(key, None)), number
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        about = getattr(func, "__self__", None)
        name = getattr(func, "__name__", "")
        if about is torch.Tensor.device:
            return torch.device("cuda", self.number(args[0])) if self.has(args[0]) else func(*args)
        if about in (torch.Tensor.is_cuda, torch.Tensor.is_cpu):
            return self.has(args[0]) is (about is torch.Tensor.is_cuda)
        if name in ("to", "cpu", "cuda"):
            return self._to(name, func, args, kwargs)
        if name == "pin_memory":
            if self.has(args[0]):
                raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
            return args[0]
        tensors = [v for v in tree_leaves([args, kwargs]) if isinstance(v, torch.Tensor)]
        there = [t for t in tensors if self.has(t)]
        if there and name in READS:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        if there and name in WAITS:
            self.waits[name] += 1
        self._check(name, args, kwargs, tensors, there)
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = as_cpu(device)
        place = number_of(device)
        sent = bool(there) if device is None else place is not None
        place = self.number(there[0]) if there and device is None else place
        if sent and name in ("tensor", "as_tensor", "asarray"):
            self.waits["to the gpu"] += 1
        made = func(*args, **kwargs)
        return self._sent(made, place) if sent and name not in ("__set__", "tolist", "item") else made

    def _check(self, name: str, args: Any, kwargs: Any, tensors: list, there: list) -> None:
        numbers = sorted({self.number(t) for t in there})
        if name not in ELSEWHERE and len(numbers) > 1:
            raise Mixed(f"{name}: Expected all tensors to be on the same device, but found several GPUs: {numbers}")
        if name in ELSEWHERE or not there or len(there) == len(tensors):
            return
        if name == "__getitem__" and self.has(args[0]):
            return  # places on the CPU are sent
        here = [t for t in tensors if not self.has(t)]
        if name in ("__setitem__", "index_put_", "index_put") and self.has(args[0]):
            value = args[2]
            here = [value] if isinstance(value, torch.Tensor) and not self.has(value) else []
        if [t for t in here if t.dim() or name in TOGETHER]:
            sizes = [list(t.shape) for t in here]
            raise Mixed(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu {sizes}")

    def _to(self, name: str, func: Any, args: Any, kwargs: dict) -> Any:
        tensor = args[0]
        target = {"cpu": CPU, "cuda": CUDA}.get(name)
        if name == "to":
            for value in (*args[1:], *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    target = torch.device("cuda", self.number(value)) if self.has(value) else CPU
                elif isinstance(value, (str, torch.device)):
                    target = torch.device(value)
            args, kwargs = tree_map(as_cpu, (args, kwargs))
            made = func(*args, **kwargs)
        else:
            made = tensor
        was, place = self.has(tensor), self.number(tensor) if target is None else number_of(target)
        goes = place is not None
        if was and not goes:
            self.waits["to the cpu"] += 1
        if goes and not was and not kwargs.get("non_blocking") and all(v is not True for v in args[1:]):
            self.waits["to the gpu"] += 1
        if self.number(tensor) == place:
            return self._sent(made, place) if goes else made
        with torch._C.DisableTorchFunction():  # a copy made here is nowhere yet
            made = made.clone() if made.untyped_storage() is tensor.untyped_storage() else made
        return self._sent(made, place) if goes else made


def as_cpu(value: Any) -> Any:
    """A word for the GPU as one for the CPU; everything else, "meta" too, as it is."""
    return CPU if isinstance(value, (str, torch.device)) and torch.device(value).type == "cuda" else value


def number_of(device: Any) -> int | None:
    """Of the GPU that a word means; None for another device, and for none."""
    device = None if device is None else torch.device(device)
    return (device.index or 0) if device is not None and device.type == "cuda" else None


def nothing(mode: PretendGpu, name: str, answer: Any = None) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        mode.calls[name] += 1
        return answer

    return called


class OnCpu(PLAIN):
    """Every generator is one of the CPU."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return PLAIN.__new__(PLAIN)


@contextmanager
def plugged_in(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> Iterator[PretendGpu]:
    """A machine with one H200 or several, as far as Python can see."""
    mode, plain = PretendGpu(), torch.autocast
    answers = {
        "is_available": True, "device_count": count, "current_device": 0, "_lazy_init": None, "is_initialized": True,
        "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "max_memory_allocated": 2**30,
        "memory_stats": {}, "get_device_name": "NVIDIA H200", "get_device_capability": (9, 0),
        "is_bf16_supported": True, "is_current_stream_capturing": False, "set_device": None,
        "mem_get_info": (140 * 10**9, 141 * 10**9),
        "get_device_properties": SimpleNamespace(L2_cache_size=2**26, total_memory=141 * 10**9),
    }  # fmt: skip
    with monkeypatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, nothing(mode, name, answer))
        patch.setattr(torch.cuda, "device", nullcontext)
        patch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
        patch.setattr(torch.cuda.random, "current_device", lambda: 0)
        patch.setattr(torch, "Generator", OnCpu)
        patch.setattr(torch.accelerator, "current_stream", lambda: SimpleNamespace(is_capturing=lambda: False))
        patch.setattr(torch, "autocast", lambda device_type, *args, **kwargs: plain("cpu", *args, **kwargs))
        with mode:
            yield mode
