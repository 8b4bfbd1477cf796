"""Enumerate shapes, and check which of them fit a budget. Exact counts, no torch.

A shape is homogeneous: one number of layers, heads and MLP units per stage, since no library can load anything else.
`surgery.planning` rejects what a family cannot hold (divisibility, head policy, rotary positions).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, UsageError
from leansurgeon.experiment.arms import equal_mlp
from leansurgeon.shape import Shape
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape

HEADS = ("1x", "4/3x", "3/2x", "2x", "3x")
MLP = ("1x", "3/4x", "1/2x")
SHALLOWEST = Fraction(1, 4)  # of the present layers
MOST = 100_000  # combinations
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
BYTES = {unit + "B": 1000**i for i, unit in enumerate(("", "K", "M", "G", "T"))} | {
    unit + "IB": 1024**i for i, unit in enumerate(("", "K", "M", "G", "T")) if unit
}
MILLISECONDS = {"US": 1e-3, "MS": 1.0, "S": 1e3}


@dataclass(frozen=True)
class Budget:
    """Limits of a shape: parameters, bytes in training, milliseconds for a forward pass of one sample. None:
    no limit.
    """

    parameters: int | None = None
    memory: int | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, parameters: str | None, memory: str | None, latency: str | None, total: int) -> Budget:
        """Parse `60M` or `70%` of the source's `total`, `16GB`, `5ms`.

        Raises `UsageError` if all are None, or one is not a valid size.
        """
        if parameters is None and memory is None and latency is None:
            raise UsageError("A search needs a budget.", "Give --params 60M, --memory 16GB or --latency 5ms.")
        most = None if parameters is None else budget_of(parameters, total)
        room = size(memory, BYTES, "--memory", "16GB or 16GiB")
        return cls(most, None if room is None else int(room), size(latency, MILLISECONDS, "--latency", "5ms"))


def size(text: str | None, units: dict[str, float], flag: str, example: str) -> float | None:
    """Parse a number with its unit. Raises `UsageError`."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:[\d_,]*\d)?(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and units.get(match[2].upper())
    if unit is None or (value := float(re.sub("[_,]", "", match[1])) * unit) <= 0:
        raise UsageError(f"{flag} {text}: a size is needed, such as {example}.")
    return value


def budget_of(text: str, total: int) -> int:
    """Parse `-30%` or `70%` of the present parameters, or a number of them such as `60M`. Raises `UsageError`."""
    share = re.fullmatch(r"\s*([+-]?)(\d+(?:\.\d+)?)\s*%\s*", text)
    if share is None:
        return int(size(text, UNITS, "--params", "-30%, 60M or 152394") or 0)
    part = float(share[2]) / 100
    part = 1 - part if share[1] == "-" else part
    if share[1] == "+" or not 0 < part < 1:
        raise UsageError(f"--params {text}: shrinking leaves less than there is.", "Give -30%, 70% or 60M.")
    return int(part * total)


@dataclass(frozen=True)
class Space:
    """The numbers to combine, as typed: `12,16,24`, `6-12`, factors such as `2x` or `3/4x`. None: the usual ones."""

    heads: str | None = None
    layers: str | None = None
    mlp_dim: str | None = None
    head_dim: str = "auto"


@dataclass(frozen=True)
class Candidate:
    """A shape, the `shrink` request that produces it, and its exact number of parameters. `control_of` names the
    candidate that it is the control of: the same depth, the old heads, as many parameters.
    """

    wanted: RequestedShape
    shape: Shape
    parameters: int
    more_heads: bool = False
    control_of: str | None = None

    @property
    def name(self) -> str:
        """`h8-l3-m128`; also the name of a folder."""
        columns = (self.shape.column(key) for key in ("heads", "depth", "mlp_dim"))
        return "-".join(letter + column.replace(",", ".") for letter, column in zip("hlm", columns, strict=True))


@dataclass(frozen=True)
class Shapes:
    """Candidates that fit the budget in parameters, the number of shapes examined, and why others are impossible."""

    candidates: tuple[Candidate, ...]
    looked_at: int
    too_large: int
    refused: dict[str, int]


def enumerate_shapes(source: Source, space: Space, budget: Budget, *, init: str, calibrated: bool) -> Shapes:
    """Return every shape of the space that the source can be cut to, in the order of layers, heads and MLP.

    Raises `UsageError` for an invalid list, and if no shape is left.
    """
    axes = combinations(source, space)
    itself = 0
    by_shape = {}
    refused: Counter[str] = Counter()
    too_large = 0
    for layers, heads, mlp in axes:
        wanted = RequestedShape(heads, layers, space.head_dim, mlp, init=init)
        try:
            candidate = make_candidate(source, wanted, calibrated=calibrated)
        except (UsageError, UnsupportedModel) as error:
            refused[error.message] += 1
            continue
        if candidate.shape == source.shape:
            itself = 1
            continue
        if budget.parameters is not None and candidate.parameters > budget.parameters:
            too_large += 1
            continue
        by_shape.setdefault(candidate.shape, candidate)
    if not by_shape:
        raise nothing_left(source, budget, too_large, refused)
    return Shapes(tuple(by_shape.values()), len(axes) - itself, too_large, dict(refused))


def make_candidate(source: Source, wanted: RequestedShape, *, calibrated: bool) -> Candidate:
    """Return the candidate of a request. Raises what `plan` raises."""
    steps = plan(source, wanted, 0, Method(uncalibrated=not calibrated), calibrated=calibrated)
    pairs = zip(source.shape.stages, steps.after.stages, strict=True)
    more = any(after.heads > before.heads for before, after in pairs)
    return Candidate(wanted, steps.after, steps.parameters_after.total, more)


def control(source: Source, lean: Candidate, *, calibrated: bool) -> Candidate | None:
    """Return the same depth with the old heads and an MLP that makes up the parameters; None if there is none."""
    if not lean.more_heads:
        return None
    narrow = replace(lean.wanted, heads=None, head_dim="keep", mlp_dim=None)
    try:
        widths = equal_mlp(source, narrow, lean.parameters)
        wanted = replace(narrow, mlp_dim=",".join(map(str, widths)))
        return replace(make_candidate(source, wanted, calibrated=calibrated), control_of=lean.name)
    except LeanSurgeonError:  # too many parameters even without an MLP, or the family's MLP is a multiple of the width
        return None


def nothing_left(source: Source, budget: Budget, too_large: int, refused: Counter[str]) -> UsageError:
    """Return the error for a budget that no shape keeps, with the reason."""
    if too_large:
        what = f"{source.name} has {source.parameters.total:,} parameters, and none of {too_large:,} shapes"
        return UsageError(
            f"{what} that it can be cut to has at most {budget.parameters:,}.", "Allow more, or --layers."
        )
    why = refused.most_common(1)[0][0] if refused else "the only shape named is that of the source."
    return UsageError(f"There is no shape to try: {why}", "Name others with --heads, --layers or --mlp-dim.")


# -- the numbers ----------------------------------------------------------------------------------


def combinations(source: Source, space: Space) -> list[tuple[str, str, str]]:
    """Return (layers, heads, MLP) as `shrink` takes them, one number per stage."""
    stages = source.shape.stages
    old = {key: [getattr(stage, key) for stage in stages] for key in ("depth", "heads", "mlp_dim")}
    layers = list_values(space.layers, "--layers", old["depth"]) if space.layers else usual_layers(old["depth"])
    heads = list_values(space.heads or ",".join(HEADS), "--heads", old["heads"])
    mlp = list_values(space.mlp_dim or ",".join(MLP), "--mlp-dim", old["mlp_dim"])
    for flag, values in (("--layers", layers), ("--heads", heads), ("--mlp-dim", mlp)):
        if not values:
            raise UsageError(f"{flag} names no whole number that {source.name} could have.")
    if len(layers) * len(heads) * len(mlp) > MOST:
        raise UsageError(f"That is more than {MOST:,} shapes.", "Name fewer with --heads, --layers or --mlp-dim.")
    return list(product(layers, heads, mlp))


def usual_layers(old: list[int]) -> list[str]:
    """Return depths from all layers down to a quarter of them; in a pyramid every stage loses the same share."""
    deepest = max(old)
    least = max(1, -(-deepest * SHALLOWEST.numerator // SHALLOWEST.denominator))
    kept = [[max(1, round(Fraction(n, deepest) * d)) for d in old] for n in range(deepest, least - 1, -1)]
    return list(dict.fromkeys(",".join(map(str, numbers)) for numbers in kept))


def list_values(text: str, flag: str, old: list[int]) -> list[str]:
    """Parse `6-8,12,2x` into numbers per stage, skipping factors that give no whole number. Raises `UsageError`."""
    wanted = []
    for word in (word.strip() for word in text.split(",")):
        if match := re.fullmatch(r"(\d+)-(\d+)", word):
            first, last = int(match[1]), int(match[2])
            if not 0 < first <= last <= MOST:
                raise UsageError(f"{flag} {word}: from a small number to a large one, such as 6-12.")
            wanted += [",".join([str(n)] * len(old)) for n in range(first, last + 1)]
        elif re.fullmatch(r"[1-9]\d{0,7}", word):
            wanted.append(",".join([word] * len(old)))
        elif match := re.fullmatch(r"(\d{1,4}(?:\.\d{1,4}|/[1-9]\d{0,3})?)[xX]", word):
            numbers = [Fraction(match[1]) * n for n in old]
            if all(number.denominator == 1 and number > 0 for number in numbers):
                wanted.append(",".join(map(str, numbers)))
        else:
            raise UsageError(f"{flag} {word}: a number, a range or a factor is needed, such as 12, 6-12 or 3/2x.")
    return list(dict.fromkeys(wanted))
