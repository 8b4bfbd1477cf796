"""Inspect: what a model is, where its parameters sit, and what may be wrong with it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from leansurgeon.commands.command import Command
from leansurgeon.errors import UnsupportedModel, short
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.reading.values import text
from leansurgeon.request import Access, Columns, Opt
from leansurgeon.shape import PARTS
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.architectures.base import Architecture
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.measure.inspection import Inspection
    from leansurgeon.surgery.check.doctor import Check

MARKS = {True: "ok", False: "WRONG", None: "not tested"}
UNFIT = 3  # exit code: the files contradict each other, or the declaration does not fit the model


class InspectRequest(Access):
    """A model, and what is looked at beside its files."""

    model: Annotated[str, Opt("Preset, folder, run, hub id or timm/NAME.", complete="sources", positional=True)]
    doctor: Annotated[bool, Opt("Put what leansurgeon believes of this family to the test on the model itself.")] = (
        False
    )
    data: Annotated[
        str | None,
        Opt("Also measure kappa on sample data, as `leansurgeon kappa` does. A run shows its own anyway.", "Data"),
    ] = None
    columns: Columns = None
    infer: Annotated[bool, Opt("Print the declaration that is inferred for its family, with what was proven.")] = False
    tower: Annotated[str | None, Opt("Part of a model with several: text, vision or audio.", "Shape")] = None


@dataclass(frozen=True)
class Inspected:
    """What was found; `checks` are the doctor's, `kappa` what was measured."""

    found: Inspection
    checks: list[Check] | None
    kappa: JsonObject | None

    @property
    def exit_code(self) -> int:
        """3 where files contradict each other or a check failed."""
        bad = any(finding.level == "contradiction" for finding in self.found.findings)
        return UNFIT if bad or any(check.ok is False for check in self.checks or ()) else 0

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        checks = self.checks and [asdict(check) for check in self.checks]
        return {"schema_version": 1, **self.found.as_dict(), "doctor": checks, "kappa": self.kappa}

    def __str__(self) -> str:
        lines = describe(self.found) + (diagnosis(self.checks) if self.checks else [])
        if self.kappa:
            from leansurgeon.report.tables.kappa import tables

            lines += ["", *tables(self.kappa)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Declaration:
    """The declaration that was inferred for a family."""

    architecture: Architecture

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        return {"schema_version": 1, **self.architecture.evidence, "refused": dict(self.architecture.refused)}

    def __str__(self) -> str:
        from leansurgeon.architectures.infer.printing import as_source

        return as_source(self.architecture)


def inspect(request: InspectRequest, say: Say) -> Inspected | Declaration:
    """Shape, parameters, head policy, origin and known traps of MODEL.

    Exit code 3 when its files contradict each other or --doctor finds the declaration of its family wrong.

    Raises `UnsupportedModel` for what cannot be read.
    """
    from leansurgeon.checkpoints.record import shown_if_newer
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure import inspection

    with ExitStack() as keep:
        keep.enter_context(shown_if_newer(say))
        try:
            weights = bool(request.data)
            source = open_source(request.model, allow_pickle=request.allow_pickle, weights=weights, keep=keep)
        except UnsupportedModel as error:
            raise inspection.explain(request.model, error) from None
        if request.infer:
            return Declaration(infer_declaration(source))
        found, checks = inspection.inspect(source), None
        if request.doctor:
            from leansurgeon.surgery.check.doctor import examine

            say("Testing the declaration on the model; it is loaded several times ...")
            checks = examine(source)
        return Inspected(found, checks, measure_or_read_kappa(source, request, say))


def infer_declaration(source: Source) -> Architecture:
    """The declaration that is inferred for a source's family, also where one was written by hand."""
    from leansurgeon.architectures import infer

    if source.architecture.evidence:
        return source.architecture
    if source.architecture.library == "timm":
        config = source.config
        return infer.architecture(infer.timm_config(config["architecture"], config["model_args"]))
    if source.architecture.library == "transformers":
        return infer.architecture(infer.completed(source.config))
    raise UnsupportedModel("Families of transformers and timm are inferred, and this is none.")


def measure_or_read_kappa(source: Source, request: InspectRequest, say: Say) -> JsonObject | None:
    """Kappa on the sample data that --data names, else what the training of this run's model has left."""
    from leansurgeon.commands.samples import data_for_kappa
    from leansurgeon.training.runs.folder import LAST
    from leansurgeon.training.runs.summary import read_if_whole

    if request.data:
        sample = data_for_kappa(source, request.data, request.model, 0, say, request.columns)
        from leansurgeon.measure.kappa.study import study

        return study(source, sample, say=say)
    run = source.folder.parent if source.folder else None
    summary = read_if_whole(run) if run and (run / LAST).is_dir() else None
    return summary and summary.kappa


def describe(inspection: Inspection) -> list[str]:
    """The inspection as a person reads it, at most 80 columns."""
    from tabulate import tabulate

    source = inspection.source
    arch, shape, parameters = source.architecture, source.shape, source.parameters
    cls = (source.config.get("architectures") or [""])[0]
    lines = [*wrap(f"{short(source.name, 70)}: {arch.name} of {arch.library}{', ' + cls if cls else ''}"), ""]
    several = len(shape.stages) > 1
    rows = [
        [*([i] if several else []), s.depth, s.heads, s.head_dim, s.kv_heads, s.inner, s.width, s.mlp_dim]
        for i, s in enumerate(shape.stages, 1)
    ]
    headers = ["layers", "heads", "head_dim", "kv heads", "inner width", "width", "MLP"]
    lines += [*tabulate(rows, headers=[*(["stage"] if several else []), *headers]).splitlines(), ""]
    parts = [
        [label, f"{n:,}", f"{100 * n / parameters.total:.1f} %"]
        for label, n in ((label, getattr(parameters, key)) for key, label in PARTS.items())
    ]
    lines += [*tabulate(parts, headers=["parameters", "", ""], colalign=("left", "right", "right")).splitlines(), ""]
    lines += paragraph("Heads", inspection.heads)
    lines += paragraph("Origin", origin(inspection))
    for finding in inspection.findings:
        lines += paragraph(finding.level.capitalize(), finding.says)
    if not inspection.findings:
        lines += paragraph("Traps", "none known.")
    return lines


def origin(inspection: Inspection) -> str:
    """Where the model comes from, by its surgery.json."""
    record = inspection.record
    if record is None:
        preset = inspection.source.preset
        return (
            f"the preset {preset.name}."
            if preset
            else "no surgery.json, so not made by leansurgeon, or copied without it."
        )
    steps = ", ".join(f"{text(step.name)} ({text(step.exactness)})" for step in record.plan.operators) or "no change"
    by = record.versions.get("leansurgeon", "?")
    return f"{record.source.name}, by leansurgeon {by} on {(record.created or '?')[:10]}: {steps}."


def diagnosis(checks: list[Check]) -> list[str]:
    """The doctor's checks as lines of text, and how many of them failed."""
    lines = [""]
    for check in checks:
        lines += paragraph(f"{MARKS[check.ok]}: {check.name}", check.says)
    wrong = sum(check.ok is False for check in checks)
    return [*lines, f"{wrong} of {len(checks)} checks failed." if wrong else "The declaration fits the model."]


def paragraph(title: str, text: str) -> list[str]:
    """Title and text as lines of the terminal's width, indented."""
    return wrap(f"{title}: {text}", indent="  ")


COMMAND = Command(
    "inspect",
    InspectRequest,
    inspect,
    ("leansurgeon inspect digits-vit", "leansurgeon inspect my-model --infer"),
)
