"""`leansurgeon judge`: quality before and after, on what the user cares about."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from leansurgeon.cli import completion
from leansurgeon.cli.common import AllowPickle, AsJson, Classes, Columns, SkipDamaged, TrustRemoteCode, say


def judge(
    model: Annotated[str, typer.Argument(autocompletion=completion.models, help="A cut or retrained model.")],
    data: Annotated[
        str | None,
        typer.Option(help="Text files, a folder of images, or task:NAME,key=value; as shrink --judge takes it."),
    ] = None,
    columns: Columns = None,
    classes: Classes = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-evaluation-harness: names, or YAML files of your own (extra lm-eval)."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion.models, help="The model to compare with. Default: the one that it was cut from."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="First so many documents of each lm-eval task.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of samples.")] = 0,
    as_json: AsJson = False,
    allow_pickle: AllowPickle = False,
    skip_damaged: SkipDamaged = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Judge MODEL and the model that it was cut from on data of your own: the same samples, with intervals.

    A difference is given as the interval in which it lies with 95 %, since both models see the same samples. The result
    is kept in MODEL's surgery.json and its card; `leansurgeon report` and its page show it.
    """
    from leansurgeon.commands import judge as command

    options = {"against": against, "limit": limit, "seed": seed, "columns": columns, "allow_pickle": allow_pickle}
    judged = command.judge(model, data, lm_eval, say, **options)
    print(json.dumps(judged.as_dict()) if as_json else judged.told())
