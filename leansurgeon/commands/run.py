"""Run: a whole experiment, with one table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from leansurgeon import clock
from leansurgeon.commands.command import Command
from leansurgeon.commands.compare import measure_answers
from leansurgeon.commands.options import Changes, DataRequest, LaunchRequest, Seconds, Seeds, Workspace
from leansurgeon.commands.report import Report, ReportRequest
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.request import Opt, ShapeRequest, command_line
from leansurgeon.training.recipe.schema import ExperimentRecipe
from leansurgeon.training.runs import folder as runfolder

SHAPE = ("heads", "layers", "head_dim", "mlp_dim")


class RunRequest(ShapeRequest, DataRequest, LaunchRequest):
    """An experiment, changes to it, and where its trainings run."""

    source: Annotated[
        str,
        Opt(
            "A shipped experiment or a .yaml file; with --data a model.",
            complete="recipes",
            metavar="EXPERIMENT|MODEL",
            positional=True,
            model=True,
        ),
    ]
    variant: Annotated[
        tuple[str, ...], Opt("Of several: lean:heads=24,layers=4. Repeatable.", "Shape", cli=list[str])
    ] = ()
    time: Annotated[Seconds | None, Opt("With --data: length of the whole command: 20m, 2h.", "Data", cli=str)] = None
    set: Changes = ()
    seeds: Annotated[
        Seeds | None, Opt("Seeds of the trainings: 0,1,2. Default: the recipe's; with --data 0,1,2.", "Data", cli=str)
    ] = None
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


def run(request: RunRequest, say: Say) -> Report:
    """Train the original, lean variants and their controls over several seeds, and compare them.

    EXPERIMENT is a recipe. Or name your MODEL, --data and a shape: the recipe is made from them, shown and kept. With
    labels every arm is fine-tuned on them, without labels every arm learns from the model as it is. All have the same
    samples in the same order, the same steps, and the best of the same learning rates.

    In Python the comparison prints as its table, and a notebook shows it as one.

    >>> import leansurgeon
    >>> leansurgeon.run("digits-vit", data="task:digits", layers=3)
    Traceback (most recent call last):
    leansurgeon.errors.UsageError: digits-vit is untrained, so there is nothing to compare. ...

    Raises `UsageError` for a recipe of one training or a time that is too short, and what cutting and training raise.
    """
    from leansurgeon import experiment
    from leansurgeon.commands.retrain import for_device
    from leansurgeon.commands.samples import try_work
    from leansurgeon.experiment.side_by_side import default_parallel
    from leansurgeon.report.collect import Collection
    from leansurgeon.report.runs import read_run
    from leansurgeon.report.sections import sections
    from leansurgeon.training.recipe.reading import dump

    if request.gpus is not None:
        from leansurgeon.training.processes.launch import check_gpus

        check_gpus(request.gpus)
    how = {"processes": request.processes, "cpu": request.cpu}
    parallel = (request.parallel or default_parallel()) if request.processes == 1 else 1
    recipe = make_recipe(request, parallel, how, say) if request.data else load_recipe(request, say)
    recipe = for_device(recipe, cpu=request.cpu, say=say)
    folder = request.workspace / recipe.name

    def keep_recipe(made: ExperimentRecipe) -> None:
        """Save the resolved recipe beside the runs of its arms, with its command: the report names both."""
        with runfolder.explain_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        text = runfolder.with_call(command_line("run", request), dump(made))
        runfolder.write_text(folder / runfolder.EXPERIMENT, text)

    summaries = experiment.run(
        recipe,
        request.workspace,
        arms=None if request.arms is None else [word.strip() for word in request.arms.split(",")],
        parallel=parallel,
        force=request.force,
        say=say,
        begin=keep_recipe,
        **how,
    )
    runs = [
        read_run(folder / f"{made.experiment.arm}-s{made.seed}", made, float(i)) for i, made in enumerate(summaries)
    ]
    if request.data:
        from leansurgeon.training import changes

        shown = [run for run in runs if run.summary.seed == recipe.seeds[0]]
        models = {run.summary.experiment.arm: runfolder.model_of(run.path) for run in shown}
        _, unmeasured = try_work(lambda: measure_answers(shown, say))
        say("Searching for held-out samples on which they differ.")
        found, unseen = try_work(lambda: changes.find_changes(recipe.task, models))
        runfolder.write_json(folder / changes.NAME, found or {})
        for what, why in (("What answering costs", unmeasured), ("What changed for real samples", unseen)):
            if why:
                say(f"{what} is not known: {why}")
    say(f"Runs are in {folder}; `leansurgeon report {folder}` shows this table again.")
    return Report(Collection(runs), tuple(sections(runs)), ReportRequest())


def load_recipe(request: RunRequest, say: Say) -> ExperimentRecipe:
    """Return the named experiment. Raises `UsageError` if it is not an experiment, or for options that need --data."""
    from leansurgeon.experiment.arms import explain_sets
    from leansurgeon.training.recipe.reading import load

    own = ("time", "columns", "variant", *ShapeRequest.model_fields)
    for name in (name for name in own if getattr(request, name) != type(request).model_fields[name].default):
        raise UsageError(
            f"--{name.replace('_', '-')} is for a model and data of your own, and no --data is given.",
            "Add --data PATH, or change the recipe: --set arms.lean.heads=24.",
        )
    changes = [*request.set, *([f"seeds={list(request.seeds)}"] if request.seeds is not None else [])]
    loaded = load(request.source, changes, debug=request.debug)
    if not isinstance(loaded, ExperimentRecipe):
        raise UsageError(
            f"'{request.source}' describes one training, not an experiment.", "Use `leansurgeon retrain --recipe`."
        )
    for told in explain_sets(loaded, changes, load(request.source, [], debug=request.debug)):
        say(told)
    return loaded.model_copy(update={"name": f"{loaded.name}-debug"}) if request.debug else loaded


def make_recipe(request: RunRequest, parallel: int, how: Mapping[str, Any], say: Say) -> ExperimentRecipe:
    """Return the experiment for a model and data; if this same command was interrupted before, the one that it made."""
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.experiment.trials import make_experiment, name_experiment, parse_variants, plan_steps
    from leansurgeon.training.recipe.reading import brief, load

    began = clock.began()
    shape = {key: value for key in SHAPE if (value := getattr(request, key)) not in (None, "auto")}
    variants = parse_variants(request.variant)
    if shape and variants:
        raise UsageError("--variant names shapes, and so do the others.", "Put them into a --variant, too.")
    if not (shape or variants):
        raise UsageError("No change was requested.", "Give --heads 2x, --layers 4, or both.")
    if request.debug:
        raise UsageError("--debug is for a recipe that has such a variant.", "Give --time 2m for a short comparison.")
    opened = open_source(request.source)
    if opened.folder is None or not opened.learned:
        raise UsageError(
            f"{opened.name} is untrained, so there is nothing to compare.",
            "Name a trained model; `leansurgeon run EXPERIMENT` trains a preset.",
        )
    kept = request.workspace / name_experiment(opened, request.data, request.set) / runfolder.EXPERIMENT
    if kept.is_file() and not request.force:
        text = kept.read_text(encoding="utf-8")
        if runfolder.call_in(text) == command_line("run", request):
            made = load(str(kept))
            if isinstance(made, ExperimentRecipe):
                say(f"Resuming {kept.parent} (--force starts it again).")
                return made
    made = make_experiment(
        opened, request.data, variants or {"lean": shape}, request.seeds or (0, 1, 2), request.time, parallel,
        request.columns, request.set, say,
    )  # fmt: skip
    seconds = {"seconds": request.time, "began": began, "force": request.force}
    made = plan_steps(made, request.workspace, opened, parallel, say, **seconds, **how)
    say(f"The recipe, made for {request.source} and {request.data}; {kept} keeps it, to be edited and run:")
    say("".join(f"    {line}\n" for line in brief(made).splitlines()).rstrip("\n"))
    return made


EXAMPLES = (
    "leansurgeon run digits-vit",
    "leansurgeon run my-model --data reviews.csv --heads 24 --layers 4 --time 20m",
)
COMMAND = Command("run", RunRequest, run, EXAMPLES)
