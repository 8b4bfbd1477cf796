"""What was decided between a plan and its result: everything under `decided` in surgery.json.

The code that decides creates these values, and no other code interprets the file. Records of other versions may lack a
part or hold an odd value: it becomes None or empty here, and is written back as it was read (`Recorded`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from leansurgeon.checkpoints.recorded.part import INSIDE, Recorded
from leansurgeon.reading.jsonfile import JsonObject


@dataclass(frozen=True)
class SampleData(Recorded):
    """The sample data that a decision used.

    `name` can be typed after --calibrate; `says` describes it and `sha256` identifies it. `samples` counts samples by
    part; `sources` are its parts if it has several; `asked` is the requested number of samples; `split` has the rule
    and digests of its split. `classes` says which outputs its classes are, and `columns` is what was typed after
    --columns.
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
    """How far a candidate's output is from the source's on the guard samples.

    Relative error, divergence of its predictions (nats per token), its loss, and the one of the first two that is
    judged by. `pieces` is the number of guard samples used.
    """

    guard_error: float | None = None
    guard_divergence: float | None = None
    guard_loss: float | None = None
    judged_by: float | None = None
    pieces: int | None = None


@dataclass(frozen=True)
class Tried(Recorded):
    """A candidate set of layers, and what was refitted at its cuts besides the MLP's output: attention, `later` layers.

    `data` says whether it was judged on "part" of the samples or on "all", which are not comparable; `left_out` says
    that its race ended early.
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
    """Heads or units removed from a layer.

    The ridge, whether the remaining ones were solved for again, the guard error before and after, and the heads kept.
    """

    ridge: float | None
    re_solved: bool
    guard_without_trim: float | None
    guard_after: float | None
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Split(Recorded):
    """Heads that were divided.

    The share of their score form that is kept, and the relative output error on the guard samples after the split and
    after the refit; `refitted` says whether the refit was used.
    """

    kept: float | None
    error_split: float | None
    error_refit: float | None = None
    refitted: bool | None = None


@dataclass(frozen=True)
class ProjectionRefit(Recorded):
    """A refitted projection: whether the refit is kept, its ridge, its errors on guard and fitted samples.

    `tried` maps each ridge to its guard error. For an attention also the error of the whole block before and after.
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
    """What was refitted in a block: the attention's output (`o`), the MLP's (`down`).

    After a post-norm also whose norm is used, and the block's error before and after.
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
    """A fit by gradient descent: steps, relative error on the guard samples before and after, and if it is kept."""

    steps: int | None
    guard_before: float | None
    guard_after: float | None
    kept: bool
    seconds: float | None


@dataclass(frozen=True)
class MadeLayer(Recorded):
    """A new layer that is no plain copy: made from source layer `source`, it replaces all layers up to `until`.

    Its refit is a sentence if none was possible.
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
    """A jointly fitted span of blocks that ends at new layer `until`."""

    until: int
    fit: Fit = field(metadata=INSIDE)


@dataclass(frozen=True)
class CutFit(Recorded):
    """The fitted spans around one cut, whose first new layer is `first`."""

    first: int
    spans: tuple[SpanFit, ...]


@dataclass(frozen=True)
class LocalFit(Recorded):
    """The local fit around all cuts: the judged score before and after, and whether it is kept.

    `passes` is its cost in passes of the source over all samples.
    """

    cuts: tuple[CutFit, ...]
    kept: bool
    before: float | None
    after: float | None
    passes: float | None = None


@dataclass(frozen=True)
class Healing(Recorded):
    """How the chosen candidate was healed, and its final score."""

    attention: bool
    later: bool
    score: GuardScore = field(metadata=INSIDE)
    local: LocalFit | None = None


# -- other ways to decide --------------------------------------------------------------------------


@dataclass(frozen=True)
class Importance(Recorded):
    """Measured importance of the heads of every attention, by which heads were kept."""

    by_head: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Verified(Recorded):
    """What an undone model was checked against.

    `by` is "sha256" (the written file has the recorded digest) or "reload"; `left_out` exist only in the source.
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
    """All decisions of a cut.

    `kept_heads` (by name of their layer) and `balance` (by layer) come from weights alone. `calibration` is the sample
    data, and the fields after it describe the walk through the layers with it. `evidence` holds the numbers that the
    criterion used, in its own form. `passes` counts passes of the source over all samples of `tokens` tokens;
    `held_back` says what their limit excluded, and `steps_taken_over` how many steps were resumed from an interrupted
    cut.
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
        """Whether anything was decided."""
        return bool(self.as_dict())

    @property
    def required(self) -> Collection[str]:
        """With a criterion, the fields of the layer choice are written even if empty."""
        return WALKED if self.criterion else ()
