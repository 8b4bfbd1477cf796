"""What was decided on the way from a plan to its result: all that stands under `decided` in surgery.json.

The rooms that decide make these values, and nobody else interprets the file. Records of other versions may lack any
part, or hold something odd in its place: then it is None or empty here, and written again as it was read (`Recorded`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from leansurgeon.checkpoints.recorded.part import INSIDE, Recorded
from leansurgeon.reading.jsonfile import JsonObject


@dataclass(frozen=True)
class SampleData(Recorded):
    """The sample data that decided: what can be typed behind --calibrate, what it is, its digest, its samples by part,
    its sources where it has several, how many samples were asked for, and the rule and the digests of its split,
    which outputs its classes are, and what was typed behind --columns.
    """

    name: str
    says: str
    sha256: str
    samples: Mapping[str, int]
    sources: tuple[SampleData, ...] = ()
    asked: int | None = None
    split: Mapping[str, str] = field(default_factory=dict)
    classes: str | None = None
    columns: str | None = None


# -- which layers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuardScore(Recorded):
    """How far a candidate's output is from the source's on the guard samples: relative error, divergence of its
    predictions (nats a token), its loss, and the one of the first two that judges. `pieces` is how many of the guard
    were judged.
    """

    guard_error: float | None = None
    guard_divergence: float | None = None
    guard_loss: float | None = None
    judged_by: float | None = None
    pieces: int | None = None


@dataclass(frozen=True)
class Tried(Recorded):
    """A set of layers that competed, and what was refitted beside the MLP's output at its cuts: the attention's, and
    `later` layers. `data` says whether it was judged on "part" of the samples or on "all", which are not comparable;
    `left_out` that its race ended early.
    """

    required = ("data",)

    kept: tuple[int, ...]
    criterion: str
    attention: bool
    later: bool
    score: GuardScore = field(metadata=INSIDE)
    left_out: bool = False
    data: str = "all"


# -- what became of a layer ------------------------------------------------------------------------


@dataclass(frozen=True)
class Trim(Recorded):
    """Heads or units that went from a layer: the ridge, whether what stays was solved for again, the error on the guard
    before and after, and of heads those that stay.
    """

    ridge: float | None
    re_solved: bool
    guard_without_trim: float | None
    guard_after: float | None
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Split(Recorded):
    """Heads that were divided: the share of their score form that is kept, and the relative output error on the guard
    after the split and after the refit; `refitted` says whether that was taken.
    """

    kept: float | None
    error_split: float | None
    error_refit: float | None = None
    refitted: bool | None = None


@dataclass(frozen=True)
class ProjectionRefit(Recorded):
    """A projection that was solved for: whether that is kept, the ridge, errors on the guard and on the samples that
    were fitted to, and the guard's error by ridge. Of an attention's also what the whole block has lost by it.
    """

    kept: bool
    ridge: float | None
    guard_before: float | None
    guard_after: float | None
    fit_after: float | None
    tokens: int | None
    tried: Mapping[str, float]
    block_before: float | None = None
    block_after: float | None = None


@dataclass(frozen=True)
class BlockRefit(Recorded):
    """What was refitted in a block: the attention's output (`o`), the MLP's (`down`); behind a post-norm also whose
    norm it has, and the block's error before and after.
    """

    o: ProjectionRefit | None = None
    down: ProjectionRefit | None = None
    norm: str | None = None
    block_before: float | None = None
    block_after: float | None = None

    @property
    def kept(self) -> tuple[str, ...]:
        """The projections whose refit is kept."""
        return tuple(name for name in ("o", "down") if (one := getattr(self, name)) and one.kept)


@dataclass(frozen=True)
class Fit(Recorded):
    """Steps of gradient descent, the relative error on the guard before and after, whether they are kept."""

    steps: int | None
    guard_before: float | None
    guard_after: float | None
    kept: bool
    seconds: float | None


@dataclass(frozen=True)
class MadeLayer(Recorded):
    """A new layer that is no plain copy: made from source layer `source`, it stands for all up to `until`. Its refit is
    a sentence where there was no way to one.
    """

    KEYS: ClassVar[Mapping[str, str]] = {"source": "from"}

    layer: int
    source: int
    until: int
    split: Split | None = None
    heads: Trim | None = None
    mlp: Trim | None = None
    error_before: float | None = None
    refit: BlockRefit | str | None = None
    error_after: float | None = None


# -- healing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanFit(Recorded):
    """The blocks of a span up to new layer `until`, fitted together."""

    until: int
    fit: Fit = field(metadata=INSIDE)


@dataclass(frozen=True)
class CutFit(Recorded):
    """The spans around one cut, whose first new layer is `first`."""

    first: int
    spans: tuple[SpanFit, ...]


@dataclass(frozen=True)
class LocalFit(Recorded):
    """The local fit around all cuts: what judges before and after, whether it is kept, and the passes of the source
    over all samples that it took.
    """

    cuts: tuple[CutFit, ...]
    kept: bool
    before: float | None
    after: float | None
    passes: float | None = None


@dataclass(frozen=True)
class Healing(Recorded):
    """How the candidate that was taken was healed, and its score in the end."""

    attention: bool
    later: bool
    score: GuardScore = field(metadata=INSIDE)
    local: LocalFit | None = None


# -- other ways to decide --------------------------------------------------------------------------


@dataclass(frozen=True)
class Importance(Recorded):
    """The measured importance of the heads of every attention, which chose those that stay."""

    by_head: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Verified(Recorded):
    """What an undone model was held against: `by` is "sha256" (the written file has the recorded digest), "source"
    (tensor by tensor; `differing` are not alike, `left_out` are only in the source) or "reload".
    """

    by: str
    source: str
    differing: tuple[str, ...]
    left_out: tuple[str, ...] | None = None


WALKED = (
    *("layers", "criterion", "evidence", "candidates", "decisions"),
    *("changed_tensors", "held_back", "steps_taken_over"),
)


@dataclass(frozen=True)
class Decisions(Recorded):
    """All that was decided: by weight (`kept_heads` by the name of their layer, `balance` by layer), on sample data
    (`calibration`), and by walking through the layers with it. `evidence` are the numbers that its criterion has looked
    at, in a form of its own; `passes` are of the source over all samples, of so many `tokens`, `held_back` says what
    their bound left out, and `steps_taken_over` how many steps an interrupted cut had left.
    """

    kept_heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    balance: JsonObject = field(default_factory=dict)
    calibration: SampleData | None = None
    criterion: str = ""
    layers: tuple[int, ...] = ()
    evidence: JsonObject = field(default_factory=dict)
    candidates: tuple[Tried, ...] = ()
    healing: Healing | None = None
    decisions: tuple[MadeLayer, ...] = ()
    changed_tensors: int | None = None
    passes: float | None = None
    tokens: int | None = None
    held_back: tuple[str, ...] = ()
    steps_taken_over: int = 0
    seconds: float | None = None
    importance: Importance | None = None
    verified: Verified | None = None

    def __bool__(self) -> bool:
        """Whether anything was decided at all."""
        return bool(self.as_dict())

    @property
    def required(self) -> Collection[str]:
        """Whoever walks says all of it, the empty too."""
        return WALKED if self.criterion else ()
