"""Inspect: what a model is, where its parameters are, and what may be wrong with it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.options import ModelRequest
from leansurgeon.errors import UnsupportedModel, short
from leansurgeon.progress import Say
from leansurgeon.reading.values import text
from leansurgeon.request import Access, Opt, SourceName
from leansurgeon.shape import PARTS
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.architectures.base import Architecture
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.measure.inspection import Inspection

MARKS = {True: "ok", False: "WRONG", None: "not tested"}
UNFIT = 3  # exit code: the files contradict each other, or the declaration does not fit the model


class InspectRequest(ModelRequest, Access):
    """A model, and what to check besides its files."""

    model: SourceName
    doctor: Annotated[bool, Opt("Test what leansurgeon assumes of this family on the model itself.")] = False
    infer: Annotated[bool, Opt("Print the declaration that is inferred for its family, with what was proven.")] = False


def inspect(request: InspectRequest, say: Say) -> Answer:
    """Show shape, parameters, head policy, origin and known traps of MODEL.

    Exit code 3 when its files contradict each other or --doctor finds the declaration of its family wrong.

    Raises `UnsupportedModel` for a model that cannot be read.
    """
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure import inspection
    from leansurgeon.report.tables.kappa import tables
    from leansurgeon.training.runs.folder import LAST
    from leansurgeon.training.runs.summary import read_if_whole

    with ExitStack() as keep:
        source = open_source(request.model, allow_pickle=request.allow_pickle, weights=False, keep=keep)
        if request.infer:
            from leansurgeon.architectures.infer.printing import as_source

            made = infer_declaration(source)
            return Answer({"schema_version": 1, **made.evidence, "refused": dict(made.refused)}, as_source(made))
        found, checks = inspection.inspect(source), None
        if request.doctor:
            from leansurgeon.surgery.doctor import examine

            say("Testing the declaration on the model; it is loaded several times ...")
            checks = examine(source)
        run = source.folder.parent if source.folder else None
        summary = read_if_whole(run) if run and (run / LAST).is_dir() else None
        kappa = summary and summary.kappa
        lines = [*describe(found), *([""] if checks else [])]
        for check in checks or ():
            lines += wrap(f"{MARKS[check.ok]}: {check.name}: {check.says}", "  ")
        wrong = sum(check.ok is False for check in checks or ())
        if checks:
            lines.append(f"{wrong} of {len(checks)} checks failed." if wrong else "The declaration fits the model.")
        lines += ["", *tables(kappa)] if kappa else []
        document = {
            "schema_version": 1,
            **found.as_dict(),
            "doctor": checks and list(map(asdict, checks)),
            "kappa": kappa,
        }
        bad = any(finding.level == "contradiction" for finding in found.findings)
        return Answer(document, "\n".join(lines), UNFIT if bad or wrong else 0)


def infer_declaration(source: Source) -> Architecture:
    """Infer the declaration of a source's family, even if it is declared by hand."""
    from leansurgeon.architectures import infer

    if source.architecture.evidence:
        return source.architecture
    if source.architecture.library == "timm":
        config = source.config
        return infer.architecture(infer.timm_config(config["architecture"], config["model_args"]))
    if source.architecture.library == "transformers":
        return infer.architecture(infer.complete_config(source.config))
    raise UnsupportedModel("Only families of transformers and timm can be inferred, and this is neither.")


def describe(inspection: Inspection) -> list[str]:
    """Return the inspection as lines of at most 80 columns."""
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
    lines += wrap(f"Heads: {inspection.heads}", "  ")
    record, origin = inspection.record, "no surgery.json, so not made by leansurgeon, or copied without it."
    if record is not None:
        steps = ", ".join(f"{text(step.name)} ({text(step.exactness)})" for step in record.plan.operators)
        by = f"leansurgeon {record.versions.get('leansurgeon', '?')} on {(record.created or '?')[:10]}"
        origin = f"{record.source.name}, by {by}: {steps or 'no change'}."
    elif source.preset:
        origin = f"the preset {source.preset.name}."
    lines += wrap(f"Origin: {origin}", "  ")
    for finding in inspection.findings:
        lines += wrap(f"{finding.level.capitalize()}: {finding.says}", "  ")
    if not inspection.findings:
        lines += ["Traps: none known."]
    return lines


COMMAND = Command(
    "inspect",
    InspectRequest,
    inspect,
    ("leansurgeon inspect digits-vit", "leansurgeon inspect my-model --infer"),
    shows=True,
)
