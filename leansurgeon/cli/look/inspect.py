"""`leansurgeon inspect`: what a model is, where its parameters sit, and what may be wrong with it."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from leansurgeon.cli.common import AllowPickle, AsJson, SourceName, TrustRemoteCode, WhichTower, mean, say
from leansurgeon.errors import UnsupportedModel, short
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.reading.values import text
from leansurgeon.shape import PARTS
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.measure.inspection import Inspection
    from leansurgeon.measure.kappa.study import KappaDocument
    from leansurgeon.surgery.check.doctor import Check

MARKS = {True: "ok", False: "WRONG", None: "not tested"}
UNFIT = 3  # exit code: the files contradict each other, or the declaration does not fit the model


def inspect(
    model: SourceName,
    doctor: Annotated[
        bool,
        typer.Option("--doctor", help="Put what leansurgeon believes of this family to the test on the model itself."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Also measure kappa on sample data, as `leansurgeon kappa` does. A run shows its own anyway."
        ),
    ] = None,
    infer: Annotated[
        bool,
        typer.Option("--infer", help="Print the declaration that is inferred for its family, with what was proven."),
    ] = False,
    as_json: AsJson = False,
    tower: WhichTower = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Shape, parameters, head policy, origin and known traps of MODEL.

    Exit code 3 when its files contradict each other or --doctor finds the declaration of its family wrong.
    """
    mean(tower)
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure import inspection

    with ExitStack() as keep:
        try:
            source = open_source(model, allow_pickle=allow_pickle, weights=bool(data), keep=keep)
        except UnsupportedModel as error:
            raise inspection.explain(model, error) from None
        if infer:
            print(inferred(source, as_json=as_json))
            return
        result = inspection.inspect(source)
        checks = None
        if doctor:
            from leansurgeon.surgery.check.doctor import examine

            print("Testing the declaration on the model; it is loaded several times ...", file=sys.stderr)
            checks = examine(source)
        conditioning = measured(source, data, model) if data else kept(source)
    if as_json:
        document = {"schema_version": 1, **result.as_dict(), "doctor": checks and [asdict(c) for c in checks]}
        document |= {"kappa": conditioning}
        print(json.dumps(document))
    else:
        print("\n".join(describe(result) + (diagnosis(checks) if checks else [])))
        if conditioning:
            from leansurgeon.report.tables.kappa import tables

            print("\n".join(["", *tables(conditioning)]))
    bad = any(f.level == "contradiction" for f in result.findings)
    if bad or any(c.ok is False for c in checks or ()):
        raise typer.Exit(UNFIT)


def inferred(source: Source, *, as_json: bool) -> str:
    """The declaration that is inferred for a source's family, also where one was written by hand."""
    from leansurgeon.architectures import infer
    from leansurgeon.architectures.infer.printing import as_source

    if source.architecture.evidence:
        made = source.architecture
    elif source.architecture.library == "timm":
        config = source.config
        made = infer.architecture(infer.timm_config(config["architecture"], config["model_args"]))
    elif source.architecture.library == "transformers":
        made = infer.architecture(infer.completed(source.config))
    else:
        raise UnsupportedModel("Families of transformers and timm are inferred, and this is none.")
    if as_json:
        return json.dumps({"schema_version": 1, **made.evidence, "refused": dict(made.refused)})
    return as_source(made)


def measured(source: Source, data: str, model: str) -> KappaDocument:
    """Kappa on the sample data that --data names."""
    from leansurgeon.training.runs.sample_data import data_for_kappa

    sample = data_for_kappa(source, data, model, 0, say)
    from leansurgeon.measure.kappa.study import study

    return study(source, sample, say=say)


def kept(source: Source) -> JsonObject | None:
    """The kappa that the training of this run's model has left in its summary."""
    from leansurgeon.training.runs.folder import LAST
    from leansurgeon.training.runs.summary import read_if_whole

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
