"""Compare a result with its source on data not used to make it, with intervals, and note it in the record and card."""

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
    """Compare the outputs of the model in `folder`, which has `parameters` parameters, with its source's, on `batches`
    of the data (None: the held-out ones). `family` is the model's, if known. `fitted` are the splits that it was fitted
    on, besides those of its source: unless these rule the batches out, the comparison does not call them held out.
    Raises what `prove` raises.
    """
    batches = data.heldout if batches is None else batches
    kind, families = kind_of(data), (family, source.architecture)
    how = {"batches": batches, "kind": kind, "held_out": data.stands_apart((*source.fitted, *fitted))}
    return prove(folder, parameters, source=source.folder, families=families, **how).compared


def note(
    folder: Path, made: SurgeryRecord, judged: Mapping[str, Comparison], *, language: bool = False
) -> SurgeryRecord:
    """Add comparisons to the record, by the names of the data, and write it to the folder and its card."""
    made = record.write(folder, replace(made, judged={**made.judged, **judged}, language=made.language or language))
    card.judge(folder, made)
    return made
