"""`leansurgeon run`: a whole experiment, one table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leansurgeon.cli import completion
from leansurgeon.cli.common import AsJson, TrustRemoteCode, say, seed_list
from leansurgeon.errors import UsageError


def run(
    recipe: Annotated[
        str, typer.Argument(autocompletion=completion.recipes, help="Name of a shipped experiment, or a .yaml file.")
    ],
    sets: Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set train.duration=5ep.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Other seeds: 0,1,2.")] = None,
    arms: Annotated[
        str | None, typer.Option(help="Only these arms, and the original that they are cut from: original,lean.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="The recipe's own tiny variant; runs in seconds.")] = False,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Trainings side by side. Default: one per core, or one on a GPU.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs for each training, one training at a time.")] = None,
    cpu_processes: Annotated[
        int | None, typer.Option(min=1, help="CPU processes (gloo) for each training instead.")
    ] = None,
    workspace: Annotated[Path, typer.Option(help="Where models and runs live.")] = Path("runs"),
    format: Annotated[str, typer.Option(help="table, markdown, csv, json or latex.")] = "table",
    as_json: AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Run finished arms again.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train the original, lean variants and their controls over several seeds, and compare them."""
    from leansurgeon import experiment
    from leansurgeon.commands.healing import for_device
    from leansurgeon.experiment.arms import told_of_sets
    from leansurgeon.report.tables.table import check_format, experiment_table
    from leansurgeon.training.recipe.reading import dump, load
    from leansurgeon.training.recipe.schema import ExperimentRecipe

    check_format(format)
    if gpus is not None and cpu_processes is not None:
        raise UsageError("--gpus and --cpu-processes exclude each other.")
    processes = gpus or cpu_processes or 1
    if processes > 1 and (parallel or 1) > 1:
        raise UsageError(
            f"{processes} processes for each training and --parallel {parallel} exclude each other.",
            "Leave --parallel out: one training at a time has them all.",
        )
    changes = list(sets or [])
    if seeds is not None:
        changes.append(f"seeds={seed_list(seeds)}")
    loaded = load(recipe, changes, debug=debug)
    if not isinstance(loaded, ExperimentRecipe):
        raise UsageError(
            f"'{recipe}' describes one training, not an experiment.", "Use `leansurgeon retrain --recipe`."
        )
    for told in told_of_sets(loaded, changes, load(recipe, [], debug=debug)):
        say(told)
    loaded = for_device(loaded, cpu=cpu_processes is not None, say=say)
    if debug:
        loaded = loaded.model_copy(update={"name": f"{loaded.name}-debug"})
    call = ["leansurgeon", "run", recipe, *(word for one in sets or [] for word in ("--set", one))]
    call += [] if seeds is None else ["--seeds", seeds]
    call += ["--debug"] if debug else []
    call += ["--workspace", str(workspace)] if workspace != Path("runs") else []
    if gpus is not None:
        from leansurgeon.training.processes.launch import check_gpus

        check_gpus(gpus)
    summaries = experiment.run(
        loaded,
        workspace,
        arms=None if arms is None else [word.strip() for word in arms.split(",")],
        parallel=parallel if processes == 1 else 1,
        force=force,
        say=say,
        processes=processes,
        cpu=cpu_processes is not None,
        begin=lambda: note(workspace / loaded.name, call, dump(loaded)),
    )
    print(experiment_table(summaries, format="json" if as_json else format))
    say(
        f"\nRuns are in {workspace / loaded.name}; "
        f"`leansurgeon report {workspace / loaded.name}` shows this table again."
    )


def note(folder: Path, call: list[str], recipe: str) -> None:
    """Keep the resolved recipe beside the runs of its arms, with the command it came from: the report names both."""
    from leansurgeon.training.runs import folder as runfolder

    with runfolder.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    runfolder.write_text(folder / runfolder.EXPERIMENT, runfolder.with_call(call, recipe))
