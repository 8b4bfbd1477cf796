"""Test the declaration of a family on a model of it: whatever the library computes must agree with the declaration.

First the roles are tested on the model itself (`roles.py`), then every operator: on the model itself or, if it is
large, on a smaller one of its config with fewer layers and random weights. Exact changes must give the model's own
output; a trimmed model that of the model whose trimmed heads and units are silenced; a model without a layer that of
one in which the layer passes its input on. This catches a declaration that fits every tensor but not the way the
library computes (norms over all heads, slopes by number of heads, scales by depth). Each test returns what it found, or
raises `RoleFault` or `Untestable`. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from leansurgeon.architectures.axes import UnitMaps, map_entries
from leansurgeon.architectures.base import Architecture, TensorSpec
from leansurgeon.architectures.infer.cuts import passing_on
from leansurgeon.architectures.match import match
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.weights import from_float32
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.shape import Stage
from leansurgeon.surgery import canonical, roles
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.operators import keeps_size
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.roles import EXACT, Change, ModelUnderTest, RoleFault, Untestable, distance, open_as, zeros_in
from leansurgeon.surgery.shrink import DecidedCut, carry_out

LAYERS = 4  # per stage, in the small version of a large model


# -- before any -------------------------------------------------------------------------------------


def control(model: ModelUnderTest) -> str:
    """Check that heads and MLP affect the output at all; otherwise the other tests would mean nothing."""
    held = {spec.role for spec in model.source.specs}
    parts = {role: what for role, what in OUTPUTS.items() if role in held}
    if not parts:
        return "neither the heads nor the MLP have an output that is declared"
    gaps = {what: distance(model.answer_after(zeros_in(role)), model.own) for role, what in parts.items()}
    if silent := [what for what, gap in gaps.items() if gap <= EXACT]:
        raise Untestable(f"Without the {' and the '.join(silent)} the answer is the same, so this input tests nothing.")
    return ", ".join(f"without the {what} the output moves by {gap:.2g} of its spread" for what, gap in gaps.items())


OUTPUTS = {"o": "heads", "down": "MLP"}


def another_order(model: ModelUnderTest) -> str:
    """Check that the output stays the same when heads and units move by one place along their declared axes."""

    same = "heads" in model.arch.refused  # the declaration says that heads are not alike

    def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """Return the tensor with heads and units in their new places; None if nothing moves."""
        stage, new = model.source.shape.stages[spec.stage], raw
        groups = np.roll(np.arange(stage.kv_heads), 1)
        heads = np.roll(np.arange(stage.heads).reshape(stage.kv_heads, -1)[groups], 1, axis=1).reshape(-1)
        maps = UnitMaps(heads, groups, np.roll(np.arange(stage.mlp_dim), 1))
        for at, axis in enumerate(spec.axes):
            if axis == "mlp" or not same:
                with suppress(KeyError):  # an axis without heads and units
                    new = np.take(new, map_entries(axis, stage, maps), axis=at)
        return None if new is raw else np.ascontiguousarray(new)

    what = "MLP units" if same else "heads and MLP units"
    expect(model.answer_after(change), model.own, f"With {what} in another order")
    return f"{what} in another order give the same output"


# -- more of something --------------------------------------------------------------------------------


def check_split_heads(model: ModelUnderTest) -> str:
    """Check that children of the same size can share their parent's output columns."""
    needs_same_size(model)
    if reason := canonical.why_unsupported(model.source):
        raise Untestable(reason)
    wanted = RequestedShape(heads=text(2 * s.heads for s in model.source.shape.stages), head_dim="keep")
    with model.folder() as folder:
        _, output = model.cut_first_possible(folder / "cut", [wanted], Method(more="split"))
    expect(output, model.own, "With every head split in two")
    return "every head split in two of its size gives the same output"


def check_growth(model: ModelUnderTest, role: str, what: str) -> str:
    """Check that new heads or units change nothing until their output columns are filled, and then do."""
    stages = model.source.shape.stages
    if role == "o":
        needs_same_size(model)
        more = zip(*[(s.heads + step(s), 2 * s.heads) for s in stages], strict=True)
        choices = [RequestedShape(heads=text(heads), head_dim="keep") for heads in more]
    else:
        more = zip(*[(s.mlp_dim + 8, 2 * s.mlp_dim) for s in stages], strict=True)
        choices = [RequestedShape(mlp_dim=text(units)) for units in more]
    with model.folder() as folder:
        result, output = model.cut_first_possible(folder / "cut", choices)
        expect(output, model.own, f"With more {what}, which are silent,")
        wide = model.beside(result)
        gap = distance(wide.answer_after(fill_zeros(role, wide)), output)
    if gap <= EXACT:
        raise RoleFault(f"New {what} do not reach the output even with filled columns.")
    return f"more {what} give the same output until their columns are filled"


def fill_zeros(role: str, model: ModelUnderTest) -> Change:
    """Return a change that fills the zeros of a role's matrices with random values."""
    rng = np.random.default_rng(0)

    def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """Fill the zeros of the role's matrices; None for all other tensors."""
        if spec.role != role or raw.ndim < 2:
            return None
        values = from_float32(rng.standard_normal(raw.shape, np.float32), model.weights.entries[spec.name].dtype)
        return np.where(raw == 0, values, raw)

    return change


# -- less of something --------------------------------------------------------------------------------


def check_dropped_layers(model: ModelUnderTest) -> str:
    """Check that the model without a layer (a whole period if layers alternate) gives the output of one in which that
    layer passes its input on: the middle layer of every stage, then the first.
    """
    period = model.arch.period
    tried, reasons = [], []
    for name, place in (("middle", lambda n: n // 2), ("first", lambda n: 0)):
        gone = []
        for span in model.source.shape.spans:
            groups = len(span) // period
            at = place(groups) * period
            gone += span[at : at + period] if groups > 1 else ()
        if not gone:
            raise Untestable("Every stage has one layer only.")
        try:
            drop(model, gone)
            tried.append(name)
        except Untestable as unclear:
            reasons.append(f"the {name} one was not tried: {unclear.message}")
    if not tried:
        raise Untestable(reasons[0])
    done = f"without the {' or the '.join(tried)} layer the output is that of a model in which it passes its input on"
    return "; ".join([done, *reasons])


def drop(model: ModelUnderTest, gone: Sequence[int]) -> None:
    """Raise `RoleFault` if the model without these layers differs from one in which they pass their input on."""
    keep = ",".join(str(i) for i in range(model.source.shape.depth) if i not in gone)
    with model.folder() as folder:
        _, output = model.cut_first_possible(folder / "cut", [RequestedShape()], Method(keep=keep))
    model.modules()  # raises `Untestable` if the model has no modules to hook
    with passing_on(model.loaded.blocks[i] for i in gone):
        expected = model.answer(model.loaded)
    expect(output, expected, f"Without layer {', '.join(map(str, gone))}")


def check_trimming(model: ModelUnderTest) -> str:
    """Check that silent heads and units are the ones that trimming removes, and that the output stays the same."""
    stages, tries = model.source.shape.stages, {"heads": [], "MLP units": []}
    fewer = [[step(s) * n for n in range(s.heads // step(s) - 1, 0, -1)] for s in stages if keeps_size(model.source)]
    for counts in zip(*fewer, strict=False):
        gone = []
        for stage, left in zip(stages, counts, strict=True):  # every group loses the same number of heads
            heads = np.arange(stage.heads) % (stage.heads // step(stage)) >= left // step(stage)
            gone.append(np.repeat(heads, stage.head_dim))
        tries["heads"].append((silent("o", "q", gone), RequestedShape(heads=text(counts), head_dim="keep")))
    for counts in ([s.mlp_dim - 1 for s in stages], [s.mlp_dim - s.width for s in stages]):
        gone = [np.arange(stage.mlp_dim) >= left for stage, left in zip(stages, counts, strict=True)]
        if min(counts) > 0:
            tries["MLP units"].append((silent("down", "mlp", gone), RequestedShape(mlp_dim=text(counts))))
    done = []
    for what, choices in tries.items():
        for change, wanted in choices:
            with model.folder() as folder:
                quiet = model.copy(folder / "silent", change)
                try:
                    _, output = quiet.cut_first_possible(folder / "cut", [wanted])
                except Untestable:
                    continue
                expect(output, quiet.own, "Without silent heads or MLP units")
            done.append(what)
            break
    if not done:
        raise Untestable("The model has too few heads and units to take some away.")
    return " and ".join(done) + " that are silent can be removed, and the output is the same"


def silent(role: str, axis: str, gone: Sequence[np.ndarray]) -> Change:
    """Return a change that zeroes a role's matrices where entries along an axis are `gone` (one mask per stage)."""

    def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        if spec.role != role or raw.ndim < 2:
            return None
        new, at = raw.copy(), spec.axes.index(axis)
        np.moveaxis(new, at, 0)[gone[spec.stage]] = 0
        return new

    return change


# -- in common ----------------------------------------------------------------------------------------


def expect(output: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Raise `RoleFault` unless the output is the expected one."""
    gap = distance(output, expected) if output.shape == expected.shape else float("inf")
    if not gap <= EXACT:
        raise RoleFault(f"{where} the output moves by {gap:.2g} of its spread.")


def needs_same_size(model: ModelUnderTest) -> None:
    """Raise `Untestable` if no form of the family can change its number of heads at the same head_dim."""
    if not keeps_size(model.source):
        raise Untestable(f"{model.arch.library} has no {model.arch.name} with a head_dim of its own.")


def step(stage: Stage) -> int:
    """Return the step in which an attention's heads can grow or shrink: one, or the number of key/value heads if
    several query heads share each.
    """
    return stage.kv_heads if stage.kv_heads < stage.heads else 1


def text(numbers: Iterable[int]) -> str:
    """Return one number per stage, comma-separated as in options."""
    return ",".join(map(str, numbers))


# -- all of them ------------------------------------------------------------------------------------

Test = Callable[[ModelUnderTest], str]
ROLES: dict[str, Test] = {
    "roles": roles.roles,
    "output projections": roles.projections,
    "masked heads": roles.check_masked_heads,
    "values": roles.values,
    "queries and keys": roles.queries_and_keys,
    "MLP": roles.mlp,
    "rebuild": roles.rebuild,
}
OPERATORS: dict[str, Test] = {
    "another order": another_order,
    "added heads": partial(check_growth, role="o", what="heads"),
    "split heads": check_split_heads,
    "wider MLP": partial(check_growth, role="down", what="MLP units"),
    "dropped layers": check_dropped_layers,
    "trimmed heads and MLP": check_trimming,
}


@dataclass(frozen=True)
class Check:
    """One statement about the declaration; `ok` is None if it could not be tested."""

    name: str
    ok: bool | None
    says: str


def examine(source: Source, architecture: Architecture | None = None) -> list[Check]:
    """Run all checks of a source's family (or of `architecture` in its place), in order.

    A source without weights is initialized first; one that its library builds by name only (VOLO) is tested in the form
    that surgery gives it. Needs room for copies of the weights in the temporary folder, and loads the model several
    times.
    """
    with ExitStack() as keep:
        work = keep.enter_context(scratch())
        if source.weights is None or not source.architecture.rebuilds:
            source = fresh(source, RequestedShape(), work / "source")
        arch = architecture or source.architecture
        try:
            specs = match(arch, source.config, source.weights.shapes)
        except LeanSurgeonError as error:
            return [Check("roles", False, error.message)]
        model = ModelUnderTest(replace(source, architecture=arch, specs=specs), work)
        checks = [check(model, name, test) for name, test in ROLES.items()]
        if any(one.ok is False for one in checks):
            return checks  # the operators rely on the roles
        smaller = rehearsal(model)
        checks.append(check(smaller, "control", control))
        if checks[-1].ok is None:
            return checks
        return checks + [check(smaller, name, test) for name, test in OPERATORS.items()]


def check(model: ModelUnderTest, name: str, test: Test) -> Check:
    """Run one test and return its outcome, whatever the library raises."""
    try:
        return Check(name, True, test(model))
    except Untestable as unclear:
        return Check(name, None, unclear.message)
    except Exception as error:  # a wrong declaration may break the library in any way
        first = (getattr(error, "message", None) or str(error) or type(error).__name__).splitlines()[0]
        return Check(name, False, first)


def rehearsal(model: ModelUnderTest) -> ModelUnderTest:
    """Return a model of a large model's config with few layers and random weights; the model itself if it is small, or
    if its library cannot build one.
    """
    source = model.source
    if not model.large:
        return model
    least = LAYERS * model.arch.period
    layers = ",".join(str(min(stage.depth, least)) for stage in source.shape.stages)
    try:
        made = fresh(source, RequestedShape(layers=layers, init="fresh"), model.work / "rehearsal", model.arch)
    except LeanSurgeonError:
        return model
    return ModelUnderTest(made, model.work)


def fresh(source: Source, wanted: RequestedShape, folder: Path, architecture: Architecture | None = None) -> Source:
    """Return a new model of the source's config with noise in norms and biases, so that tests can tell them apart."""
    steps = plan(source, wanted, seed=0)
    carry_out(DecidedCut(steps), folder, check=False)
    made = open_as(folder, architecture or steps.architecture)
    rng = np.random.default_rng(0)

    def add_noise(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """Add noise to tensors that are constant in a fresh model (norms, biases); None leaves a tensor unchanged."""
        values = made.weights.float32(spec.name)
        if spec.role in ("buffer", "tied") or not values.size or np.ptp(values) > 0:
            return None
        noise = 0.1 * rng.standard_normal(values.shape, np.float32)
        return from_float32(values + noise, made.weights.entries[spec.name].dtype)

    again = folder.with_name(f"{folder.name}-stirred")
    return open_as(ModelUnderTest(made, folder).write(again, add_noise), made.architecture)
