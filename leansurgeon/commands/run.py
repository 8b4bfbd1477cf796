"""Run: a whole experiment, one table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.options import Changes, LaunchRequest, Seeds, Workspace
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading import jsonfile
from leansurgeon.request import Opt, Trust, command_line


class RunRequest(LaunchRequest, Trust):
    """An experiment, what is changed in it, and where its trainings run."""

    recipe: Annotated[str, Opt("Name of a shipped experiment, or a .yaml file.", complete="recipes", positional=True)]
    set: Changes = ()
    seeds: Annotated[Seeds | None, Opt("Other seeds: 0,1,2.", "Data", cli=str)] = None
    arms: Annotated[
        str | None, Opt("Only these arms, and the original that they are cut from: original,lean.", "Data")
    ] = None
    debug: Annotated[bool, Opt("The recipe's own tiny variant; runs in seconds.")] = False
    parallel: Annotated[
        int | None, Field(ge=1), Opt("Trainings side by side. Default: one per core, or one on a GPU.")
    ] = None
    workspace: Workspace = Path("runs")
    force: Annotated[bool, Opt("Run finished arms again.", "Output")] = False

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.processes > 1 and (self.parallel or 1) > 1:
            raise UsageError(
                f"{self.processes} processes for each training and --parallel {self.parallel} exclude each other.",
                "Leave --parallel out: one training at a time has them all.",
            )
        return self


def run(request: RunRequest, say: Say) -> Answer:
    """Train the original, lean variants and their controls over several seeds, and compare them.

    Raises `UsageError` for a recipe of one training, and what cutting and training raise.
    """
    from leansurgeon import experiment
    from leansurgeon.commands.healing import for_device
    from leansurgeon.experiment.arms import explain_sets
    from leansurgeon.report.tables.render import render_experiment
    from leansurgeon.training.recipe.reading import dump, load
    from leansurgeon.training.recipe.schema import ExperimentRecipe

    recipe, debug, workspace = request.recipe, request.debug, request.workspace
    changes = [*request.set, *([f"seeds={list(request.seeds)}"] if request.seeds is not None else [])]
    loaded = load(recipe, changes, debug=debug)
    if not isinstance(loaded, ExperimentRecipe):
        raise UsageError(
            f"'{recipe}' describes one training, not an experiment.", "Use `leansurgeon retrain --recipe`."
        )
    for told in explain_sets(loaded, changes, load(recipe, [], debug=debug)):
        say(told)
    loaded = for_device(loaded, cpu=request.cpu, say=say)
    if debug:
        loaded = loaded.model_copy(update={"name": f"{loaded.name}-debug"})
    if request.gpus is not None:
        from leansurgeon.training.processes.launch import check_gpus

        check_gpus(request.gpus)
    folder = workspace / loaded.name
    summaries = experiment.run(
        loaded,
        workspace,
        arms=None if request.arms is None else [word.strip() for word in request.arms.split(",")],
        parallel=request.parallel if request.processes == 1 else 1,
        force=request.force,
        say=say,
        processes=request.processes,
        cpu=request.cpu,
        begin=lambda: note(folder, command_line("run", request), dump(loaded)),
    )
    say(f"Runs are in {folder}; `leansurgeon report {folder}` shows this table again.")
    document = jsonfile.parse(render_experiment(summaries, format="json"), "the experiment")
    return Answer(document, render_experiment(summaries))


def note(folder: Path, call: str, recipe: str) -> None:
    """Keep the resolved recipe beside the runs of its arms, with the command it came from: the report names both."""
    from leansurgeon.training.runs import folder as runfolder

    with runfolder.explain_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    runfolder.write_text(folder / runfolder.EXPERIMENT, runfolder.with_call(call, recipe))


EXAMPLES = ("leansurgeon run digits-vit", "leansurgeon run digits-vit --seeds 0 --set train.duration=3ep")
COMMAND = Command("run", RunRequest, run, EXAMPLES)
