"""A result and its source on data that had no part in the making: both on the same samples, with intervals, and noted
in the result's record and card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from leansurgeon.architectures.base import Architecture
from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.proof.prove import prove
from leansurgeon.checkpoints.publish import card
from leansurgeon.checkpoints.record import Comparison, SurgeryRecord
from leansurgeon.checkpoints.source import Source
from leansurgeon.measure.data.calibration import Batch, Calibration
from leansurgeon.surgery.shrink import kind_of


def on_data(
    data: Calibration,
    source: Source,
    folder: Path,
    parameters: int,
    batches: Sequence[Batch] | None = None,
    family: Architecture | None = None,
    fitted: Iterable[Mapping[str, str]] = (),
) -> Comparison:
    """The outputs of the model in `folder`, which has so many parameters, against those of its source, on `batches` of
    the data (None: the held-out ones). `family` is that of the model, where it is known, and `fitted` are the splits of
    what it was fitted on beside its source: where nobody can say that these batches were not, the comparison does not
    call them held out. Raises what `prove` raises.
    """
    batches = data.heldout if batches is None else batches
    kind, families = kind_of(data), (family, source.architecture)
    how = {"batches": batches, "kind": kind, "held_out": data.stands_apart((*source.fitted, *fitted))}
    return prove(folder, parameters, source=source.folder, families=families, **how).compared


def note(
    folder: Path, made: SurgeryRecord, judged: Mapping[str, Comparison], *, language: bool = False
) -> SurgeryRecord:
    """The record with what was found, by the names of the data; it stands in the folder, and in its card."""
    made = record.write(folder, replace(made, judged={**made.judged, **judged}, language=made.language or language))
    card.judge(folder, made)
    return made
