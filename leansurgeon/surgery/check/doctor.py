"""Check a declaration against a real model: what it says of every tensor must be what the library does with it.

Shapes cannot tell a query from a value, nor q, k, v stacked from q, k, v interleaved. So the roles are put to the test:
without values the output projections receive nothing; without queries the keys do not matter; without the second half
of the MLP the first does not matter. Each test writes an altered copy of the weights and lets the library load it.
Imports torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from leansurgeon.architectures.base import Architecture, TensorSpec
from leansurgeon.architectures.match import match
from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.checkpoints.reload_check import example
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.checkpoints.weights import Out, write
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import carry_out

TOLERANCE = 1e-5  # of the spread of the output


@dataclass(frozen=True)
class Check:
    """One statement about the declaration; `ok` None where it could not be examined."""

    name: str
    ok: bool | None
    says: str

    def as_dict(self) -> dict:
        return asdict(self)


def examine(source: Source, architecture: Architecture | None = None) -> list[Check]:
    """All checks of a source's family (or of `architecture` in its place), in order.

    A source without weights is initialised first; one that its library builds by name only (VOLO) is examined in the
    form that surgery gives it. Needs room for copies of the weights in the temporary folder and
    loads the model several times.
    """
    with ExitStack() as keep:
        work = Path(keep.enter_context(tempfile.TemporaryDirectory(prefix="leansurgeon-")))
        if source.weights is None or not source.architecture.rebuilds:
            carry_out(plan(source, Wanted(), seed=0), source, work / "source", check=False)
            source = open_source(str(work / "source"))
        arch = architecture or source.architecture
        try:
            specs = match(arch, source.config, source.weights.shapes)
        except LeanSurgeonError as error:
            return [Check("roles", False, error.message)]
        patient = Patient(replace(source, architecture=arch, specs=specs), work)
        return [patient.check(name, test) for name, test in patient.tests()]


class Wrong(LeanSurgeonError):
    """A statement of the declaration that the model does not bear out."""


class Unclear(LeanSurgeonError):
    """A statement that this kind of model does not let us test."""


class Patient:
    """One model with its declaration."""

    def __init__(self, source: Source, work: Path) -> None:
        self.source, self.arch, self.weights, self.work = source, source.architecture, source.weights, work

    def tests(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("roles", self.roles),
            ("output projections", self.projections),
            ("masked heads", self.masked_heads),
            ("values", self.values),
            ("queries and keys", self.queries_and_keys),
            ("MLP", self.mlp),
            ("rebuild", self.rebuild),
        ]

    def check(self, name: str, test: Callable[[], str]) -> Check:
        try:
            return Check(name, True, test())
        except Unclear as unclear:
            return Check(name, None, unclear.message)
        except Exception as error:  # a wrong declaration may break the library in any way
            first = (getattr(error, "message", None) or str(error) or type(error).__name__).splitlines()[0]
            return Check(name, False, first)

    # -- the model ---------------------------------------------------------------------------------

    @cached_property
    def loaded(self) -> Loaded:
        return self.load(self.source.folder)

    def load(self, folder: Path) -> Loaded:
        loaded = load(folder)
        loaded.architecture = self.arch
        loaded.model.eval()
        return loaded

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        """One small random input of the model's kind."""
        generator = torch.Generator().manual_seed(0)
        if self.arch.library == "timm":
            args = self.source.config["model_args"]
            size, channels = args.get("img_size", 224), args.get("in_chans", 3)
            sides = (size, size) if isinstance(size, int) else tuple(size)
            return {"x": torch.randn(1, channels, *sides, generator=generator)}
        inputs = example(self.loaded.model, torch)
        return {k: torch.randn(v.shape, generator=generator) if v.is_floating_point() else v for k, v in inputs.items()}

    def answer(self, loaded: Loaded) -> torch.Tensor:
        """Logits, or the pooled output of a model without a head."""
        with torch.no_grad():
            if self.arch.library == "timm":
                return loaded.model(*self.inputs.values())
            out = loaded.model(**self.inputs)
        found = (out.get(key) for key in ("logits", "pooler_output"))
        return next((value for value in found if value is not None), out[0])

    @contextmanager
    def altered(self, change: Callable[[TensorSpec, np.ndarray], np.ndarray | None]) -> Iterator[Loaded]:
        """The library's model of the same files with some tensors of the blocks changed."""
        outs = []
        for spec in self.source.specs:
            entry = self.weights.entries[spec.name]
            new = change(spec, self.weights.raw(spec.name)) if spec.layer is not None else None
            same = new is None
            outs.append(
                Out(spec.name, entry.dtype, entry.shape, entry if same else None, None if same else lambda new=new: new)
            )
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            write(Path(folder), outs)
            (Path(folder) / "config.json").write_text(json.dumps(self.source.config))
            yield self.load(Path(folder))

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

    def with_part(self, spec: TensorSpec, raw: np.ndarray, role: str, value: Callable) -> np.ndarray | None:
        """A copy of a tensor whose queries, keys or values are `value(old)`; None where it has none."""
        mask = self.part(spec, role)
        if mask is None:
            return None
        at = next(i for i, a in enumerate(spec.axes) if a != "width")
        new = np.moveaxis(raw.copy(), at, 0)
        new[mask] = value(new[mask])
        return np.ascontiguousarray(np.moveaxis(new, 0, at))

    # -- the tests -----------------------------------------------------------------------------------

    def roles(self) -> str:
        names = [s.name for s in self.arch.tensors(self.source.config, prefix=self.prefix)]
        twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise Wrong(f"'{twice[0]}' is declared twice.")
        absent = [
            s.name
            for s in self.arch.tensors(self.source.config, prefix=self.prefix)
            if s.name not in self.weights.entries and s.role not in ("head", "tied", "buffer")
        ]
        if absent:
            raise Wrong(f"{len(absent)} declared tensors are not in the model, the first is '{absent[0]}'.")
        counted = self.source.parameters.total
        built = sum(p.numel() for p in self.loaded.model.parameters())
        if counted != built:
            raise Wrong(f"The tensors with a role hold {counted:,} parameters, and the library builds {built:,}.")
        inside = sum(s.layer is not None for s in self.source.specs)
        others = sorted(set(self.weights.entries) - set(names))
        rest = f"; not declared, and copied as they are: {', '.join(others)}" if others else ""
        return f"{inside} tensors in blocks and {len(self.source.specs) - inside} outside, {counted:,} parameters{rest}"

    @property
    def prefix(self) -> str:
        """What this file's names begin with."""
        name = next(s.name for s in self.source.specs if s.layer == 0)
        return next(p for p in self.arch.prefixes if name.startswith(p + self.arch.blocks(0).layer.format(i=0)))

    def modules(self) -> list[torch.nn.Module]:
        found = dict(self.loaded.model.named_modules())
        return [found[name] for name in self.loaded.projections]

    def projections(self) -> str:
        modules = self.modules()
        declared = [s for s in self.source.specs if s.layer is not None and s.role == "o" and len(s.shape) > 1]
        left = [torch.from_numpy(self.weights.float32(s.name).copy()) for s in declared]
        for name, module in zip(self.loaded.projections, modules, strict=True):
            if not isinstance(getattr(module, "weight", None), torch.Tensor):
                raise Wrong(f"The module '{name}' is no linear layer.")
            weight = module.weight.detach().float()
            hit = next((i for i, t in enumerate(left) if t.shape == weight.shape and torch.equal(t, weight)), None)
            if hit is None:
                raise Wrong(f"The module '{name}' does not hold a tensor whose role is 'o'.")
            left.pop(hit)
        if left:
            raise Wrong(f"{len(left)} tensors with the role 'o' belong to no output projection that is declared.")
        return f"{len(modules)} modules, and each holds its tensor"

    def masked_heads(self) -> str:
        worst = 0.0

        def compare(module: torch.nn.Module, _: object, out: torch.Tensor) -> None:
            nonlocal worst
            bias = module.bias if module.bias is not None else torch.zeros(())
            worst = max(worst, float((out - bias).abs().max()))

        modules = self.modules()
        hooks = [m.register_forward_pre_hook(lambda _, args: (torch.zeros_like(args[0]), *args[1:])) for m in modules]
        hooks += [m.register_forward_hook(compare) for m in modules]
        self.answer(self.loaded)
        for hook in hooks:
            hook.remove()
        if worst > TOLERANCE:
            raise Wrong(f"With every head masked an output projection differs from its bias by {worst:.2g}.")
        return "with every head masked, each output projection gives its bias"

    def values(self) -> str:
        def without(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
            return self.with_part(spec, raw, "v", np.zeros_like)

        largest: list[float] = []
        with self.altered(without) as loaded:
            found = dict(loaded.model.named_modules())
            for name in loaded.projections:
                found[name].register_forward_pre_hook(lambda _, args: largest.append(float(args[0].abs().max())))
            self.answer(loaded)
        if not largest or max(largest) > 0:
            raise Wrong(f"Without values an output projection still receives up to {max(largest, default=0):.2g}.")
        return "without them the output projections receive nothing"

    def queries_and_keys(self) -> str:
        for gone, other in (("q", "k"), ("k", "q")):
            self.same_answer(gone, other)
        return "without the one, the other does not matter"

    def same_answer(self, gone: str, other: str) -> None:
        def without(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
            return self.with_part(spec, raw, gone, np.zeros_like)

        def and_other(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
            return self.with_part(spec, raw, other, lambda old: np.roll(old, 1))

        self.compare(without, both(without, and_other), f"Without {NAMES[gone]}, {NAMES[other]} still matter")

    def mlp(self) -> str:
        def without(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
            return np.zeros_like(raw) if spec.role == "down" else None

        def and_other(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
            return np.roll(raw, 1) if spec.role in ("up", "gate") else None

        self.compare(
            without, both(without, and_other), "Without its second half, the first half of the MLP still matters"
        )
        return "without its second half, the first does not matter"

    def compare(self, one: Callable, other: Callable, wrong: str) -> None:
        with self.altered(one) as loaded:
            first = self.answer(loaded)
        with self.altered(other) as loaded:
            second = self.answer(loaded)
        distance = float((first - second).abs().max() / first.std().clamp(min=1e-12))
        if not distance <= TOLERANCE:
            raise Wrong(f"{wrong}: the output moves by {distance:.2g} of its spread.")

    def rebuild(self) -> str:
        steps = plan(self.source, Wanted(), seed=0)
        carry_out(steps, self.source, self.work / "rebuilt", check=False)
        rebuilt = load(self.work / "rebuilt")
        rebuilt.model.eval()
        distance = float((self.answer(self.loaded) - self.answer(rebuilt)).abs().max())
        if not distance <= TOLERANCE:
            raise Wrong(f"The same shape, written anew, gives another output: it differs by {distance:.2g}.")
        return f"the same shape, written anew, gives the library's own output (largest difference {distance:.2g})"


NAMES = {"q": "queries", "k": "keys"}


def both(first: Callable, second: Callable) -> Callable:
    """The second change after the first; None where neither does anything."""

    def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        one = first(spec, raw)
        two = second(spec, raw if one is None else one)
        return one if two is None else two

    return change
