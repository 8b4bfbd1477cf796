"""Undo surgery: recover the source's shape and exact bits from a result of exact operators. Uses numpy only.

An exact operator loses nothing: the old heads and units are among the new ones, and surgery.json says which operator
put them where. The maps of `transfer.apply` (old index of every new entry) are applied in reverse. That requires the
entries to be as surgery left them: new heads and units silent, copies equal. Every tensor is checked, so a model
trained or edited after surgery is refused even if its record does not say so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np

from leansurgeon import architectures
from leansurgeon.architectures.base import Config, TensorSpec
from leansurgeon.checkpoints.config import check
from leansurgeon.checkpoints.digests import sha256
from leansurgeon.checkpoints.family import write_config
from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.proof.prove import prove
from leansurgeon.checkpoints.provenance import write_surgery
from leansurgeon.checkpoints.publish.card import write_card
from leansurgeon.checkpoints.publish.output import check_apart, output_folder
from leansurgeon.checkpoints.record import TRAINED, Step, SurgeryRecord
from leansurgeon.checkpoints.recorded.decided import Decisions, Verified
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import Source, tower_of, watch_for_changes
from leansurgeon.checkpoints.weights import RAW, TensorOut, write
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say, silent
from leansurgeon.surgery.class_attention import follow
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import Plan
from leansurgeon.surgery.transfer import FRESH, Transfer

SILENT = ("o", "down")  # roles whose new columns are zero
BACK = {  # operators that only move entries, and their inverses in words
    "add-heads": "take the added heads away",
    "split-heads": "join the children of every head",
    "widen-mlp": "take the added MLP units away",
}
UNDO = "undo-"
METHOD = {f.name for f in fields(Method)}


@dataclass(frozen=True)
class Undo:
    """How to undo: `plan` leads from the present model back to its source's shape, `forward` is the transfer
    to invert.
    """

    record: SurgeryRecord  # the surgery.json to undo
    plan: Plan
    forward: Transfer
    config: Config

    def tensors(self) -> list[TensorOut]:
        """Return the tensors in the order of the safetensors library (wide dtypes first, then names), so that a source
        file written by it is restored byte for byte.
        """
        outs = []
        for spec in self.forward.source.specs:  # copied, or gathered from the new one
            entry, picks = self.plan.source.weights.entries[spec.name], self.forward.picks(spec)
            if picks is None:
                outs.append(TensorOut(spec.name, entry.dtype, entry.shape, entry=entry))
            else:
                make = partial(self.gather_old, spec, picks)
                outs.append(TensorOut(spec.name, entry.dtype, spec.shape, make=make))
        return sorted(outs, key=lambda out: (-RAW[out.dtype].itemsize, out.name))

    def gather_old(self, spec: TensorSpec, picks: list[np.ndarray]) -> np.ndarray:
        """Gather the old entries, each from its first copy, given `picks` (the old index of every new entry, by axis).
        Raises `UsageError` if training has changed the other copies.
        """
        new = self.plan.source.weights.raw(spec.name)
        firsts = [first[places != FRESH] for places, first in (np.unique(p, return_index=True) for p in picks)]
        old = new[np.ix_(*firsts)]
        places = [np.flatnonzero(pick != FRESH) for pick in picks]
        copies = new[np.ix_(*places)]
        untouched = np.array_equal(copies, old[np.ix_(*[p[at] for p, at in zip(picks, places, strict=True)])])
        if spec.role in SILENT:
            untouched = untouched and np.count_nonzero(new) == np.count_nonzero(copies)
        elif spec.role == "head_mix" and new.ndim > 1:  # old heads receive nothing from new ones
            untouched = untouched and not new[np.ix_(places[0], np.flatnonzero(picks[1] == FRESH))].any()
        if not untouched:
            raise UsageError(
                f"'{spec.name}' has changed since surgery: entries that were silent or copies have been trained.",
                "A model that was trained after surgery cannot be undone; take the source itself.",
            )
        return old


# -- whether and how -------------------------------------------------------------------------------


def plan_undo(source: Source) -> Undo:
    """Return how to undo an opened result. Raises `UsageError` with the reason if that is impossible."""
    record = undoable(source)
    steps, before, now = record.plan, record.plan.before, source.shape
    if record.plan.after != now:
        raise UsageError(
            f"{source.name} has a different shape from its surgery.json, so the surgery cannot be undone.",
            f"`leansurgeon inspect {source.name}` says more.",
        )
    source = follow(source) if steps.class_attention else source
    was = Reshaped(source, source.architecture, before)
    config = record.source_config
    check(config or {}, source.folder)
    architecture = architectures.of(config, tower_of(record, config)) if config else source.architecture
    if architecture.name == source.architecture.name:
        architecture = replace(architecture, code=source.architecture.code)  # keeps the trust in foreign code
    config = config or architecture.with_shape(source.config, before)
    now_held, then_held = source.parameters, was.parameters
    back = Plan(
        before=now,
        target=replace(was, architecture=architecture),
        policy=str(steps.head_policy or "keep"),
        why=f"undone: {', '.join(step.name for step in record.plan.operators)}, as surgery.json records it",
        init="transfer",
        seed=steps.seed or 0,
        method=Method(**{key: value for key, value in steps.method.items() if key in METHOD}),
        calibrated=False,
        layers=tuple(range(now.depth)),
        operators=tuple(
            Step(UNDO + step.name, "exact", BACK[step.name], dict(step.settings))
            for step in reversed(record.plan.operators)
        ),
        parameters_before=now_held,
        parameters_after=then_held,
        saved_by={"heads": now_held.attention - then_held.attention, "mlp": now_held.mlp - then_held.mlp},
        class_attention=steps.class_attention,
    )
    made = Reshaped(replace(source, specs=was.specs), source.architecture, now)
    return Undo(record, back, Transfer(replace(back, before=before, target=made)), config)


def undoable(source: Source) -> SurgeryRecord:
    """Return the record to undo. Raises `UsageError` with the reason if it cannot be undone."""
    own = "Take the source itself."
    if source.record_trouble:
        raise UsageError(f"What was done to {source.name} is not known: {source.record_trouble}")
    record = source.record and (source.record.restored or source.record)
    if source.weights is None or record is None:
        raise UsageError(f"{source.name} has no surgery.json, so nothing is recorded that could be undone.")
    if record.plan.before is None or record.plan.after is None:
        raise UsageError(f"The surgery.json of {source.name} holds no plan, so the surgery cannot be undone.")
    names = [step.name for step in record.plan.operators]
    if not names or all(name.startswith(UNDO) for name in names):
        raise UsageError(f"{source.name} has the shape and the tensors of its source; nothing is left to undo.")
    lossy = next((step for step in record.plan.operators if step.exactness != "exact"), None)
    if lossy:
        raise UsageError(
            f"{lossy.name} cannot be undone, because it discards weights: {lossy.says}.",
            f"Source: {record.source.name}.",
        )
    if source.record.initialised == TRAINED:
        raise UsageError(
            f"The model was trained after {' and '.join(names)}: new heads and units are not silent any more, and old "
            "ones have moved on.",
            own,
        )
    if "balance" in names:
        raise UsageError(
            "balance cannot be undone to the bit: it puts values and outputs into another basis, and surgery.json does "
            "not keep the old one.",
            own,
        )
    strange = next((name for name in names if name not in BACK), None)
    sizes = [[stage.head_dim for stage in shape.stages] for shape in (record.plan.before, record.plan.after)]
    if strange or sizes[0] != sizes[1]:
        why = "heads of another size have rescaled scores" if not strange else "no way back is known"
        raise UsageError(f"{strange or 'split-heads'} cannot be undone to the bit: {why}.", own)
    return record


# -- carry out and verify --------------------------------------------------------------------------


def carry_out(steps: Undo, folder: Path, *, force: bool = False, say: Say = silent) -> SurgeryRecord:
    """Write the source's shape back to `folder`, verify it, and return the record of its surgery.json.

    If the written file has the recorded digest, it is the source's own (`verified.by` is `sha256`); otherwise it is
    reloaded and compared with the model that was undone.
    """
    source, total = steps.plan.source, steps.plan.parameters_after.total
    check_apart(folder, source.folder)
    with output_folder(folder, force=force) as aside, watch_for_changes(source):
        paths = write(aside, steps.tensors())
        write_config(aside, steps.config, steps.plan.architecture)
        companions.copy(source.folder, aside)
        origin, proof = steps.record.source, None
        recorded = set(origin.sha256.values())
        same = recorded and {sha256(path) for path in paths} == recorded
        verified = Verified("sha256" if same else "reload", origin.name, ())
        if not same:
            say("Written; now reloading it in a fresh process ...")
            families = (steps.plan.architecture, source.architecture)
            proof = prove(aside, total, source=source.folder, exact=True, families=families)
        restored = steps.record.source_surgery
        decided = Decisions(verified=verified)
        record = write_surgery(aside, source, steps.plan.as_record(), decided, proof, restored=restored)
        write_card(aside, record, folder.resolve().name, source.folder)
    return record
