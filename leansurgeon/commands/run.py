"""Run: a whole experiment, one table at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from leansurgeon.commands.command import Command
from leansurgeon.commands.options import Seeds, spell_changes
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.request import Opt, Trust

if TYPE_CHECKING:
    from leansurgeon.training.runs.summary import Summary


class RunRequest(Trust):
    """An experiment, what is changed in it, and where its trainings run."""

    recipe: Annotated[str, Opt("Name of a shipped experiment, or a .yaml file.", complete="recipes", positional=True)]
    set: Annotated[
        tuple[str, ...],
        BeforeValidator(spell_changes),
        Opt("Change a key: --set train.duration=5ep.", "Data", cli=list[str], metavar="A.B=C"),
    ] = ()
    seeds: Annotated[Seeds | None, Opt("Other seeds: 0,1,2.", "Data", cli=str)] = None
    arms: Annotated[
        str | None, Opt("Only these arms, and the original that they are cut from: original,lean.", "Data")
    ] = None
    debug: Annotated[bool, Opt("The recipe's own tiny variant; runs in seconds.")] = False
    parallel: Annotated[
        int | None, Field(ge=1), Opt("Trainings side by side. Default: one per core, or one on a GPU.")
    ] = None
    gpus: Annotated[int | None, Field(ge=1), Opt("GPUs for each training, one training at a time.")] = None
    cpu_processes: Annotated[int | None, Field(ge=1), Opt("CPU processes (gloo) for each training instead.")] = None
    workspace: Annotated[Path, Opt("Where models and runs live.", "Output")] = Path("runs")
    format: Annotated[str, Opt("table, markdown, csv, json or latex.", "Output")] = "table"
    force: Annotated[bool, Opt("Run finished arms again.", "Output")] = False

    @property
    def processes(self) -> int:
        """How many processes each training has."""
        return self.gpus or self.cpu_processes or 1

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.gpus is not None and self.cpu_processes is not None:
            raise UsageError("--gpus and --cpu-processes exclude each other.")
        if self.processes > 1 and (self.parallel or 1) > 1:
            raise UsageError(
                f"{self.processes} processes for each training and --parallel {self.parallel} exclude each other.",
                "Leave --parallel out: one training at a time has them all.",
            )
        return self


@dataclass(frozen=True)
class Experiment:
    """The summaries of all arms and seeds, and the folder of their runs."""

    summaries: list[Summary]
    folder: Path
    format: str

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        from leansurgeon.report.tables.render import render_experiment

        return jsonfile.parse(render_experiment(self.summaries, format="json"), "the experiment")

    def __str__(self) -> str:
        from leansurgeon.report.tables.render import render_experiment

        return render_experiment(self.summaries, format=self.format)


def run(request: RunRequest, say: Say) -> Experiment:
    """Train the original, lean variants and their controls over several seeds, and compare them.

    Raises `UsageError` for a recipe of one training, and what cutting and training raise.
    """
    from leansurgeon import experiment
    from leansurgeon.commands.healing import for_device
    from leansurgeon.experiment.arms import told_of_sets
    from leansurgeon.report.tables.render import check_format
    from leansurgeon.training.recipe.reading import dump, load
    from leansurgeon.training.recipe.schema import ExperimentRecipe

    check_format(request.format)
    recipe, debug, workspace = request.recipe, request.debug, request.workspace
    changes = [*request.set, *([f"seeds={list(request.seeds)}"] if request.seeds is not None else [])]
    loaded = load(recipe, changes, debug=debug)
    if not isinstance(loaded, ExperimentRecipe):
        raise UsageError(
            f"'{recipe}' describes one training, not an experiment.", "Use `leansurgeon retrain --recipe`."
        )
    for told in told_of_sets(loaded, changes, load(recipe, [], debug=debug)):
        say(told)
    loaded = for_device(loaded, cpu=request.cpu_processes is not None, say=say)
    if debug:
        loaded = loaded.model_copy(update={"name": f"{loaded.name}-debug"})
    call = ["leansurgeon", "run", recipe, *(word for one in request.set for word in ("--set", one))]
    call += [] if request.seeds is None else ["--seeds", ",".join(map(str, request.seeds))]
    call += ["--debug"] if debug else []
    call += ["--workspace", str(workspace)] if workspace != Path("runs") else []
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
        cpu=request.cpu_processes is not None,
        begin=lambda: note(folder, call, dump(loaded)),
    )
    say(f"Runs are in {folder}; `leansurgeon report {folder}` shows this table again.")
    return Experiment(summaries, folder, request.format)


def note(folder: Path, call: list[str], recipe: str) -> None:
    """Keep the resolved recipe beside the runs of its arms, with the command it came from: the report names both."""
    from leansurgeon.training.runs import folder as runfolder

    with runfolder.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    runfolder.write_text(folder / runfolder.EXPERIMENT, runfolder.with_call(call, recipe))


EXAMPLES = ("leansurgeon run digits-vit", "leansurgeon run digits-vit --seeds 0 --set train.duration=3ep")
COMMAND = Command("run", RunRequest, run, EXAMPLES)
