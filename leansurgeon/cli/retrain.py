"""`leansurgeon retrain`: train a shrunk model by a recipe."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from leansurgeon import clock
from leansurgeon.cli import completion
from leansurgeon.cli.common import (
    Classes,
    Columns,
    Public,
    PushTo,
    SkipDamaged,
    TrustRemoteCode,
    WhichTower,
    destination,
    mean,
    pushed,
    say,
)
from leansurgeon.errors import Terminated, UsageError


def retrain(
    model: Annotated[
        Path | None,
        typer.Argument(
            autocompletion=completion.models,
            help="Model folder or run folder; default: the newest shrunk model in the workspace.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Heal on your own data, without a recipe: a file, folder or glob of texts, a table, class folders of "
            "images, a hub id, or austen."
        ),
    ] = None,
    time: Annotated[str | None, typer.Option(help="How long the whole command may take: 20m, 90s, 2h.")] = None,
    columns: Columns = None,
    classes: Classes = None,
    new_tokenizer: Annotated[
        bool, typer.Option("--new-tokenizer", help="Let the embeddings start anew, for another tokenizer.")
    ] = False,
    lora: Annotated[
        int | None, typer.Option(min=1, help="Train adapters of this rank only, merged when saved (needs peft).")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            autocompletion=completion.recipes,
            help="A shipped recipe or a file; default: the one of the model's preset.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Change one key, e.g. train.optim.lr=1e-3. Repeatable."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Train on so many GPUs of this machine.")] = None,
    cpu_processes: Annotated[int | None, typer.Option(help="Train on the CPU with so many processes (gloo).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="In place of the recipe's train.seed.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder; default: a new one in the workspace.")
    ] = None,
    workspace: Annotated[Path, typer.Option(help="Where shrunk models and runs lie.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document on stdout.")] = False,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: go on with the interrupted run of this recipe, or start; PATH: a run folder or checkpoint.",
        ),
    ] = "never",
    resume_anyway: Annotated[
        bool, typer.Option("--resume-anyway", help="Resume although recipe or model have changed since.")
    ] = False,
    limit_batches: Annotated[
        int | None, typer.Option(min=1, help="So many batches per epoch and per evaluation.")
    ] = None,
    eval_only: Annotated[bool, typer.Option("--eval-only", help="Evaluate the model by the recipe's task.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check recipe and model, print the resolved recipe and the plan, try one step (on made-up data where "
            "the data is not there), save nothing.",
        ),
    ] = False,
    push: PushTo = None,
    public: Public = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --push: replace the model that somebody else has there.")
    ] = False,
    tower: WhichTower = None,
    skip_damaged: SkipDamaged = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train a model by a recipe and leave a run folder: best and last model, metrics.jsonl, summary.json."""
    mean(tower)
    began = clock.began()
    from leansurgeon.commands import retrain as command
    from leansurgeon.rank import is_worker, rank
    from leansurgeon.training.recipe.asked import Asked

    if not resume.strip():
        raise UsageError("--resume is empty.", "Use --resume auto, never, or the path of a run folder or checkpoint.")
    trial = "--dry-run" if dry_run else "--eval-only" if eval_only else None
    other = "--eval-only" if dry_run and eval_only else "--resume-anyway" if resume_anyway else f"--resume {resume}"
    if trial and (other != "--resume never"):
        raise UsageError(
            f"{trial} and {other} exclude each other.", f"Leave one of them out: {trial} continues no run."
        )
    where = destination(push, public=public, dry_run=trial is not None, force=force)
    how = Asked(data, time, columns, new_tokenizer, recipe, tuple(sets or ()), resume, lora)
    asked = command.Running(gpus, cpu_processes, seed, out, workspace, resume_anyway, limit_batches)
    ready = command.prepare(model, how, asked, say, start=not dry_run)
    if dry_run or eval_only:
        from leansurgeon.training import preview

        show = preview.dry_run if dry_run else preview.evaluation
        options = {"cpu": asked.cpu, "limit_batches": limit_batches, "as_json": as_json, "say": say}
        show(ready.recipe, ready.folder, asked.processes, **options)
        return
    with sigterm_as_exception():
        trained = command.retrain(ready, how, asked, say, began=began)
    if not is_worker() or rank() == 0:
        print(json.dumps(trained.as_dict()) if as_json else trained.folder, flush=True)
        pushed(where, trained.best)


@contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """SIGTERM raises `Terminated` here, so that a training says what was kept. Processes forked from this one end as
    SIGTERM ends them.
    """
    from leansurgeon.training.processes.signals import handled, insisting

    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        """The handler: forked children end at once, the process itself by an exception."""
        if os.getpid() != owner:
            os._exit(Terminated.exit_code)
        raise Terminated

    with handled([signal.SIGTERM], stop), insisting():
        yield
