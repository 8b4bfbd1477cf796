"""surgery.json: what was done to a model, its source, and the findings of the proof, as typed values.

All other code uses `SurgeryRecord`, never the file. A missing key is one that older versions did not write, and takes
its default; a key of the wrong kind is damage. Keys of later versions are kept as they are (`other`), so that they
survive being read and written again.
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

FORM = 1  # increased when an older reader would misread the file
TRAINED, FRESH = "trained", "fresh"  # `initialised` after a training, and for weights that have not learned anything


# -- what a proof found ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedFigure(RecordedInFull):
    """One number of source and result on the same samples.

    The difference lies between `low` and `high` with 95 % confidence (None if unknown).
    """

    WHERE = "compared"
    OPTIONAL = ("low", "high")

    source: float
    result: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Embeddings(RecordedInFull):
    """Cosine of pooled embeddings of source and result: mean, first percentile, number of samples.

    Also the rank correlation of the similarities of all pairs, and the share of each sample's `nearest` neighbours that
    are kept (None if unknown).
    """

    WHERE = "embeddings"
    OPTIONAL = ("low", "high")

    cosine: float
    first_percentile: float
    samples: int = 0
    rank_correlation: float | None = None
    nearest_kept: float | None = None
    nearest: int | None = None
    low: float | None = None  # 95 % interval of the mean cosine over all such samples
    high: float | None = None


@dataclass(frozen=True)
class Comparison(RecordedInFull):
    """Outputs of a result compared with its source's on the same inputs; `why` says why it was not `done`.

    `data` is "noise", "held-out data" or data that may have been trained on. `rows` outputs of real tokens are
    compared, `scored` labels counted. `relative_error` is the norm of the difference over that of the source's outputs.
    """

    WHERE = "compared"
    required = ("done",)  # the rest only if known

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
    scores: Mapping[str, PairedFigure] = field(default_factory=dict)  # by metric of scores, marks or lm-eval


@dataclass(frozen=True)
class Proof(RecordedInFull):
    """Findings of the fresh process that reloaded a result: how, what it counted, and how outputs compare."""

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
        """Whether tensors were missing, in words."""
        if not self.missing:
            return "no missing and no unexpected tensors"
        names = ", ".join(self.missing[:2]) + (", ..." if len(self.missing) > 2 else "")
        return f"no unexpected tensors; what the source lacks, too, is initialised anew ({names})"


# -- the plan as it was carried out ---------------------------------------------------------------
#
# Shapes, kept layers, operators and the making of heads decide how a model is used (`undo`, `diff`, a teacher), so odd
# values there are damage. Everything else is only shown, and odd values become None or empty (`Recorded`).


@dataclass(frozen=True)
class Step(Recorded):
    """One operator.

    `exactness` "exact" leaves the function of what it touches unchanged, "near" approximates it, "fresh" reinitialises
    it.
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
    """A plan: which source layers are kept (`layers`), by which operators, and what that saves.

    `inferred` is what was found of an undeclared family; `method` holds its settings by name.
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
        """All fields but `inferred`, once there is a plan."""
        return set(self.__dataclass_fields__) - {"inferred"} if self.before is not None else ()


# -- where a model comes from ----------------------------------------------------------------------


@dataclass(frozen=True)
class Origin(RecordedInFull):
    """What was cut.

    `name` is a preset, a hub id, `timm/NAME`, a relative path, or the last part of an absolute one. `sha256` has the
    digest of every weight file; `code` those of the checkpoint's modelling files that ran because of
    --trust-remote-code.
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
    """The content of surgery.json. `plan` is the executed plan, `decided` what was chosen on the way.

    An exact plan also keeps what undoing needs: the source's config and record. `restored` is the original record of a
    model whose surgery was undone.
    """

    WHERE = NAME
    OPTIONAL = ("call", "judged", "fitted", "source_config", "source_surgery", "restored", "files")
    KEYS: ClassVar[Mapping[str, str]] = {"form": "schema_version"}

    source: Origin
    plan: PlanRecord = field(default_factory=PlanRecord)
    created: str | None = None
    call: str = ""  # command line that repeats it
    initialised: str | None = None  # transfer | fresh | fresh-attention | trained
    history: tuple[Mapping[str, Any], ...] = ()
    decided: Decisions = field(default_factory=Decisions)
    versions: Mapping[str, str] = field(default_factory=dict)
    proof: Proof | None = None
    language: bool = False  # whether the scores are those of a language model
    judged: Mapping[str, Comparison] = field(default_factory=dict)  # comparisons on other data, by name of the data
    fitted: tuple[Mapping[str, Any], ...] = ()  # splits (rule, digests) of other data that the weights were fitted on
    source_config: Mapping[str, Any] | None = None
    source_surgery: SurgeryRecord | None = None
    restored: SurgeryRecord | None = None
    files: tuple[str, ...] = ()  # files of the folder, so that --force deletes nothing else
    form: int = FORM

    @property
    def learned(self) -> bool:
        """Whether the weights have learned anything."""
        return self.initialised != FRESH

    @property
    def tower(self) -> str | None:
        """The tower (text, vision, audio) of a multi-tower model that was cut."""
        return towers.of_section(self.plan.inferred.get("tower"))

    @property
    def all_fitted(self) -> list[Mapping[str, Any]]:
        """The splits of all data that the weights were fitted on, before, during and after this cut.

        A split is empty if it is not known.
        """
        used = self.decided.calibration
        return [*self.fitted, *(one.split for one in (used.sources or (used,) if used else ()))]

    @property
    def preset(self) -> str:
        """The preset that the model originally comes from; "" if there is none."""
        first = self.history[0].get("source") if self.history else self.source.as_dict()
        return text(first.get("preset")) if isinstance(first, Mapping) else ""

    def as_trained(self) -> SurgeryRecord:
        """Return the record of the same model after a training, which writes another folder.

        Earlier judgements are dropped, because they describe the model before it.
        """
        return replace(self, initialised=TRAINED, files=(), judged={})


class NewerRecord(UnsupportedModel):
    """A surgery.json of a later version, opened by a command that would rely on its content."""


# Set by commands that only show: they read what they can of a later version's record, and the user is warned here.
TOLD: ContextVar[Say | None] = ContextVar("who is told of newer records", default=None)


def read(folder: Path | None) -> SurgeryRecord | None:
    """Return the record of a folder; None if there is none.

    Raises `DamagedRecord`, and `NewerRecord` for a later version unless it is only shown (`TOLD`).
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
    """Return the record, or None if it is damaged, for callers to whom it is optional. Raises `NewerRecord`."""
    try:
        return read(folder)
    except DamagedRecord:
        return None


def write(folder: Path, record: SurgeryRecord) -> SurgeryRecord:
    """Write the record of a folder atomically; return it as written, without absolute paths."""
    record = hide_places(record)
    write_durably(folder / NAME, json.dumps(record.as_dict(), indent=2) + "\n")
    return record


def hide_places(record: SurgeryRecord) -> SurgeryRecord:
    """Return the record without absolute paths of this machine."""
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
