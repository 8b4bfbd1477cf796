"""`leansurgeon shrink`: rewrite a model to more heads and fewer layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from leansurgeon.cli import common
from leansurgeon.errors import UsageError


def shrink(
    source: common.SourceName,
    heads: common.Heads = None,
    layers: common.Layers = None,
    params: Annotated[
        str | None, typer.Option(help="-30%, 70% or 60M: as many parameters; the shape is chosen, and why is said.")
    ] = None,
    head_dim: common.HeadDim = "auto",
    mlp_dim: common.MlpDim = None,
    mlp_ratio: common.MlpRatio = None,
    class_attention: common.ClassAttention = False,
    init: Annotated[
        str, typer.Option(help="transfer keeps what can be kept; fresh is the paper's way; or fresh-attention.")
    ] = "transfer",
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            "--calibrate",
            "--data",
            help="Sample data that chooses and heals: text files, a folder of images, or task:NAME,key=value; given "
            "several times, an even mixture. Default: what a run was trained on, else what the model makes itself.",
        ),
    ] = None,
    columns: common.Columns = None,
    classes: common.Classes = None,
    calibration_samples: Annotated[
        int | None, typer.Option(min=2, help="Samples to fit on; a quarter as many guard.")
    ] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Use the weights alone, also where that is much worse.")
    ] = False,
    method: Annotated[
        str,
        typer.Option(
            help="Layers by auto, even, first-of-each, last-of-each, influence, angular, leave-one-out or greedy."
        ),
    ] = "auto",
    keep: Annotated[str | None, typer.Option(help="The layers that stay: 0,2,4-9 (from 0).")] = None,
    more_heads: Annotated[str, typer.Option(help="add: silent new heads. split: children of the old ones.")] = "add",
    heal: Annotated[
        str, typer.Option(help="On sample data: closed refits, local also fits the blocks around a cut; none.")
    ] = "local",
    no_heal: Annotated[bool, typer.Option("--no-heal", help="The same as --heal none.", hidden=True)] = False,
    heal_time: Annotated[str | None, typer.Option(help="Longest time of the local fit, such as 90s or 5m.")] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Even out values and outputs by an exact change of basis.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also score a fresh and a naive start of the same shape.")
    ] = False,
    judge: Annotated[
        str | None, typer.Option(help="Also judge the result on other data than it was calibrated on.")
    ] = None,
    proof: Annotated[bool, typer.Option("--proof/--no-proof", help="Reload the result and compare it.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write. Default: WORKSPACE/NAME-h24-l10.")
    ] = None,
    workspace: Annotated[Path, typer.Option(help="Where models and runs live.")] = Path("runs"),
    device: common.WhichDevice = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a calibrated cut to the same folder that was interrupted.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    as_json: common.AsJson = False,
    force: common.Force = False,
    push: common.PushTo = None,
    public: common.Public = False,
    tower: common.WhichTower = None,
    allow_pickle: common.AllowPickle = False,
    skip_damaged: common.SkipDamaged = False,
    trust_remote_code: common.TrustRemoteCode = False,
) -> None:
    """Rewrite SOURCE to more heads and fewer layers, keep what can be kept, and prove that the result loads."""
    from leansurgeon.commands import shrink as command
    from leansurgeon.surgery.plan.method import Method
    from leansurgeon.surgery.plan.wanted import Wanted

    where = common.destination(push, public=public, dry_run=dry_run, force=force)
    wanted = Wanted(heads, layers, head_dim, mlp_dim, mlp_ratio, init, class_attention)
    healing, longest = "none" if no_heal else heal, command.seconds(heal_time, "--heal-time")
    how = Method(method, keep, more_heads, healing, balance, uncalibrated, longest)
    asked = command.ShrinkOptions(
        data=calibrate,
        columns=columns,
        samples=calibration_samples,
        judge=judge,
        params=params,
        compare=compare,
        proof=proof,
        seed=seed,
        out=out,
        workspace=workspace,
        dry_run=dry_run,
        force=force,
        tower=tower and tower.value,
        allow_pickle=allow_pickle,
        device=device,
        resume=resume,
    )
    shrunk = command.shrink(source, wanted, how, asked, common.say, unchanged=lambda name: question(name, as_json))
    print(json.dumps(shrunk.as_dict()) if as_json else shrunk.told(), flush=True)
    common.pushed(where, shrunk.folder)


def question(name: str, as_json: bool) -> None:
    """Ask whether a copy is meant where nothing was asked for; where nobody sits before it, say so and go on. Raises
    `UsageError` for a no.
    """
    hint = "Say what to change: --heads 2x, --layers 6, --mlp-dim 512 or --params -30%."
    told = f"Nothing is to be changed, so this writes {name} as it is."
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() and not as_json:
        if not typer.confirm(f"{told} Go on?", default=False, err=True):
            raise UsageError("Nothing was written.", hint)
        return
    common.say(f"{told} {hint}")
