"""The doctor's tests of operators: each is applied to the model, and the result must answer as it should.

What is exact must answer as the model itself; a trimmed model as the model whose trimmed heads and units say nothing; a
model without a layer as one in which that layer passes its input on. So a declaration is found out that fits every
tensor and misses how the library computes with them (norms over all heads, slopes by number of heads, scales by depth).
Each test returns what it found, or raises `Wrong` or `Unclear`. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import numpy as np
import torch

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.architectures.infer.cuts import passing_on
from leansurgeon.checkpoints.weights import from_float32
from leansurgeon.shape import Stage
from leansurgeon.surgery.check.patient import EXACT, Change, Patient, Unclear, Wrong, distance, with_entries, zeros_in
from leansurgeon.surgery.layer import canonical
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.operators.head_dim import is_coarse, keeps_size
from leansurgeon.surgery.plan.wanted import Wanted

SPLIT = 1e-3  # a split without data goes through a singular value decomposition in fp32


# -- before any -------------------------------------------------------------------------------------


def control(patient: Patient) -> str:
    """What the heads and the MLP say reaches the answer; else no other test would mean anything."""
    held = {spec.role for spec in patient.source.specs}
    parts = {role: what for role, what in OUTPUTS.items() if role in held}
    if not parts:
        return "neither the heads nor the MLP have an output that is declared"
    gaps = {what: distance(patient.altered(zeros_in(role)), patient.own) for role, what in parts.items()}
    if silent := [what for what, gap in gaps.items() if gap <= EXACT]:
        raise Unclear(f"Without the {' and the '.join(silent)} the answer is the same, so this input tests nothing.")
    return ", ".join(f"without the {what} the output moves by {gap:.2g} of its spread" for what, gap in gaps.items())


OUTPUTS = {"o": "heads", "down": "MLP"}


def another_order(patient: Patient) -> str:
    """Heads and units moved by one place, in the order that their axes say, compute the same."""

    same = "heads" in patient.arch.refused  # by word of the declaration: heads that are not alike

    def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """The tensor with heads and units in their new places; None where nothing moves."""
        stage = patient.source.shape.stages[spec.stage]
        new = raw
        for at, axis in enumerate(spec.axes):
            places = None if same and axis != "mlp" else reordered(axis, stage)
            new = new if places is None else np.take(new, places, axis=at)
        return None if new is raw else np.ascontiguousarray(new)

    what = "MLP units" if same else "heads and MLP units"
    expect(patient.altered(change), patient.own, f"With {what} in another order")
    return f"{what} in another order give the same output"


def reordered(axis: str, stage: Stage) -> np.ndarray | None:
    """Old place of every entry along an axis when groups of heads, heads in a group and units move by one; None for an
    axis that has none of them.
    """
    groups = np.roll(np.arange(stage.kv_heads), 1)
    heads = np.roll(np.arange(stage.heads).reshape(stage.kv_heads, -1)[groups], 1, axis=1).reshape(-1)
    pieces, start, any_axis = [], 0, False
    for part in axis.split("+"):
        first, *others = part.split("*")
        known = {"q": (heads, stage.head_dim), "kv": (groups, stage.head_dim), "heads": (heads, 1)}
        if first in known:
            order, each = known[first]
            each *= prod(int(f) if f.isdigit() else {"head_dim": 1, "qkv": 3}[f] * stage.head_dim for f in others)
            places = (order[:, None] * each + np.arange(each)).reshape(-1)
        elif first == "mlp" and not others:
            places = np.roll(np.arange(stage.mlp_dim), 1)
        else:
            return None
        pieces, start, any_axis = [*pieces, places + start], start + len(places), True
    return np.concatenate(pieces) if any_axis else None


# -- more of something --------------------------------------------------------------------------------


def added_heads(patient: Patient) -> str:
    """New heads say nothing until their output columns are filled, and then they do."""
    needs_same_size(patient)
    more = [(s.heads + step(s), 2 * s.heads) for s in patient.source.shape.stages]
    return grown(patient, [Wanted(heads=text(h), head_dim="keep") for h in zip(*more, strict=True)], "o", "heads")


def split_heads(patient: Patient) -> str:
    """Children of the same size share their parent's output columns."""
    needs_same_size(patient)
    if reason := canonical.supported(patient.source):
        raise Unclear(reason)
    wanted = Wanted(heads=text(2 * s.heads for s in patient.source.shape.stages), head_dim="keep")
    with patient.folder() as folder:
        _, output = patient.cut(folder / "cut", [wanted], Method(more="split"))
    expect(output, patient.own, "With every head split in two")
    return "every head split in two of its size gives the same output"


def smaller_heads(patient: Patient) -> str:
    """Heads whose scores need a quarter of their entries become two of half the size, without a loss (a split without
    data gives each child what is largest in half of its entries).
    """
    if reason := canonical.splittable(patient.source):
        raise Unclear(reason)
    if canonical.rotary(patient.source):
        raise Unclear("Rotary positions belong to pairs of a head's entries, so a head cannot become two smaller ones.")
    if is_coarse(patient.source):
        raise Unclear("The weights have fewer bits than fp32, and the two halves would be rounded.")

    def poorer(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """The tensor with all but the first quarter of every head's queries set to zero."""
        head_dim = patient.source.shape.stages[spec.stage].head_dim

        def few(old: np.ndarray) -> np.ndarray:
            """Zero the rows beyond the first quarter of each head, in place."""
            old[np.arange(len(old)) % head_dim >= head_dim // 4] = 0
            return old

        return patient.with_part(spec, raw, "q", few)

    wanted = Wanted(heads=text(2 * s.heads for s in patient.source.shape.stages), head_dim="split")
    with patient.folder() as folder:
        poor = patient.copy(folder / "poorer", poorer)
        _, output = poor.cut(folder / "cut", [wanted], Method(uncalibrated=True))
        expect(output, poor.own, "With every head split in two smaller ones", SPLIT)
    return "every head split in two of half its size gives the same output, where its scores need few entries"


def wider_mlp(patient: Patient) -> str:
    """New units say nothing until their output columns are filled, and then they do."""
    more = [(s.mlp_dim + 8, 2 * s.mlp_dim) for s in patient.source.shape.stages]
    return grown(patient, [Wanted(mlp_dim=text(m)) for m in zip(*more, strict=True)], "down", "MLP units")


def grown(patient: Patient, choices: list[Wanted], role: str, what: str) -> str:
    """The test of adding silent parts: nothing changes until the output columns of the new ones are filled."""
    with patient.folder() as folder:
        result, output = patient.cut(folder / "cut", choices)
        expect(output, patient.own, f"With more {what}, which say nothing yet,")
        wide = patient.beside(result)
        gap = distance(wide.altered(filled(role, wide)), output)
    if gap <= EXACT:
        raise Wrong(f"What new {what} say does not reach the output.")
    return f"more {what} give the same output, until they are made to say something"


def filled(role: str, patient: Patient) -> Change:
    """Entries of zero in the tensors of a role hold something."""
    rng = np.random.default_rng(0)

    def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        """The role's matrices with random values where they are zero."""
        if spec.role != role or raw.ndim < 2:
            return None
        values = from_float32(rng.standard_normal(raw.shape, np.float32), patient.weights.entries[spec.name].dtype)
        return np.where(raw == 0, values, raw)

    return change


# -- less of something --------------------------------------------------------------------------------


def dropped_layers(patient: Patient) -> str:
    """Without a layer (a whole period where layers alternate) the model answers as if the layer passed its input on:
    the one in the middle of every stage, and the first.
    """
    period = patient.arch.period
    tried, reasons = [], []
    for name, place in (("middle", lambda n: n // 2), ("first", lambda n: 0)):
        gone: list[int] = []
        for span in patient.source.shape.spans:
            groups = len(span) // period
            at = place(groups) * period
            gone += span[at : at + period] if groups > 1 else ()
        if not gone:
            raise Unclear("Every stage has one layer only.")
        try:
            drop(patient, gone)
            tried.append(name)
        except Unclear as unclear:
            reasons.append(f"the {name} one was not tried: {unclear.message}")
    if not tried:
        raise Unclear(reasons[0])
    done = f"without the {' or the '.join(tried)} layer the output is that of a model in which it passes its input on"
    return "; ".join([done, *reasons])


def drop(patient: Patient, gone: Sequence[int]) -> None:
    """Raises `Wrong` where the model without these layers answers otherwise than one in which they pass on their
    input.
    """
    keep = ",".join(str(i) for i in range(patient.source.shape.depth) if i not in gone)
    with patient.folder() as folder:
        _, output = patient.cut(folder / "cut", [Wanted()], Method(keep=keep))
    blocks = list(block_modules(patient))
    with passing_on(blocks[i] for i in gone):
        expected = patient.answer(patient.loaded)
    expect(output, expected, f"Without layer {', '.join(map(str, gone))}")


def block_modules(patient: Patient) -> Iterator[torch.nn.Module]:
    """The modules of the blocks in order: what stands around their output projections. Raises `Unclear` where none is
    declared.
    """
    patient.modules()
    modules, names = dict(patient.loaded.model.named_modules()), iter(patient.loaded.projections)
    for s, stage in enumerate(patient.source.shape.stages):
        paths = patient.arch.blocks(s).projection
        for i in range(stage.depth):
            name, *_ = [next(names) for _ in paths]
            path = paths[0].format(i=i)
            yield modules[name.removesuffix(path) + paths[0].partition("{i}")[0] + str(i)]


def trimmed(patient: Patient) -> str:
    """Heads and units that say nothing are the ones that go, and nothing changes."""
    done = [trimmed_heads(patient) if keeps_size(patient.source) else "", trimmed_units(patient)]
    if not any(done):
        raise Unclear("The model has too few heads and units to take some away.")
    return " and ".join(filter(None, done)) + " that say nothing can go, and the output is the same"


def trimmed_heads(patient: Patient) -> str:
    """The word for what was trimmed; empty where no smaller number can be planned."""
    stages = patient.source.shape.stages
    fewer = [[step(s) * n for n in range(s.heads // step(s) - 1, 0, -1)] for s in stages]
    for counts in zip(*fewer, strict=False):
        gone = []
        for stage, left in zip(stages, counts, strict=True):  # as many heads go from every group
            heads = np.arange(stage.heads) % (stage.heads // step(stage)) >= left // step(stage)
            gone.append(np.repeat(heads, stage.head_dim))
        if fewer_say(patient, silent("o", "q", gone), Wanted(heads=text(counts), head_dim="keep")):
            return "heads"
    return ""


def trimmed_units(patient: Patient) -> str:
    """The same of MLP units."""
    stages = patient.source.shape.stages
    for counts in ([s.mlp_dim - 1 for s in stages], [s.mlp_dim - s.width for s in stages]):
        gone = [np.arange(stage.mlp_dim) >= left for stage, left in zip(stages, counts, strict=True)]
        if min(counts) > 0 and fewer_say(patient, silent("down", "mlp", gone), Wanted(mlp_dim=text(counts))):
            return "MLP units"
    return ""


def silent(role: str, axis: str, gone: Sequence[np.ndarray]) -> Change:
    """The matrices of a role are zero where entries along an axis are `gone`, a mask for every stage."""

    def change(spec: TensorSpec, raw: np.ndarray) -> np.ndarray | None:
        if spec.role != role or raw.ndim < 2:
            return None
        return with_entries(raw, spec.axes.index(axis), gone[spec.stage], np.zeros_like)

    return change


def fewer_say(patient: Patient, change: Change, wanted: Wanted) -> bool:
    """Whether a model whose last heads or units `change` silences loses them and answers as before; False where it
    cannot be planned. Raises `Wrong` where the answer changes.
    """
    with patient.folder() as folder:
        quiet = patient.copy(folder / "silent", change)
        try:
            _, output = quiet.cut(folder / "cut", [wanted])
        except Unclear:
            return False
        expect(output, quiet.own, "With fewer heads or MLP units, all of which said nothing,")
    return True


# -- in common ----------------------------------------------------------------------------------------


def expect(output: torch.Tensor, expected: torch.Tensor, where: str, within: float = EXACT) -> None:
    """Raises `Wrong` where an answer is not the expected one."""
    gap = distance(output, expected) if output.shape == expected.shape else float("inf")
    if not gap <= within:
        raise Wrong(f"{where} the output moves by {gap:.2g} of its spread.")


def needs_same_size(patient: Patient) -> None:
    """Raises `Unclear` where no family holds heads of the same size whose number changes."""
    if not keeps_size(patient.source):
        raise Unclear(f"{patient.arch.library} has no {patient.arch.name} with a head_dim of its own.")


def step(stage: Stage) -> int:
    """By how many heads an attention can grow or shrink: one, or one for every key/value head that several share."""
    return stage.kv_heads if stage.kv_heads < stage.heads else 1


def text(numbers: Iterable[int]) -> str:
    """One number a stage, as flags have them."""
    return ",".join(map(str, numbers))
