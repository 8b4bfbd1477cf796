"""A model whose blocks are filled and emptied one at a time, so that it is never whole in memory. Imports torch.

    skeleton = Skeleton(source.config, source.architecture)
    skeleton.fill_outer(source.weights.float32)            # embeddings, final norm, head
    stream = Stream(skeleton, batches)                     # hidden states before block 0
    for i in range(skeleton.depth):
        skeleton.fill(i, {s.name: source.weights.float32(s.name) for s in source.specs if s.layer == i})
        stream.advance(stream.run())
        skeleton.empty(i)
    logits = stream.finish()

The model is the library's own class. Its parameters are built on the meta device; tables that it computes (rotary
positions, window masks) are real. Names in the file differ from names in memory, so the library is asked under which
names it would save each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.foreign import library_builds
from leansurgeon.architectures.infer.library import plain
from leansurgeon.architectures.tensors import layer_number_pattern
from leansurgeon.checkpoints.blockwise.names import bare_name, file_names, join_parts, split_parts
from leansurgeon.checkpoints.kind import class_name, transformers_class
from leansurgeon.checkpoints.model import buildable, create_timm
from leansurgeon.checkpoints.weights import Arrays
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel
from leansurgeon.progress import quiet_transformers


@dataclass
class Slot:
    """One tensor of the model, with all its names in memory (tied tensors have several) and in files."""

    file: str  # library's name in the file, without the prefix of the base model
    memory: list[str]
    names: list[str]  # other file names, without the prefix
    layer: int | None
    shape: tuple[int, ...]
    buffer: bool
    given: str = ""  # file name that it was filled from
    parts: dict[str, str] = field(default_factory=dict)  # of one saved in parts: part name -> name in the file


class Skeleton:
    """A model of `architecture` with `config`, in fp32 and eval mode; its parameters take no memory until filled.

    Raises `UnsupportedModel` if the blocks cannot be told apart in the built model.
    """

    def __init__(self, config: Config, architecture: Architecture, device: str | torch.device = "cpu") -> None:
        config, architecture = buildable(config, architecture)
        self.config, self.architecture, self.device = config, architecture, torch.device(device)
        self.home = self.device  # where hidden states rest between blocks; the CPU if they are too large
        self.cast: Callable[[], AbstractContextManager] = nullcontext  # autocast context of the blocks' forward passes
        self.shape = architecture.shape(config)
        self.model = build_on_meta(config, architecture)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)
        self.slots = self._slots(file_names(self.model, architecture.library))
        self.blocks = [self._find_block(i) for i in range(self.depth)]
        self.work = 0  # tokens processed by blocks; three times as many when gradients are computed

    @property
    def depth(self) -> int:
        """Number of blocks over all stages."""
        return self.shape.depth

    # -- names -----------------------------------------------------------------------------------

    def bare(self, name: str) -> str:
        """Return a file name without the prefix of the base model, which files of other classes may add or omit."""
        return bare_name(name, self.architecture)

    @cached_property
    def shared(self) -> frozenset[str]:
        """Bare file names of tables in the first block of a stack that all its blocks use (T5's relative positions).

        They are kept outside the blocks, because the other blocks need them when the first one is empty.
        """
        stages = (self.architecture.blocks(s) for s in range(len(self.shape.stages)))
        return frozenset(
            stage.layer.format(i=0) + tensor.name
            for stage in stages
            for tensor in stage.block
            if tensor.role == "head_param" and tensor.only == "first"
        )

    def layer_of(self, bare: str) -> int | None:
        """Return the block that a file tensor belongs to, counted through all stages; None outside the blocks."""
        if bare in self.shared:
            return None
        for s, span in enumerate(self.shape.spans):
            if hit := layer_number_pattern(self.architecture.blocks(s).layer).match(bare):
                return span.start + int(hit[1])
        return None

    def _slots(self, names: Mapping[str, tuple[str, ...]]) -> dict[str, Slot]:
        """Return slots by bare file name; `names` maps names in memory to file names."""
        state, slots = self.model.state_dict(keep_vars=True), {}
        same = {}
        for name, tensor in state.items():
            same.setdefault(id(tensor), []).append(name)
        for group in same.values():
            files = [self.bare(names[n][0]) for n in group if n in names]
            if not files:
                raise UnsupportedModel(f"{type(self.model).__name__} does not save its tensor '{group[0]}'.")
            tensor = state[group[0]]
            # A tensor that is tied into a block counts as outside: it is needed when the block is empty.
            layer = self.layer_of(files[0]) if len(group) == 1 else None
            slots[files[0]] = Slot(
                files[0], group, files[1:], layer, tuple(tensor.shape), not isinstance(tensor, nn.Parameter)
            )
            if len(parts := names.get(group[0], ())) > 1:
                slots[files[0]].parts = dict.fromkeys(map(self.bare, parts), "")
        return slots

    def _in_block(self, layer: int | None) -> list[Slot]:
        """Return the tensors of a block; for None, those outside the blocks."""
        return [slot for slot in self.slots.values() if slot.layer == layer]

    def _find_block(self, layer: int) -> str:
        """Find the path of a block in the built model. It has as many numeric parts as the block's name in the file."""
        paths = [slot.memory[0].split(".") for slot in self._in_block(layer)]
        if not paths:
            raise UnsupportedModel(f"The built {type(self.model).__name__} has no tensors for layer {layer}.")
        pattern = self.architecture.blocks(self.shape.stage_of(layer)).layer.format(i=0)
        deep = sum(part.isdigit() for part in pattern.split("."))
        numbers = [i for i, part in enumerate(paths[0]) if part.isdigit()]
        path = ".".join(paths[0][: numbers[deep - 1] + 1]) if len(numbers) >= deep > 0 else ""
        inside = {n.startswith(path + ".") for slot in self._in_block(layer) for n in slot.memory}
        if inside != {True} or any(
            slot.layer != layer and any(n.startswith(path + ".") for n in slot.memory)
            for slot in self.slots.values()
            if slot.file not in self.shared
        ):
            raise UnsupportedModel(
                f"The tensors of layer {layer} of {type(self.model).__name__} are in no module of their own, "
                "so it cannot be run block by block."
            )
        return path

    # -- filling ---------------------------------------------------------------------------------

    def fill_outer(self, tensors: Callable[[str], np.ndarray]) -> None:
        """Fill everything outside the blocks.

        `tensors` returns an array by its file name and raises KeyError if there is none; the model takes over the
        arrays. A head that the file lacks is filled with zeros. Raises `UnsupportedModel` if any other tensor is
        missing.
        """
        needed = {self.bare(s.name) for s in self.architecture.tensors(self.config) if s.role != "head"}
        for slot in self._in_block(None):
            name, values = slot.file, None
            for bare, prefix in product((slot.file, *slot.names), dict.fromkeys((*self.architecture.prefixes, ""))):
                with suppress(KeyError):
                    name, values = prefix + bare, tensors(prefix + bare)
                    break
            if values is None and not slot.buffer:
                if slot.file in needed:
                    raise UnsupportedModel(f"The weights lack '{slot.file}'.", "Is the file complete?")
                values = np.zeros(slot.shape, np.float32)
            if values is not None:
                self._place(slot, name, values)

    def share_outer(self, other: Skeleton) -> None:
        """Share everything outside the blocks with another skeleton of the same model, without a copy in memory.

        Raises `UnsupportedModel` if `other` lacks a tensor or has it in another size.
        """
        theirs = {name: s for s in other._in_block(None) for name in (s.file, *s.names)}
        for slot in self._in_block(None):
            shared = next((theirs[name] for name in (slot.file, *slot.names) if name in theirs), None)
            if shared is None and slot.buffer:
                continue  # a table that the library computes
            if shared is None or shared.shape != slot.shape:
                have = f"is {list(shared.shape)}" if shared else "is missing"
                raise UnsupportedModel(
                    f"'{slot.file}' {have} in the source, and the result wants {list(slot.shape)}.",
                    "What stands outside the blocks cannot be calibrated.",
                )
            self._set(slot, other._get(shared))
            slot.given = shared.given

    def fill(self, layer: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Fill the weights of one block, given by file names. The arrays are copied.

        Raises `UnsupportedModel` if a tensor is missing, has another size, or belongs elsewhere.
        """
        wanted = {file: slot for slot in self._in_block(layer) for file in slot.parts or (slot.file,)}
        given = {bare: name for name in tensors if (bare := self.bare(name)) not in self.shared}
        missing = [file for file, slot in wanted.items() if file not in given and not slot.buffer]
        strange = [name for bare, name in given.items() if bare not in wanted]
        if missing or strange:
            what = f"lack '{missing[0]}'" if missing else f"hold '{strange[0]}', which is not part of it"
            raise UnsupportedModel(f"The weights for layer {layer} {what}.")
        for bare, name in given.items():
            if bare in wanted[bare].parts:
                wanted[bare].parts[bare] = name
            else:
                self._place(wanted[bare], name, np.array(tensors[name]))
        if merged_slots := [slot for slot in self._in_block(layer) if slot.parts]:
            made = join_parts(self.config, self.architecture, layer, tensors, self.blocks[0])
            for slot in merged_slots:
                self._place(slot, slot.file, made[slot.memory[0].removeprefix(self.blocks[layer] + ".")].numpy())

    def _place(self, slot: Slot, name: str, values: np.ndarray) -> None:
        if values.shape != slot.shape:
            raise UnsupportedModel(
                f"'{name}' is {list(values.shape)} in the weights, and the library builds {list(slot.shape)}."
            )
        slot.given = name
        if slot.buffer:
            self._get(slot).copy_(torch.from_numpy(values))
            return
        learns = slot.layer is not None and not slot.parts  # merged experts are not trained
        self._set(slot, nn.Parameter(torch.from_numpy(np.asarray(values, np.float32)).to(self.device), learns))

    def _get(self, slot: Slot) -> torch.Tensor:
        owner, key = self._find_place(slot.memory[0])
        return (owner._buffers if slot.buffer else owner._parameters)[key]

    def _set(self, slot: Slot, tensor: torch.Tensor) -> None:
        for memory in slot.memory:
            owner, key = self._find_place(memory)
            (owner._buffers if slot.buffer else owner._parameters)[key] = tensor

    def _find_place(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self.model.get_submodule(path), key

    def empty(self, layer: int) -> None:
        """Free the weights of a block."""
        for slot in self._in_block(layer):
            if not slot.buffer:
                self._set(slot, nn.Parameter(torch.empty(slot.shape, device="meta")))

    def fill_zeros(self, layer: int) -> None:
        """Fill a block with zeros, for callers that need its control flow but not its values."""
        for slot in self._in_block(layer):
            if not slot.buffer:
                self._place(slot, slot.given, np.zeros(slot.shape, np.float32))

    def is_filled(self, layer: int) -> bool:
        """Return whether all parameters of a block have values."""
        return not any(p.is_meta for p in self.block(layer).parameters())

    def read(self, layer: int) -> Arrays:
        """Return the tensors of a filled block by the file names they were filled from: the inverse of `fill`.

        Integer tensors are omitted, because nothing here changes them.
        """
        if not self.is_filled(layer):
            raise LeanSurgeonError(f"Layer {layer} of the skeleton is not filled.")
        tensors = {}
        for slot in self._in_block(layer):
            tensor = self._get(slot)
            if slot.parts:
                for file, part in split_parts(self.model, {slot.memory[0]: tensor.detach()}).items():
                    tensors[slot.parts[self.bare(file)]] = part.float().cpu().numpy().copy()
                continue
            if tensor.is_floating_point() and (slot.given or not slot.buffer):
                tensors[slot.given or slot.file] = tensor.detach().float().cpu().numpy().copy()
        return tensors

    # -- modules ---------------------------------------------------------------------------------

    def block(self, layer: int) -> nn.Module:
        """Return the module of a block, counted through all stages."""
        return self.model.get_submodule(self.blocks[layer])

    def projections(self, layer: int) -> list[nn.Module]:
        """Return the output projections of a block's attentions; their input is `(..., heads * head_dim)`."""
        return self.of_role(layer, "o")

    def mlp_down(self, layer: int) -> nn.Module:
        """Return the down projection of a block's MLP, the last one of several (DaViT); its input is `(..., mlp_dim)`.

        Raises `UnsupportedModel` if the block has experts or no MLP.
        """
        downs = self.of_role(layer, "down")
        if self.experts(layer) is not None:
            raise UnsupportedModel(
                f"A block of {self.architecture.name} has experts, which are kept as they are.",
                "Layers can be dropped and heads added on sample data.",
            )
        if not downs:
            raise UnsupportedModel(f"A block of {self.architecture.name} has no MLP.")
        return downs[-1]

    def of_role(self, layer: int, role: str) -> list[nn.Module]:
        """Return the modules that hold a block's matrices of a role; empty if it has no such role."""
        specs = [s for s in self.architecture.tensors(self.config) if s.layer == layer and s.role == role]
        files = [self.bare(s.name) for s in specs if len(s.shape) > 1]
        slots = [self.slots[file] for file in files if file in self.slots]  # parts of experts have no slot
        return [self._find_place(slot.memory[0])[0] for slot in slots if not slot.parts]

    def experts(self, layer: int) -> nn.Module | None:
        """Return a block's mixture of experts with its router if the file stores the experts separately, else None."""
        owners = {slot.memory[0].rsplit(".", 2)[0] for slot in self._in_block(layer) if slot.parts}
        return self.model.get_submodule(owners.pop()) if len(owners) == 1 else None


TABLE = 1 << 18  # size of a large position table; most matrices of a large model are larger


# Initialisers, skipped for tensors on meta: there is nothing to fill, and clamping meta tensors takes torch seconds.
FILLS = {"clamp_", "erfinv_", "fill_", "mul_", "add_", "normal_", "uniform_", "zero_", "zeros_", "ones_", "constant_"}


class Unallocated(TorchFunctionMode):
    """Make `torch.empty`, which layers create their parameters with, return meta tensors above `kept` numbers.

    Initialisers of those tensors are skipped. Only this thread is affected, whereas Accelerate's `init_empty_weights`
    patches nn.Module for the whole process. It also frees parameters only after they are made, which leaves the heap
    fragmented by holes that add up to most of the model.
    """

    def __init__(self, kept: float) -> None:
        self.kept = kept

    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and getattr(func, "__name__", "") in FILLS and getattr(args[0], "is_meta", False):
            return args[0]
        if func is torch.empty and kwargs.get("device") is None:
            made = func(*args, **kwargs | {"device": "meta"})
            return made if made.numel() > self.kept else func(*args, **kwargs)
        return func(*args, **kwargs)


def hollow(make: Callable[[], nn.Module]) -> nn.Module:
    """Build the model of `make` with its parameters on the meta device and its buffers in memory.

    A table that starts as `torch.empty`, or is computed from parameters (Swin's), needs memory, so `kept` is raised
    until every buffer has it.
    """
    for kept in (-1, TABLE, math.inf):
        with Unallocated(kept):
            model = make()
        if not any(buffer.is_meta for buffer in model.buffers()):
            break
    moved = {}  # keeps tied parameters tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                new = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), new)
    return model


def build_on_meta(config: Config, architecture: Architecture) -> nn.Module:
    """Build the library's model with its parameters on the meta device and its computed tables in memory."""
    if architecture.library == "timm":
        with library_builds(config["architecture"]):
            return hollow(lambda: create_timm(config["architecture"], **architecture.flat(config))).eval()
    cls = transformers_class(architecture, class_name(config))
    with library_builds(cls.__name__), quiet_transformers():
        model = hollow(lambda: cls(cls.config_class.from_dict(plain(config) | {"dtype": "float32"})))
    for module in model.modules():  # encoder and decoder stacks have configs of their own
        if hasattr(config_of := getattr(module, "config", None), "use_cache"):
            config_of.use_cache = False
    return model.float().eval()
