"""The doctor: what a declaration says of a family, put to the test on a model of it. Whatever the library computes, the
declaration must be what the library does with it.

First the roles, on the model itself (`roles.py`), then every operator (`operators.py`), on the model itself or, where
that is large, on one of its config with fewer layers and random weights. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from leansurgeon.architectures.base import Architecture, TensorSpec
from leansurgeon.architectures.match import match
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.weights import from_float32
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.surgery.check import operators, roles
from leansurgeon.surgery.check.patient import Patient, Unclear, opened
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import Decided, carry_out

Test = Callable[[Patient], str]
ROLES: dict[str, Test] = {
    "roles": roles.roles,
    "output projections": roles.projections,
    "masked heads": roles.masked_heads,
    "values": roles.values,
    "queries and keys": roles.queries_and_keys,
    "MLP": roles.mlp,
    "rebuild": roles.rebuild,
}
OPERATORS: dict[str, Test] = {
    "another order": operators.another_order,
    "added heads": operators.added_heads,
    "split heads": operators.split_heads,
    "smaller heads": operators.smaller_heads,
    "wider MLP": operators.wider_mlp,
    "dropped layers": operators.dropped_layers,
    "trimmed heads and MLP": operators.trimmed,
}
LAYERS = 4


@dataclass(frozen=True)
class Check:
    """One statement about the declaration; `ok` None where it could not be examined."""

    name: str
    ok: bool | None
    says: str


def examine(source: Source, architecture: Architecture | None = None) -> list[Check]:
    """All checks of a source's family (or of `architecture` in its place), in order.

    A source without weights is initialised first; one that its library builds by name only (VOLO) is examined in the
    form that surgery gives it. Needs room for copies of the weights in the temporary folder and loads the model
    several times.
    """
    with ExitStack() as keep:
        work = keep.enter_context(scratch())
        if source.weights is None or not source.architecture.rebuilds:
            source = fresh(source, Wanted(), work / "source")
        arch = architecture or source.architecture
        try:
            specs = match(arch, source.config, source.weights.shapes)
        except LeanSurgeonError as error:
            return [Check("roles", False, error.message)]
        patient = Patient(replace(source, architecture=arch, specs=specs), work)
        checks = [check(patient, name, test) for name, test in ROLES.items()]
        if any(one.ok is False for one in checks):
            return checks  # operators go by roles
        smaller = rehearsal(patient)
        checks.append(check(smaller, "control", operators.control))
        if checks[-1].ok is None:
            return checks
        return checks + [check(smaller, name, test) for name, test in OPERATORS.items()]


def check(patient: Patient, name: str, test: Test) -> Check:
    """The outcome of one test; whatever the library raises ends in it."""
    try:
        return Check(name, True, test(patient))
    except Unclear as unclear:
        return Check(name, None, unclear.message)
    except Exception as error:  # a wrong declaration may break the library in any way
        first = (getattr(error, "message", None) or str(error) or type(error).__name__).splitlines()[0]
        return Check(name, False, first)


def rehearsal(patient: Patient) -> Patient:
    """A large model's config with few layers and random weights; the model itself where it is small, or where its
    library makes no such model.
    """
    source = patient.source
    if not patient.large:
        return patient
    least = LAYERS * patient.arch.period
    layers = ",".join(str(min(stage.depth, least)) for stage in source.shape.stages)
    try:
        made = fresh(source, Wanted(layers=layers, init="fresh"), patient.work / "rehearsal", patient.arch)
    except LeanSurgeonError:
        return patient
    return Patient(made, patient.work)


def fresh(source: Source, wanted: Wanted, folder: Path, architecture: Architecture | None = None) -> Source:
    """A new model of the source's config whose norms and biases are no longer all alike, so that each is seen."""
    steps = plan(source, wanted, seed=0)
    carry_out(Decided(steps), folder, check=False)
    made = opened(folder, architecture or steps.architecture)
    rng = np.random.default_rng(0)

    def stirred(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """Noise on what is constant in a fresh model (norms, biases); None leaves a tensor as it is."""
        values = made.weights.float32(spec.name)
        if spec.role in ("buffer", "tied") or not values.size or np.ptp(values) > 0:
            return None
        noise = 0.1 * rng.standard_normal(values.shape, np.float32)
        return from_float32(values + noise, made.weights.entries[spec.name].dtype)

    again = folder.with_name(f"{folder.name}-stirred")
    return opened(Patient(made, folder).write(again, stirred), made.architecture)
