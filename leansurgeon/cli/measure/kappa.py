"""`leansurgeon kappa`: how well conditioned the attention of a model is on sample data, layer by layer."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from leansurgeon.cli.common import (
    AllowPickle,
    AsJson,
    Classes,
    Columns,
    ModelName,
    SkipDamaged,
    TrustRemoteCode,
    WhichTower,
    mean,
    say,
)
from leansurgeon.commands import kappa as command
from leansurgeon.commands.kappa import PROBES, SAMPLES


def kappa(
    model: ModelName,
    data: Annotated[
        str | None,
        typer.Option(
            help="Sample data: text files, a folder of images, or task:NAME,key=value. "
            "Default: the data that a run was trained on."
        ),
    ] = None,
    columns: Columns = None,
    classes: Classes = None,
    samples: Annotated[int, typer.Option(min=1, help="Held-out samples to measure on, at most.")] = SAMPLES,
    probes: Annotated[
        int, typer.Option(min=0, help="Directions in which each block's Jacobian is tried; 0 leaves it out.")
    ] = PROBES,
    precision: Annotated[
        str, typer.Option(help="Forward pass in fp32, bf16 or fp16; the last two cap large values.")
    ] = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of samples.")] = 0,
    as_json: AsJson = False,
    tower: WhichTower = None,
    allow_pickle: AllowPickle = False,
    skip_damaged: SkipDamaged = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Condition numbers of MODEL's attention blocks, raw and such that no change of basis moves them.

    Per sample, real tokens only, spectrum in fp64; a layer whose blocks lack rank shows a lower bound. On a run's
    folder, without --data, the result is kept as kappa.json in it; `leansurgeon report` shows it where the training
    measured none.
    """
    mean(tower)
    from leansurgeon.report.tables.kappa import describe

    asked = {"samples": samples, "probes": probes, "precision": precision}
    document = command.kappa(model, data, say, **asked, seed=seed, columns=columns, allow_pickle=allow_pickle)
    print(json.dumps(document) if as_json else "\n".join(describe(document)))
