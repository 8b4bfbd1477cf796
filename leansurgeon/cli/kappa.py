"""`leansurgeon kappa`: how well conditioned the attention of a model is on sample data, layer by layer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leansurgeon.cli.common import AllowPickle, TrustRemoteCode, say
from leansurgeon.errors import UsageError, plural, short
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.measure.data.calibration import Calibration

SAMPLES, PROBES = 256, 16
PRECISIONS = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


def kappa(
    model: Annotated[str, typer.Argument(help="Folder, run, hub id or timm/NAME.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            help="Sample data: text files, a folder of images, or task:NAME,key=value. "
            "Default: the data that a run was trained on.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Held-out samples to measure on, at most.")] = SAMPLES,
    probes: Annotated[
        int, typer.Option(min=0, help="Directions in which each block's Jacobian is tried; 0 leaves it out.")
    ] = PROBES,
    precision: Annotated[
        str, typer.Option(help="Forward pass in fp32, bf16 or fp16; the last two cap large values.")
    ] = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of samples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Condition numbers of MODEL's attention blocks, raw and such that no change of basis moves them.

    Per sample, real tokens only, spectrum in fp64; a layer whose blocks lack rank shows a lower bound. On a run's
    folder, without --data, the result is kept as kappa.json in it; `leansurgeon report` shows it where the training
    measured none.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision}: give one of {', '.join(PRECISIONS)}.")
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.report.evidence.collect import KAPPA
    from leansurgeon.training.runs import folder as runfolder

    opened = open_source(model, allow_pickle=allow_pickle)
    sample = sample_data(opened, data, model, seed)
    document = measured(opened, sample, samples, probes, precision)
    print(json.dumps(document) if as_json else "\n".join(describe(document)))
    if data is None and (run := runfolder.run_of(model)):  # a report shows it beside figures of the run's own data
        runfolder.write_json(run / KAPPA, document)
        say(f"Kept as {run / KAPPA}.")


def sample_data(opened: Source, data: str | None, model: str, seed: int) -> Calibration:
    """What --data names, or the data of the run; of what surgery would fit on, as little as can be is read.

    Raises `UsageError` for a preset, which has nothing to measure, and where there is no data.
    """
    from leansurgeon.cli import heads
    from leansurgeon.cli.shrink import trained_on

    if opened.weights is None:
        raise UsageError(
            f"'{model}' is a preset and has no weights, so its attention has seen nothing yet.",
            f"`leansurgeon shrink {model} --init fresh -o FOLDER` makes a model of it; give that folder.",
        )
    if not opened.learned:
        say(f"{opened.name} was initialised and never trained: its kappa is that of random weights.")
    if data is None and trained_on(model) is None:
        raise UsageError(
            f"Kappa needs sample data, and {model} is no run that says what it was trained on.",
            "Give --data: text files, a folder of images, or task:NAME.",
        )
    return heads.sample_data(opened, data, model, 2, seed)


def measured(
    opened: Source, sample: Calibration, samples: int = SAMPLES, probes: int = PROBES, precision: str = "fp32"
) -> dict[str, Any]:
    """Load the model, measure it, and give everything as one document that JSON can hold."""
    import torch

    from leansurgeon.checkpoints.model import load
    from leansurgeon.cli import heads
    from leansurgeon.measure.data.batches import rows_of, thin
    from leansurgeon.measure.heads import sites
    from leansurgeon.measure.kappa import invariant, jacobian

    loaded = load(opened.folder)
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
    kinds = [site.kind for site in sites.sites(loaded)]
    timm = loaded.architecture.library == "timm"

    batches = thin(sample.heldout, samples)
    size = sum(map(rows_of, batches))
    passes = len(batches) + (min(jacobian.SAMPLES, size) * (probes + 1) if probes else 0)
    done = heads.progress("forward passes", passes)

    def forward(batch: dict[str, Any]) -> Any:  # whatever the model says: it may have no head
        done()
        inputs = {k: v for k, v in batch.items() if k != "labels" and not k.startswith("_")}
        return loaded.model(batch["pixel_values"]) if timm else loaded.model(**inputs)

    def mask(batch: dict[str, Any]) -> Any:
        real = sample.mask(batch)
        if "decoder_input_ids" not in batch:
            return real
        written = batch["labels"] != -100  # behind an answer stand tokens that fill up
        return [real if kind == "encoder" else written for kind in kinds]

    seen = SimpleNamespace(
        model=loaded.model,
        architecture=loaded.architecture,
        config=loaded.config,
        projections=loaded.projections,
        forward=forward,
    )
    say(f"Measuring on held-out samples of {sample.says.rpartition(': ')[0]} ...")
    half = getattr(torch, PRECISIONS[precision]) if PRECISIONS[precision] else None
    found = invariant.measure(seen, batches, mask, size, probes=probes, half=half)
    for layer, kind in zip(found["layers"], kinds, strict=True):
        layer["kind"] = kind
    return {
        "schema_version": 1,
        "kind": "kappa",
        "name": opened.name,
        "family": opened.architecture.name,
        "shape": opened.shape.as_dict(),
        "data": {"name": sample.name, "says": sample.says, "sha256": sample.digest},
        "options": {"samples": samples, "probes": probes, "precision": precision},
        **found,
    }


def describe(document: dict[str, Any]) -> list[str]:
    """The document as a person reads it, in 80 columns."""
    head = (
        f"{short(document['name'], 60)}: {plural(document['samples'], 'sample')}, {plural(document['tokens'], 'token')}"
    )
    return [*wrap(head), "", *tables(document)]


def tables(measured: dict[str, Any]) -> list[str]:
    """Raw and invariant, from a document of this command or from what a run's summary keeps under `kappa`."""
    from leansurgeon.report.evidence.kappa import kappa_of
    from leansurgeon.report.tables.kappa import beside, notes, raw

    found = kappa_of([measured])
    if found is None:
        return []
    kinds = [layer.get("kind", "self") for layer in measured["layers"]]
    intervals = [layer.get("median_interval") for layer in measured["layers"]]
    said = [line for text in notes(measured, found) for line in wrap(text, "  ")]
    blocks = [raw(found, kinds, intervals), beside(found, kinds), said]
    lines: list[str] = []
    for block in blocks:
        lines += ["", *block] if lines and block else block
    return lines
