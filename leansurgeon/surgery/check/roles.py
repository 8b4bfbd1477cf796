"""The doctor's tests of roles: what the library's model does with every tensor must be what its role says.

Shapes cannot tell a query from a value, nor q, k, v stacked from q, k, v interleaved. So: without values the output
projections receive nothing; without queries the keys do not matter; without the second half of the MLP the first does
not matter. Each test returns what it found, or raises `Wrong` or `Unclear`. Imports torch.
"""

from __future__ import annotations

import numpy as np
import torch

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.hooks import Hooks
from leansurgeon.surgery.check.patient import TOLERANCE, Change, Patient, Wrong, distance, zeros_in
from leansurgeon.surgery.plan.wanted import Wanted

NAMES = {"q": "queries", "k": "keys"}


def roles(patient: Patient) -> str:
    """Every tensor has one role, and together they hold all parameters that the library builds."""
    source, weights = patient.source, patient.weights
    declared = list(patient.arch.tensors(source.config, prefix=patient.prefix))
    names = [s.name for s in declared]
    twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise Wrong(f"'{twice[0]}' is declared twice.")
    absent = [s.name for s in declared if s.name not in weights.entries and s.role not in ("head", "tied", "buffer")]
    if absent:
        raise Wrong(f"{len(absent)} declared tensors are not in the model, the first is '{absent[0]}'.")
    counted = source.parameters.total
    built = sum(p.numel() for p in patient.loaded.model.parameters())
    if counted != built:
        raise Wrong(f"The tensors with a role hold {counted:,} parameters, and the library builds {built:,}.")
    inside = sum(s.layer is not None for s in source.specs)
    others = sorted(set(weights.entries) - set(names))
    rest = f"; not declared, and copied as they are: {', '.join(others)}" if others else ""
    return f"{inside} tensors in blocks and {len(source.specs) - inside} outside, {counted:,} parameters{rest}"


def projections(patient: Patient) -> str:
    """The modules that are declared as output projections hold the tensors whose role is `o`."""
    modules = patient.modules()
    declared = [s for s in patient.source.specs if s.layer is not None and s.role == "o" and len(s.shape) > 1]
    left = [torch.from_numpy(patient.weights.float32(s.name).copy()) for s in declared]
    for name, module in zip(patient.loaded.projections, modules, strict=True):
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


def masked_heads(patient: Patient) -> str:
    """An output projection that receives nothing gives its bias."""
    worst = 0.0

    def compare(module: torch.nn.Module, _: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Forward hook: note how far the output is from the bias alone."""
        nonlocal worst
        bias = module.bias if module.bias is not None else torch.zeros(())
        worst = max(worst, float((out - bias).abs().max()))

    modules = patient.modules()
    with Hooks() as hooks:
        for module in modules:
            hooks.before(module, lambda _, args: (torch.zeros_like(args[0]), *args[1:]))
            hooks.after(module, compare)
        patient.answer(patient.loaded)
    if worst > TOLERANCE:
        raise Wrong(f"With every head masked an output projection differs from its bias by {worst:.2g}.")
    return "with every head masked, each output projection gives its bias"


def values(patient: Patient) -> str:
    """Without values the output projections receive nothing."""
    patient.modules()
    largest: list[float] = []
    with patient.folder() as folder:
        loaded = patient.load(patient.write(folder, without(patient, "v")))
        with Hooks() as hooks:
            for name in loaded.projections:
                module = loaded.model.get_submodule(name)
                hooks.before(module, lambda _, args: largest.append(float(args[0].abs().max())))
            patient.answer(loaded)
    if not largest or max(largest) > 0:
        raise Wrong(f"Without values an output projection still receives up to {max(largest, default=0):.2g}.")
    return "without them the output projections receive nothing"


def queries_and_keys(patient: Patient) -> str:
    """Without queries the keys do not matter, and without keys the queries do not."""
    for gone, other in (("q", "k"), ("k", "q")):
        change = without(patient, gone)
        same(patient, change, moved(patient, other), f"Without {NAMES[gone]}, {NAMES[other]} still matter")
    return "without the one, the other does not matter"


def mlp(patient: Patient) -> str:
    """Without the second half of the MLP the first does not matter."""

    def rolled(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """The MLP's incoming tensors with their entries moved on by one; None for all others."""
        return np.roll(raw, 1) if spec.role in ("up", "gate") else None

    same(patient, zeros_in("down"), rolled, "Without its second half, the first half of the MLP still matters")
    return "without its second half, the first does not matter"


def rebuild(patient: Patient) -> str:
    """The same shape, written anew, gives the library's own output."""
    with patient.folder() as folder:
        _, again = patient.cut(folder / "rebuilt", [Wanted()])
    gap = float((patient.own - again).abs().max())
    if not gap <= TOLERANCE:
        raise Wrong(f"The same shape, written anew, gives another output: it differs by {gap:.2g}.")
    return f"the same shape, written anew, gives the library's own output (largest difference {gap:.2g})"


def without(patient: Patient, role: str) -> Change:
    """Queries, keys or values are zero."""
    return lambda spec, raw: patient.with_part(spec, raw, role, np.zeros_like)


def moved(patient: Patient, role: str) -> Change:
    """Queries, keys or values stand at other places."""
    return lambda spec, raw: patient.with_part(spec, raw, role, lambda old: np.roll(old, 1))


def same(patient: Patient, change: Change, more: Change, wrong: str) -> None:
    """Raises `Wrong` where `more` still changes the answer after `change`."""
    gap = distance(patient.altered(change, more), patient.altered(change))
    if not gap <= TOLERANCE:
        raise Wrong(f"{wrong}: the output moves by {gap:.2g} of its spread.")
