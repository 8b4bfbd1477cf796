"""surgery.json: what was done to a model, to which source, and what the proof found. Typed, with one reader and one
writer; every other room asks `SurgeryRecord` and never the file.

A key that is missing is what older versions did not write, and stands at its default; a key of the wrong kind is
damage. What a later version adds is kept as it is (`other`), so that a record that travels on loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from leansurgeon.architectures import towers
from leansurgeon.checkpoints.places import public, without_place, without_places
from leansurgeon.checkpoints.publish.durable import write_durably
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.checkpoints.recorded.part import NAME, DamagedRecord, Recorded, RecordedInFull
from leansurgeon.errors import UnsupportedModel, raised_as
from leansurgeon.progress import Say
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.reading.values import text
from leansurgeon.shape import Shape

FORM = 1  # raised where an older reader would misread what is written
TRAINED, FRESH = "trained", "fresh"  # `initialised` after a training, and of weights that know nothing


# -- what a proof found ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedFigure(RecordedInFull):
    """One number of the source and of the result, on the same samples; the difference lies between `low` and `high`
    with 95 % (None: not known).
    """

    WHERE = "compared"
    OPTIONAL = ("low", "high")

    source: float
    result: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Embeddings(RecordedInFull):
    """Cosine of pooled embeddings of source and result: mean, first percentile, number of samples; rank correlation of
    the similarities of all pairs, and the share of the `nearest` samples of each that are kept (None: not known).
    """

    WHERE = "embeddings"
    OPTIONAL = ("low", "high")

    cosine: float
    first_percentile: float
    samples: int = 0
    rank_correlation: float | None = None
    nearest_kept: float | None = None
    nearest: int | None = None
    low: float | None = None  # between which the mean cosine of all such samples lies with 95 %
    high: float | None = None


@dataclass(frozen=True)
class Comparison(RecordedInFull):
    """Outputs of a result against its source's on the same inputs; where that could not be `done`, `why`.

    `data` is "noise" or "held-out data"; `rows` outputs of real tokens are compared, `scored` labels counted.
    `relative_error` is the norm of the difference over that of the source's outputs.
    """

    WHERE = "compared"
    required = ("done",)  # of the rest what is known

    done: bool = True
    why: str | None = None
    data: str | None = None
    rows: int | None = None
    max_difference: float | None = None
    spread: float | None = None
    relative_error: float | None = None
    cosine: float | None = None
    embeddings: Embeddings | None = None
    loss: PairedFigure | None = None
    accuracy: PairedFigure | None = None
    scored: int | None = None
    scores: Mapping[str, PairedFigure] = field(default_factory=dict)  # by the metrics of scores, marks, or lm-eval


@dataclass(frozen=True)
class Proof(RecordedInFull):
    """The account of the fresh process that reloaded a result: how, what it counted, and how outputs compare."""

    WHERE = "proof"
    OPTIONAL = ("compared",)

    loaded_with: str
    parameters: int
    output: tuple[int, ...] = ()
    finite: bool = True
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    loss_sum: float = 0.0
    count: int = 0
    right: int = 0
    compared: Comparison | None = None

    @property
    def tensors(self) -> str:
        """What was found of the names of tensors, in words."""
        if not self.missing:
            return "no missing and no unexpected tensors"
        names = ", ".join(self.missing[:2]) + (", ..." if len(self.missing) > 2 else "")
        return f"no unexpected tensors; what the source lacks, too, is initialised anew ({names})"


# -- the plan as it was carried out ---------------------------------------------------------------
#
# Shapes, kept layers, operators, and how heads were made decide what a model is taken for (`undo`, `diff`, a teacher),
# so odd ones are damage; all else is shown, and odd values of it are None or empty (`Recorded`).


@dataclass(frozen=True)
class Step(Recorded):
    """One operator. `exactness`: "exact" leaves the function of what it touches unchanged, "near" approximates it,
    "fresh" forgets it.
    """

    WHERE = "operators"
    SURE = ("name", "exactness", "settings")
    required = ("settings",)

    name: str
    exactness: str
    says: str
    settings: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRecord(Recorded):
    """A plan: what is kept of which source, by which operators, and what that saves. `layers` are those of the source
    that are kept; `inferred` is what was found of a family that nobody declared; `method` has its settings by name.
    """

    WHERE = "plan"
    SURE = ("head_policy", "seed", "method", "class_attention", "before", "after", "layers", "operators")

    source: str = ""
    architecture: str = ""
    inferred: JsonObject = field(default_factory=dict)
    head_policy: str | int = ""
    why: str = ""
    init: str = ""
    seed: int | None = None
    method: JsonObject = field(default_factory=dict)
    calibrated: bool = False
    class_attention: bool = False
    before: Shape | None = None
    after: Shape | None = None
    layers: tuple[int, ...] = ()
    operators: tuple[Step, ...] = ()
    exactness: str = ""
    parameters_before: Mapping[str, int] = field(default_factory=dict)
    parameters_after: Mapping[str, int] = field(default_factory=dict)
    saved_by: Mapping[str, int] = field(default_factory=dict)
    flops_before: JsonObject | None = None
    flops_after: JsonObject | None = None
    flops_saved_by: JsonObject | None = None

    def __post_init__(self) -> None:
        if isinstance(self.head_policy, str):  # a size is a word or a number
            object.__setattr__(self, "head_policy", text(self.head_policy))

    def __bool__(self) -> bool:
        """Whether anything is known of the plan."""
        return bool(self.as_dict())

    @property
    def required(self) -> Collection[str]:
        """A plan says all of itself."""
        return set(self.__dataclass_fields__) - {"inferred"} if self.before is not None else ()


# -- where a model comes from ----------------------------------------------------------------------


@dataclass(frozen=True)
class Origin(RecordedInFull):
    """What was cut. `name` is a preset, a hub id, `timm/NAME`, a relative path, or the last part of an absolute one;
    `sha256` has the digest of every weight file. `code` has those of modelling files that came with the checkpoint and
    ran, because --trust-remote-code said so.
    """

    WHERE = "source"
    SURE = ("name", "kind", "sha256", "notes", "code")
    OPTIONAL = ("code",)

    name: str = "?"
    kind: str | None = None  # preset | folder | hub | timm
    preset: str | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SurgeryRecord(RecordedInFull):
    """All of surgery.json. `plan` is the plan as it was carried out, `decided` what was chosen on the way. An exact
    plan also keeps what undoing it needs: the source's config and record; `restored` is the record that the model had
    in the first place, where surgery was undone.
    """

    WHERE = NAME
    OPTIONAL = ("call", "judged", "fitted", "source_config", "source_surgery", "restored", "files")
    KEYS: ClassVar[Mapping[str, str]] = {"form": "schema_version"}

    source: Origin
    plan: PlanRecord = field(default_factory=PlanRecord)
    created: str | None = None
    call: str = ""  # the line of the terminal that does it again
    initialised: str | None = None  # transfer | fresh | fresh-attention | trained
    history: tuple[Mapping[str, Any], ...] = ()
    decided: Decisions = field(default_factory=Decisions)
    versions: Mapping[str, str] = field(default_factory=dict)
    proof: Proof | None = None
    language: bool = False  # whether the scores are those of a language model
    judged: Mapping[str, Comparison] = field(default_factory=dict)  # on data that was named for it, by name
    fitted: tuple[Mapping[str, Any], ...] = ()  # splits (rule and digests) of what else the weights were fitted on
    source_config: Mapping[str, Any] | None = None
    source_surgery: SurgeryRecord | None = None
    restored: SurgeryRecord | None = None
    files: tuple[str, ...] = ()  # of the folder, so that --force deletes nothing else
    form: int = FORM

    @property
    def learned(self) -> bool:
        """Whether the weights know anything."""
        return self.initialised != FRESH

    @property
    def tower(self) -> str | None:
        """The part of a model of several (text, vision, audio) that surgery was for."""
        return towers.of_section(self.plan.inferred.get("tower"))

    @property
    def all_fitted(self) -> list[Mapping[str, Any]]:
        """The splits of all data that decided the weights, in this cut, before and after it; an empty one where that
        is not known.
        """
        used = self.decided.calibration
        return [*self.fitted, *(one.split for one in (used.sources or (used,) if used else ()))]

    @property
    def preset(self) -> str:
        """The preset that the model comes from in the first place; "" where that is none."""
        first = self.history[0].get("source") if self.history else self.source.as_dict()
        return text(first.get("preset")) if isinstance(first, Mapping) else ""

    def as_trained(self) -> SurgeryRecord:
        """The record of the same model after a training, in a folder that is another one. What was judged was the
        model before it.
        """
        return replace(self, initialised=TRAINED, files=(), judged={})


class NewerRecord(UnsupportedModel):
    """A surgery.json in the form of a later version, for a command that would build on what it says."""


# Of a command that only shows: what can be read of a later version's record counts, and who is told here is told so.
TOLD: ContextVar[Say | None] = ContextVar("who is told of newer records", default=None)


def read(folder: Path | None) -> SurgeryRecord | None:
    """The record of a folder; None where there is none. Raises `DamagedRecord`, and `NewerRecord` for one of a later
    version, unless that is only shown.
    """
    path = folder / NAME if folder else None
    if path is None or not path.exists():
        return None
    with raised_as(DamagedRecord):
        data = jsonfile.read_object(path)
    form, tell = data.get("schema_version"), TOLD.get()
    if isinstance(form, int) and form > FORM:
        said = f"{path} was written by a newer leansurgeon (form {form}; this one reads {FORM})"
        if tell is None:
            raise NewerRecord(f"{said}, so what was done to the model is not known.", "Update leansurgeon.")
        tell(f"{said}: what is shown of it may be wrong. Update leansurgeon.")
    try:
        return SurgeryRecord.from_dict(data)
    except DamagedRecord as error:
        raise DamagedRecord(f"{path}: {error.message}", error.hint) from None


def read_if_whole(folder: Path | None) -> SurgeryRecord | None:
    """`read`, and None for one that is damaged: for those who only want to know more. Raises `NewerRecord`."""
    try:
        return read(folder)
    except DamagedRecord:
        return None


def write(folder: Path, record: SurgeryRecord) -> SurgeryRecord:
    """Write the record of a folder, whole or not at all; returns it as it stands there, without absolute paths."""
    record = hide_places(record)
    write_durably(folder / NAME, json.dumps(record.as_dict(), indent=2) + "\n")
    return record


def hide_places(record: SurgeryRecord) -> SurgeryRecord:
    """The record without a word on where things lie on this machine."""
    source = record.source
    name = source.name if source.kind in ("hub", "timm", "preset") else public(source.name)
    config = record.source_config
    return replace(
        record,
        source=replace(source, name=name, notes=tuple(without_places(source.notes))),
        plan=PlanRecord.from_dict(without_places(record.plan.as_dict())),
        history=tuple(without_places(record.history)),
        decided=Decisions.from_dict(without_places(record.decided.as_dict())),
        call=without_places(record.call),
        judged={without_places(name): comparison for name, comparison in record.judged.items()},
        source_config=None if config is None else without_place(config),
        source_surgery=record.source_surgery and hide_places(record.source_surgery),
        restored=record.restored and hide_places(record.restored),
    )
