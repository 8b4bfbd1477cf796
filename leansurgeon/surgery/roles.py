"""The model that the doctor tests (its outputs, and those of altered copies), and the tests of roles: what the library
does with every tensor must agree with the declared role.

Shapes cannot tell a query from a value, nor q, k, v stacked from q, k, v interleaved. So: without values, the output
projections must receive zeros; without queries, keys must not matter; without the second half of the MLP, the first
must not matter. Each test returns what it found, or raises `RoleFault` or `Untestable`. Imports torch.
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
from torch import Tensor, nn

from leansurgeon.architectures.base import Architecture, TensorSpec
from leansurgeon.architectures.infer import inputs as undeclared
from leansurgeon.architectures.match import match
from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.checkpoints.pieces import ATTENTION_ROLES, by_head, outer_axis
from leansurgeon.checkpoints.proof.prove import what_it_takes
from leansurgeon.checkpoints.proof.reload_check import example
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.checkpoints.weights import TensorOut, write
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, UsageError
from leansurgeon.hooks import Hooks
from leansurgeon.measure.data.batches import Batch
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import carry_out, decide

# Returns the new bytes of a tensor, or None to leave it unchanged.
Change = Callable[[TensorSpec, np.ndarray], np.ndarray | None]
TOLERANCE = 1e-5  # of the spread of the output, for the same sums in the same order
EXACT = 1e-4  # for sums in another order, as in the proof of a result
NAMES = {"q": "queries", "k": "keys"}
LARGE = 50_000_000  # number of parameters from which memory matters


class RoleFault(LeanSurgeonError):
    """Raised when the model contradicts a statement of the declaration."""


class Untestable(LeanSurgeonError):
    """Raised when a statement cannot be tested on this model."""


class ModelUnderTest:
    """A source with weights, under test; `work` is a folder for copies.

    Small models run in fp64, so that sums in another order agree.
    """

    def __init__(self, source: Source, work: Path) -> None:
        self.source, self.arch, self.weights, self.work = source, source.architecture, source.weights, work

    def beside(self, source: Source) -> ModelUnderTest:
        """Return another model that gets the same inputs."""
        other = ModelUnderTest(source, self.work)
        other.inputs = self.inputs
        return other

    # -- outputs -------------------------------------------------------------------------------------

    @cached_property
    def loaded(self) -> Loaded:
        """The library's model, loaded once."""
        return self.load(self.source.folder)

    def load(self, folder: Path, architecture: Architecture | None = None) -> Loaded:
        """Return the library's model of a folder, in eval mode."""
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
        elif self.arch.evidence:  # inferred: the inputs are not declared
            size = self.source.config.get("vocab_size")  # only text models use it
            vocab = size if isinstance(size, int) else 0
            inputs = undeclared.example(self.loaded.model, self.source.config, vocab=vocab)
        else:
            inputs = example(self.loaded.model, what_it_takes(self.arch, self.source.config))
        kind = torch.float32 if self.large else torch.float64
        return {
            key: torch.randn(value.shape, generator=generator).to(kind) if value.is_floating_point() else value
            for key, value in inputs.items()
        }

    def answer(self, loaded: Loaded) -> Tensor:
        """Return the logits, or the pooled output of a model without a head."""
        with torch.no_grad():
            if self.arch.library == "timm":
                return loaded.model(*self.inputs.values())
            out = loaded.model(**self.inputs)
        outputs = (out.get(key) for key in ("logits", "pooler_output"))
        return next((value for value in outputs if value is not None), out[0])

    @cached_property
    def own(self) -> Tensor:
        """Output of the unchanged model."""
        return self.answer(self.loaded)

    def modules(self) -> list[nn.Module]:
        """Return the output projections in the built model. Raises `Untestable` if none is declared."""
        if not self.loaded.projections:
            raise Untestable("No output projection is declared.")
        by_name = dict(self.loaded.model.named_modules())
        return [by_name[name] for name in self.loaded.projections]

    # -- altered copies ------------------------------------------------------------------------------

    def write(self, folder: Path, change: Change) -> Path:
        """Write the same model with some tensors changed; return the folder."""
        outs = []
        for spec in self.source.specs:
            entry = self.weights.entries[spec.name]
            out = TensorOut(spec.name, entry.dtype, entry.shape, entry)
            new = change(spec, self.weights.raw(spec.name))
            outs.append(out if new is None else replace(out, entry=None, make=lambda new=new: new))
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, outs)
        (folder / "config.json").write_text(json.dumps(self.source.config))
        return folder

    def copy(self, folder: Path, change: Change) -> ModelUnderTest:
        """Return the same model after a change, in `folder`."""
        return self.beside(open_as(self.write(folder, change), self.arch))

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Create a new folder for a copy, deleted at the end of the context."""
        with tempfile.TemporaryDirectory(dir=self.work) as path:
            yield Path(path)

    def answer_after(self, *changes: Change) -> Tensor:
        """Return the model's output after the changes, applied in order."""

        def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
            """Apply each change in turn; None if none applies, so that the tensor stays on disk."""
            changed = None
            for one in changes:
                new = one(spec, raw if changed is None else changed)
                changed = changed if new is None else new
            return changed

        with self.folder() as folder:
            return self.answer(self.load(self.write(folder, change)))

    def cut_first_possible(
        self, folder: Path, choices: list[RequestedShape], method: Method | None = None
    ) -> tuple[Source, Tensor]:
        """Carry out the first of `choices` that can be planned in `folder`, and return the result and its output.

        Raises `Untestable` if none can be planned.
        """
        reason = "The model has too few of them."
        for wanted in choices:
            try:
                decided = decide(plan(self.source, wanted, 0, method))
                break
            except (UsageError, UnsupportedModel) as error:
                reason = error.message
        else:
            raise Untestable(reason)
        carry_out(decided, folder, check=False)
        arch = decided.plan.architecture
        return open_as(folder, arch), self.answer(self.load(folder, arch))

    def change_part(self, role: str, value: Callable[[np.ndarray], np.ndarray]) -> Change:
        """Return a change of queries, keys or values (heads, head_dim, ...) to `value(old)` wherever they are held."""

        def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
            """Return the tensor with its part changed; None if it does not hold that part."""
            if spec.role not in (*ATTENTION_ROLES, "vkq") or role not in spec.role:
                return None
            at, stage = outer_axis(spec), self.source.shape.stages[spec.stage]
            try:
                places = by_head(replace(spec, axes=(spec.axes[at],)), np.arange(raw.shape[at]), stage)
            except KeyError:  # the axis has no heads: all of it is the one part that its role names
                places = [np.arange(raw.shape[at])[None]]
            if len(places) != len(spec.role):
                raise Untestable(
                    f"The axis '{spec.axes[at]}' of '{spec.name}' holds {spec.role} in a way that has no test."
                )
            new, here = np.moveaxis(raw.copy(), at, 0), places[spec.role.index(role)]
            new[here] = value(new[here])
            return np.ascontiguousarray(np.moveaxis(new, 0, at))

        return change


def open_as(folder: Path, architecture: Architecture) -> Source:
    """Open a folder as a source of `architecture`, whatever family its config declares."""
    source = open_source(str(folder))
    return replace(source, architecture=architecture, specs=match(architecture, source.config, source.weights.shapes))


def distance(output: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the spread of `expected`; infinite if there is NaN."""
    share = float((output - expected).abs().max() / expected.std().clamp(min=1e-12))
    return share if share == share else float("inf")


def zeros_in(role: str) -> Change:
    """Return a change that zeroes every tensor of a role."""
    return lambda spec, raw: np.zeros_like(raw) if spec.role == role else None


# -- the tests ------------------------------------------------------------------------------------


def roles(model: ModelUnderTest) -> str:
    """Check that every tensor has one role, and that together they hold all parameters that the library builds."""
    source, weights = model.source, model.weights
    first, layer = next(s.name for s in source.specs if s.layer == 0), model.arch.blocks(0).layer.format(i=0)
    prefix = next(p for p in model.arch.prefixes if first.startswith(p + layer))  # prefix of the names in this file
    declared = list(model.arch.tensors(source.config, prefix=prefix))
    names = [s.name for s in declared]
    twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise RoleFault(f"'{twice[0]}' is declared twice.")
    absent = [s.name for s in declared if s.name not in weights.entries and s.role not in ("head", "tied", "buffer")]
    if absent:
        raise RoleFault(f"{len(absent)} declared tensors are not in the model, the first is '{absent[0]}'.")
    counted = source.parameters.total
    built = sum(p.numel() for p in model.loaded.model.parameters())
    if counted != built:
        raise RoleFault(f"The tensors with a role hold {counted:,} parameters, and the library builds {built:,}.")
    inside = sum(s.layer is not None for s in source.specs)
    others = sorted(set(weights.entries) - set(names))
    rest = f"; not declared, and copied as they are: {', '.join(others)}" if others else ""
    return f"{inside} tensors in blocks and {len(source.specs) - inside} outside, {counted:,} parameters{rest}"


def projections(model: ModelUnderTest) -> str:
    """Check that the declared output projections hold the tensors whose role is `o`."""
    modules = model.modules()
    declared = [s for s in model.source.specs if s.layer is not None and s.role == "o" and len(s.shape) > 1]
    left = [torch.from_numpy(model.weights.float32(s.name).copy()) for s in declared]
    for name, module in zip(model.loaded.projections, modules, strict=True):
        if not isinstance(getattr(module, "weight", None), Tensor):
            raise RoleFault(f"The module '{name}' is no linear layer.")
        weight = module.weight.detach().float()
        hit = next((i for i, t in enumerate(left) if t.shape == weight.shape and torch.equal(t, weight)), None)
        if hit is None:
            raise RoleFault(f"The module '{name}' does not hold a tensor whose role is 'o'.")
        left.pop(hit)
    if left:
        raise RoleFault(f"{len(left)} tensors with the role 'o' belong to no output projection that is declared.")
    return f"{len(modules)} modules, and each holds its tensor"


def check_masked_heads(model: ModelUnderTest) -> str:
    """Check that an output projection outputs its bias if its input is zero."""
    worst = 0.0

    def compare(module: nn.Module, _: tuple[Tensor, ...], out: Tensor) -> None:
        """Forward hook: record how far the output is from the bias alone."""
        nonlocal worst
        bias = module.bias if module.bias is not None else torch.zeros(())
        worst = max(worst, float((out - bias).abs().max()))

    modules = model.modules()
    with Hooks() as hooks:
        for module in modules:
            hooks.before(module, lambda _, args: (torch.zeros_like(args[0]), *args[1:]))
            hooks.after(module, compare)
        model.answer(model.loaded)
    if worst > TOLERANCE:
        raise RoleFault(f"With every head masked an output projection differs from its bias by {worst:.2g}.")
    return "with every head masked, each output projection gives its bias"


def values(model: ModelUnderTest) -> str:
    """Check that without values the output projections receive zeros."""
    model.modules()
    largest = []
    with model.folder() as folder:
        loaded = model.load(model.write(folder, model.change_part("v", np.zeros_like)))
        with Hooks() as hooks:
            for name in loaded.projections:
                module = loaded.model.get_submodule(name)
                hooks.before(module, lambda _, args: largest.append(float(args[0].abs().max())))
            model.answer(loaded)
    if not largest or max(largest) > 0:
        raise RoleFault(f"Without values an output projection still receives up to {max(largest, default=0):.2g}.")
    return "without them the output projections receive nothing"


def queries_and_keys(model: ModelUnderTest) -> str:
    """Check that without queries the keys do not matter, and without keys the queries do not."""
    for gone, other in (("q", "k"), ("k", "q")):
        change = model.change_part(gone, np.zeros_like)
        moved = model.change_part(other, lambda old: np.roll(old, 1))
        same(model, change, moved, f"Without {NAMES[gone]}, {NAMES[other]} still matter")
    return "without the one, the other does not matter"


def mlp(model: ModelUnderTest) -> str:
    """Check that without the second half of the MLP the first does not matter."""

    def roll_entries(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """Rotate the entries of the MLP's input matrices by one; None for all other tensors."""
        return np.roll(raw, 1) if spec.role in ("up", "gate") else None

    same(model, zeros_in("down"), roll_entries, "Without its second half, the first half of the MLP still matters")
    return "without its second half, the first does not matter"


def rebuild(model: ModelUnderTest) -> str:
    """Check that writing the model at the same shape keeps the library's own output."""
    with model.folder() as folder:
        _, again = model.cut_first_possible(folder / "rebuilt", [RequestedShape()])
    gap = float((model.own - again).abs().max())
    if not gap <= TOLERANCE:
        raise RoleFault(f"The same shape, written anew, gives another output: it differs by {gap:.2g}.")
    return f"the same shape, written anew, gives the library's own output (largest difference {gap:.2g})"


def same(model: ModelUnderTest, change: Change, more: Change, wrong: str) -> None:
    """Raise `RoleFault` if `more` still changes the output after `change`."""
    gap = distance(model.answer_after(change, more), model.answer_after(change))
    if not gap <= TOLERANCE:
        raise RoleFault(f"{wrong}: the output moves by {gap:.2g} of its spread.")
