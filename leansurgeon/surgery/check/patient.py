"""One model with its declaration, as the doctor examines it: what it answers, and what altered copies of it answer.

Every test writes an altered copy of the weights and lets the library load it. Imports torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from leansurgeon.architectures.base import Architecture, TensorSpec
from leansurgeon.architectures.infer import inputs as undeclared
from leansurgeon.architectures.match import match
from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.checkpoints.proof.prove import what_it_takes
from leansurgeon.checkpoints.proof.reload_check import example
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.checkpoints.weights import Out, write
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, UsageError
from leansurgeon.measure.data.batches import Batch
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import carry_out, decide

# The new bytes of a tensor, or None where it stays as it is.
Change = Callable[[TensorSpec, np.ndarray], np.ndarray | None]
TOLERANCE = 1e-5  # of the spread of the output, where the same sums are made in the same order
EXACT = 1e-4  # where they are made in another order, as the proof of a result has it
LARGE = 50_000_000  # parameters from which on memory counts


class Wrong(LeanSurgeonError):
    """A statement of the declaration that the model does not bear out."""


class Unclear(LeanSurgeonError):
    """A statement that this kind of model does not let us test."""


class Patient:
    """A source with weights; `work` is a folder for copies. A small model computes in fp64, so that sums in another
    order give the same.
    """

    def __init__(self, source: Source, work: Path) -> None:
        self.source, self.arch, self.weights, self.work = source, source.architecture, source.weights, work

    def beside(self, source: Source) -> Patient:
        """Another model that is asked the same."""
        other = Patient(source, self.work)
        other.inputs = self.inputs
        return other

    # -- what it answers -----------------------------------------------------------------------------

    @cached_property
    def loaded(self) -> Loaded:
        """The library's model, loaded once."""
        return self.load(self.source.folder)

    def load(self, folder: Path, architecture: Architecture | None = None) -> Loaded:
        """The library's model of a folder, in eval mode."""
        loaded = load(folder)
        loaded.architecture = architecture or self.arch
        loaded.model.eval()
        return loaded if self.large else replace(loaded, model=loaded.model.double())

    @property
    def large(self) -> bool:
        """Whether it is too large for fp64."""
        return self.source.parameters.total >= LARGE

    @cached_property
    def inputs(self) -> Batch:
        """One small random input of the model's kind."""
        generator = torch.Generator().manual_seed(0)
        if self.arch.library == "timm":
            args = self.source.config["model_args"]
            size, channels = args.get("img_size", 224), args.get("in_chans", 3)
            sides = (size, size) if isinstance(size, int) else tuple(size)
            inputs = {"x": torch.zeros(1, channels, *sides)}
        elif self.arch.evidence:  # nobody declared what it takes
            inputs = undeclared.example(self.loaded.model, self.source.config, vocab=self.vocabulary)
        else:
            inputs = example(self.loaded.model, what_it_takes(self.arch, self.source.config))
        kind = torch.float32 if self.large else torch.float64
        return {
            key: torch.randn(value.shape, generator=generator).to(kind) if value.is_floating_point() else value
            for key, value in inputs.items()
        }

    @property
    def vocabulary(self) -> int:
        """Token ids that an input may have; only models of text ask."""
        size = self.source.config.get("vocab_size")
        return size if isinstance(size, int) else 0

    def answer(self, loaded: Loaded) -> torch.Tensor:
        """Logits, or the pooled output of a model without a head."""
        with torch.no_grad():
            if self.arch.library == "timm":
                return loaded.model(*self.inputs.values())
            out = loaded.model(**self.inputs)
        outputs = (out.get(key) for key in ("logits", "pooler_output"))
        return next((value for value in outputs if value is not None), out[0])

    @cached_property
    def own(self) -> torch.Tensor:
        """The answer of the model as it is."""
        return self.answer(self.loaded)

    def modules(self) -> list[torch.nn.Module]:
        """The output projections in the built model. Raises `Unclear` where none is declared."""
        if not self.loaded.projections:
            raise Unclear("No output projection is declared.")
        by_name = dict(self.loaded.model.named_modules())
        return [by_name[name] for name in self.loaded.projections]

    @property
    def prefix(self) -> str:
        """What this file's names begin with."""
        name = next(s.name for s in self.source.specs if s.layer == 0)
        return next(p for p in self.arch.prefixes if name.startswith(p + self.arch.blocks(0).layer.format(i=0)))

    # -- altered copies ------------------------------------------------------------------------------

    def write(self, folder: Path, change: Change) -> Path:
        """A folder of the same model with some tensors changed."""
        outs = []
        for spec in self.source.specs:
            entry = self.weights.entries[spec.name]
            out = Out(spec.name, entry.dtype, entry.shape, entry)
            new = change(spec, self.weights.raw(spec.name))
            outs.append(out if new is None else replace(out, entry=None, make=lambda new=new: new))
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, outs)
        (folder / "config.json").write_text(json.dumps(self.source.config))
        return folder

    def copy(self, folder: Path, change: Change) -> Patient:
        """The same model after a change, in `folder`."""
        return self.beside(opened(self.write(folder, change), self.arch))

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A new folder for a copy, for as long as the block lasts."""
        with tempfile.TemporaryDirectory(dir=self.work) as path:
            yield Path(path)

    def altered(self, *changes: Change) -> torch.Tensor:
        """What the library's model answers after the changes, one after the other."""
        with self.folder() as folder:
            return self.answer(self.load(self.write(folder, both(*changes))))

    def cut(self, folder: Path, choices: list[Wanted], method: Method | None = None) -> tuple[Source, torch.Tensor]:
        """The first of `choices` that can be planned, carried out into `folder`: the result and its answer. Raises
        `Unclear` where none can.
        """
        decided = None
        for wanted in choices:
            try:
                decided = decide(plan(self.source, wanted, 0, method))
                break
            except (UsageError, UnsupportedModel) as error:
                reason = error.message
        if decided is None:
            raise Unclear(reason if choices else "The model has too few of them.")
        carry_out(decided, folder, check=False)
        arch = decided.plan.architecture
        return opened(folder, arch), self.answer(self.load(folder, arch))

    # -- parts of tensors ----------------------------------------------------------------------------

    def part(self, spec: TensorSpec, role: str) -> np.ndarray | None:
        """Where on its attention axis a tensor holds queries, keys or values: a mask along the axis, or None."""
        axis = next((a for a in spec.axes if a != "width"), None)
        size = spec.shape[spec.axes.index(axis)] if axis else 0
        if spec.role == role:
            return np.ones(size, bool)
        if spec.role not in ("qkv", "vkq", "qk") or role not in spec.role:
            return None
        if axis == "heads*qkv":
            head_dim = self.source.shape.stages[spec.stage].head_dim
            return np.arange(size) // head_dim % 3 == spec.role.index(role)
        parts = axis.split("+")
        if len(parts) != len(spec.role):
            raise Unclear(f"The axis '{axis}' of '{spec.name}' holds {spec.role} in a way that has no test.")
        dims = self.arch.dims(self.source.config, self.source.shape, spec.stage)
        return np.repeat([letter == role for letter in spec.role], [dims[p] for p in parts])

    def with_part(
        self, spec: TensorSpec, raw: np.ndarray, role: str, value: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray | None:
        """A copy of a tensor whose queries, keys or values are `value(old)`, the attention axis first; None where it
        has none.
        """
        mask = self.part(spec, role)
        if mask is None:
            return None
        return with_entries(raw, next(i for i, a in enumerate(spec.axes) if a != "width"), mask, value)


def with_entries(raw: np.ndarray, at: int, mask: np.ndarray, value: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """A copy with `value(old)` in place of the entries that a mask names along axis `at`, that axis first."""
    new = np.moveaxis(raw.copy(), at, 0)
    new[mask] = value(new[mask])
    return np.ascontiguousarray(np.moveaxis(new, 0, at))


def opened(folder: Path, architecture: Architecture) -> Source:
    """A folder as a source of `architecture`, whatever family its config is declared to be of."""
    source = open_source(str(folder))
    return replace(source, architecture=architecture, specs=match(architecture, source.config, source.weights.shapes))


def distance(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the spread of `expected`; infinite where there is NaN."""
    share = float((output - expected).abs().max() / expected.std().clamp(min=1e-12))
    return share if share == share else float("inf")


def both(*changes: Change) -> Change:
    """One change after the other; None where none does anything."""

    def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """The tensor after each of the changes in turn; None where none of them touches it."""
        changed = None
        for one in changes:
            new = one(spec, raw if changed is None else changed)
            changed = changed if new is None else new
        return changed

    return change


def zeros_in(role: str) -> Change:
    """Every tensor of a role is zero."""
    return lambda spec, raw: np.zeros_like(raw) if spec.role == role else None
