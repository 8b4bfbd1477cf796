"""The whole operation: let sample data decide what the plan leaves open, write the result into an output folder that is
absent or complete, and prove it before it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from leansurgeon.architectures.base import Architecture, Config, TensorSpec
from leansurgeon.architectures.towers import writes_text
from leansurgeon.checkpoints.kind import class_name
from leansurgeon.checkpoints.proof.prove import prove
from leansurgeon.checkpoints.provenance import write_surgery
from leansurgeon.checkpoints.publish.card import write_card
from leansurgeon.checkpoints.publish.output import check_apart, output_folder
from leansurgeon.checkpoints.record import Proof, SurgeryRecord
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.checkpoints.source import Source, watch_for_changes
from leansurgeon.errors import (
    Diverged,
    Interrupted,
    LeanSurgeonError,
    OutOfMemory,
    UnsupportedModel,
    UsageError,
    memory_is_short,
)
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.progress import Say, silent
from leansurgeon.surgery import drop_layers
from leansurgeon.surgery.method import LAYERS
from leansurgeon.surgery.planning import Plan, keeping
from leansurgeon.surgery.resume import ResumeState, key_of, place_of
from leansurgeon.surgery.transfer import apply

if TYPE_CHECKING:
    from leansurgeon.checkpoints.model import Placement


@dataclass(frozen=True)
class DecidedCut:
    """A plan with all decisions made: `edits` are the tensors changed with sample data, `record` explains how."""

    plan: Plan
    edits: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    record: Decisions = field(default_factory=Decisions)
    calibration: Calibration | None = field(default=None, repr=False)
    close: Callable[[], None] = lambda: None
    forget: Callable[[], None] = lambda: None  # deletes what an interrupted cut would need, once the result exists


def decide(
    steps: Plan,
    calibration: Calibration | None = None,
    say: Say = silent,
    *,
    device: str = "cpu",
    output: Path | None = None,
    resume: bool = False,
) -> DecidedCut:
    """Let sample data choose and heal what the plan leaves open, on `device`. An exact plan needs no data; there it
    only serves the proof. Finished steps are kept next to the `output` folder until it is written; `resume` takes those
    of an interrupted cut. Raises what `calibrate` raises.
    """
    source, method = steps.source, steps.method
    if steps.exactness != "near" or calibration is None:
        if calibration and LAYERS[method.layers]:
            say("The plan keeps the function as it is, so the sample data only serves the proof.")
        record = Decisions(calibration=calibration.as_record() if calibration else None)
        return DecidedCut(steps, record=record, calibration=calibration)
    from leansurgeon.measure.costs.precision import has_bf16
    from leansurgeon.surgery.calibrate import calibrate

    kept = ResumeState()
    if output is not None:
        kind = device.split(":")[0]
        key = key_of(steps, calibration, {"device": kind, "bf16": has_bf16(kind)})
        place = place_of(output)
        there = place.exists()
        kept = ResumeState(place, key, resume=resume)
        if resume:
            other = "the interrupted cut here is another one" if there else "there is no interrupted cut here"
            say(f"Resuming the cut in {place} ..." if kept.goes_on else f"Nothing to resume: {other}.")
        elif there:
            say(f"Found an interrupted cut in {place}; starting over (--resume continues it).")
    place = "" if device == "cpu" else f", on {device}"
    say(f"Calibrating on {calibration.says}{place} ...")
    try:
        with blaming_weights(source):
            outcome = calibrate(steps, calibration, say, device, kept)
    except (Diverged, UnsupportedModel, UsageError):
        kept.remove()  # it would fail again
        raise
    except Exception as error:
        if memory_is_short(error):
            place, other = ("This machine", "") if device == "cpu" else (device, ", or cut on another (--device)")
            said = f"{place} ran out of memory while the cut was made."
            raise OutOfMemory(said, f"Free some memory{other}.") from error
        raise
    tried = [candidate.as_dict() for candidate in outcome.record.candidates]
    choice = drop_layers.LayerChoice(outcome.record.layers, outcome.record.criterion, {"candidates": tried})
    return DecidedCut(keeping(steps, choice), outcome.edits, outcome.record, calibration, outcome.close, kept.remove)


def unread(steps: Plan) -> tuple[str, ...]:
    """Return the tensors outside the blocks that the result's class would not read. Takes no memory for them and runs
    before anything is computed. Raises `UnsupportedModel` if the result would not load as it should.
    """
    from leansurgeon.checkpoints.kind import body_class, classes_of
    from leansurgeon.checkpoints.model import place

    specs, source = steps.result.specs, steps.source
    held, _ = classes_of(source.folder, source.config, source.architecture)

    kinds = drop_layers.kinds_of(source)
    lost = next((i for i, kind in enumerate(kinds) if kind not in [kinds[k] for k in steps.layers]), None)

    def find_placement(specs: Sequence[TensorSpec], config: Config, family: Architecture) -> Placement | None:
        """Place the tensors in the class that the files hold."""
        if held != class_name(source.config):
            config = config | {"architectures": [body_class(family, held)]}
        sizes = {spec.name: spec.shape for spec in specs if spec.role != "tied"}
        return place(config, family, sizes, run=lost is not None)

    found = find_placement(specs, steps.target.config(steps.layers), steps.architecture)
    if found is None:
        return ()
    if not found.runs and (before := find_placement(source.specs, source.config, source.architecture)) and before.runs:
        there, whole = ", ".join(map(str, steps.layers)), drop_layers.with_every_kind(kinds, steps.layers)
        raise UsageError(
            f"{steps.architecture.name} does not run with layers {there} alone: none is of the kind of layer {lost}.",
            "--keep names the layers that stay."
            + (f" For example: --keep {','.join(map(str, whole))}" if whole != steps.layers else ""),
        )
    outside = {spec.name for spec in specs if spec.layer is None}
    wrong = [name for name in found.unexpected if name not in outside] + list(found.mismatched)
    if found.missing and not wrong:
        before = find_placement(source.specs, source.config, source.architecture)
        wrong = [name for name in found.missing if before and name not in before.missing]
    if wrong:
        raise UnsupportedModel(
            f"{steps.architecture.name} would not load the result: '{wrong[0]}' is missing there, has no place or "
            f"another size ({len(wrong)} such tensors). Nothing was computed.",
            "Please report this.",
        )
    return found.unexpected


@contextmanager
def telling_what_is_kept(folder: Path) -> Iterator[None]:
    """If something fails after steps of the cut to `folder` were saved, add how to resume to the error."""
    try:
        yield
    except (LeanSurgeonError, OSError) as error:
        if not place_of(folder).exists() or isinstance(error, Interrupted):
            raise
        if isinstance(error, LeanSurgeonError):
            said = error
        else:
            why = f"'{error.filename}': {error.strerror}" if error.filename and error.strerror else str(error)
            said = LeanSurgeonError(f"{folder} could not be made: {why}.")
        said.hint = f"{said.hint or ''} Repeat the command with --resume to continue where it stopped.".strip()
        raise said from error


def carry_out(
    decided: DecidedCut,
    folder: Path,
    *,
    force: bool = False,
    check: bool = True,
    keep_unproved: bool = False,
    call: str = "",
    say: Say = silent,
) -> SurgeryRecord:
    """Write the result to `folder` and return the record in its surgery.json; `call` is the command line that repeats
    it.

    A result that does not reload with the planned number of parameters, or that should be exact and is not, is an error
    and leaves no folder. `check` False skips the proof. `keep_unproved`: Ctrl-C during the proof keeps the result and
    raises `Interrupted`, which says so.
    """
    steps, source = decided.plan, decided.plan.source
    check_apart(folder, source.folder)
    with output_folder(folder, force=force) as aside, watch_for_changes(source):
        try:
            chosen = apply(steps, aside, decided.edits)
        except (MemoryError, RuntimeError) as error:
            if not memory_is_short(error):
                raise
            raise OutOfMemory(
                f"This machine has too little memory for a model of {steps.parameters_after.total:,} parameters.",
                "Choose fewer heads or layers.",
            ) from None
        finally:
            decided.close()
        proof, stopped = None, None
        if check:
            say("Written; now reloading it in a fresh process ...")
            try:
                with blaming_weights(source):
                    proof = prove_result(decided, aside)
            except KeyboardInterrupt as stop:
                if not keep_unproved:
                    raise
                stopped = stop
        record = write_surgery(
            aside,
            source,
            steps.as_record(),
            replace(decided.record, kept_heads=chosen.kept_heads, balance=chosen.balance),
            proof,
            language=head_of(decided.calibration) in ("causal-lm", "masked-lm"),
            call=call,
        )
        write_card(aside, record, folder.resolve().name, source.folder)
    decided.forget()
    if stopped is not None:
        said = Interrupted(f"Interrupted while the result was proved: it is kept in {folder}, unproved.")
        said.exit_code = getattr(stopped, "exit_code", said.exit_code)
        raise said from stopped
    return record


@contextmanager
def blaming_weights(source: Source) -> Iterator[None]:
    """If activations are not finite, check whether the source's weights hold NaN or infinity, and name the tensor."""
    try:
        yield
    except Diverged:
        names = [spec.name for spec in source.specs] if source.weights else []
        name = next((name for name in names if not source.weights.finite(name)), None)
        if name is None:
            raise
        raise Diverged(
            f"'{name}' of {source.name} holds NaN or infinity, so the model computes nothing that could be kept.",
            "Start from a sound checkpoint.",
        ) from None


def head_of(data: Calibration | None) -> str | None:
    """Return the head that the data's task is for; None without data or task."""
    return data.task.head if data is not None and data.task is not None else None


def kind_of(data: Calibration | None) -> str:
    """Return how `prove` reads the model's output on the data: as a causal language model, or as it is."""
    return "causal-lm" if head_of(data) == "causal-lm" else "plain"


def prove_result(decided: DecidedCut, folder: Path) -> Proof:
    """Prove the result. A result with learned weights is compared with its source: an exact one always, a near one only
    on real data, which cannot run through a whole model of several towers.
    """
    steps, data, source = decided.plan, decided.calibration, decided.plan.source
    section = source.architecture.section
    data = data if not section or writes_text(section, class_name(source.config)) else None
    compare = steps.init != "fresh" and source.learned and (steps.exactness == "exact" or data is not None)
    return prove(
        folder,
        steps.parameters_after.total,
        source=source.folder if compare else None,
        batches=data.heldout if compare and data else None,
        held_out=data is None or data.stands_apart(source.fitted),
        kind=kind_of(data),
        exact=steps.exactness == "exact",
        families=(steps.architecture, source.architecture),
        origin=source.folder if source.learned else None,
    )
