"""Retrain: choose the model, the recipe and the run folder, and train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from leansurgeon import clock
from leansurgeon.commands import compare, healing
from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.in_memory import Trained
from leansurgeon.commands.options import (
    Data,
    DataRequest,
    LaunchRequest,
    PushRequest,
    RecipeRequest,
    Workspace,
    spell_path,
    spell_time,
)
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.progress import say as to_stderr
from leansurgeon.rank import is_worker, rank
from leansurgeon.request import Opt
from leansurgeon.training.processes import launch
from leansurgeon.training.processes.launch import check_gpus
from leansurgeon.training.recipe.from_model import RecipeInputs
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.resume import find_interrupted


class RetrainRequest(DataRequest, RecipeRequest, LaunchRequest, PushRequest):
    """A model, what it is trained on and how, and where that runs."""

    model: Annotated[
        Path | None,
        Opt(
            "Model folder or run folder; default: the newest shrunk model in the workspace.",
            positional=True,
            model=True,
        ),
    ] = None
    data: Annotated[
        Data | None, Opt("Heal on your own data, without a recipe: texts, a table, class folders.", "Data", cli=str)
    ] = None
    time: Annotated[
        str | None, BeforeValidator(spell_time), Opt("Length of the whole command: 20m, 90s, 1.5h.", "Data", cli=str)
    ] = None
    new_tokenizer: Annotated[bool, Opt("Reinitialise the embeddings, for another tokenizer.", "Method")] = False
    lora: Annotated[
        int | None, Field(ge=1), Opt("Train adapters of this rank only, merged when saved (needs peft).", "Method")
    ] = None
    out: Annotated[Path | None, Opt("Run folder; default: a new one in the workspace.", "Output", ("--out", "-o"))] = (
        None
    )
    workspace: Workspace = Path("runs")
    resume: Annotated[
        str,
        BeforeValidator(spell_path),
        Opt(
            "auto: continue the interrupted run of this recipe, or start; PATH: a run folder or checkpoint.",
            cli=str,
            metavar="auto|never|PATH",
        ),
    ] = "never"
    resume_anyway: Annotated[bool, Opt("Resume although recipe or model have changed since.")] = False
    limit_batches: Annotated[int | None, Field(ge=1), Opt("Use only this many batches per epoch and evaluation.")] = (
        None
    )
    eval_only: Annotated[bool, Opt("Evaluate the model by the recipe's task.")] = False
    dry_run: Annotated[
        bool,
        Opt(
            "Check recipe and model, print the resolved recipe and the plan, try one step (on made-up data where the "
            "data is not there), save nothing.",
            "Output",
        ),
    ] = False
    force: Annotated[bool, Opt("With --push: replace another model that is there.", "Output")] = False

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if not self.resume.strip():
            raise UsageError(
                "--resume is empty.", "Use --resume auto, never, or the path of a run folder or checkpoint."
            )
        trial = "--dry-run" if self.dry_run else "--eval-only" if self.eval_only else None
        other = "--eval-only" if self.dry_run and self.eval_only else "--resume-anyway" if self.resume_anyway else None
        other = other or (None if self.resume == "never" else f"--resume {self.resume}")
        if trial and other:
            raise UsageError(
                f"{trial} and {other} exclude each other.", f"Leave one of them out: {trial} continues no run."
            )
        return self


def retrain(request: RetrainRequest, say: Say) -> Trained | Answer:
    """Train a model by a recipe, or heal it on your data without one, and leave a run folder: best and last model,
    metrics.jsonl, summary.json.

    In Python a path gives a `Trained`: the run, its summary, the best model. A model in memory gives a model, whose
    `Trained` is `model.leansurgeon`. `set` changes keys of the recipe (`{"train.optim.lr": 1e-3}`).

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> run = leansurgeon.retrain(cut, out=f"{folder}/run", set={"train.duration": "2st"}, progress=False)
    >>> run.summary.steps, run.summary.task.metric
    (2, 'accuracy')

    Raises `UsageError`, `OutOfMemory`, `Diverged`, and after a signal `Stopped` or `Interrupted`, when everything is
    saved.
    """
    began = clock.began()
    launch.group_size()
    folder = runfolder.model_of(request.model) if request.model else runfolder.newest_shrunk(request.workspace)
    asked = request.model_dump(include={"data", "time", "columns", "new_tokenizer", "recipe", "resume", "lora"})
    recipe = healing.recipe_of(folder, RecipeInputs(**asked, sets=request.set), say)
    if request.data is None and not request.eval_only:
        from leansurgeon.training.setup import for_classes

        recipe = for_classes(recipe, folder, say)
    recipe = healing.for_device(recipe, cpu=request.cpu, say=say)
    if request.gpus is not None and not request.dry_run and not is_worker():
        check_gpus(request.gpus)
    options = {"cpu": request.cpu, "limit_batches": request.limit_batches}
    if request.dry_run or request.eval_only:
        from leansurgeon.training import preview

        if request.eval_only:
            return Answer(*preview.evaluation(recipe, folder, **options, say=say))
        return Answer(*preview.dry_run(recipe, folder, request.processes, **options, say=say))
    from leansurgeon.training.together import train_on

    run_dir = choose_run_folder(request, recipe, folder, say)
    options |= {"resume": request.resume, "resume_anyway": request.resume_anyway, "began": began}
    # On stderr a training draws its own progress; another `say` receives the training's lines too.
    talk = None if say is to_stderr else say
    summary = train_on(request.processes, recipe, folder, run_dir, say=talk, **options)
    # A resumed run names the recipe that was made for it, but no data.
    heals = request.data is not None or recipe.train.checkpoint.keep_start
    if heals and (told := healing.did_it_help(summary, folder)):
        say(told)
        if table := compare.tabulate(folder, run_dir):
            say(table)
    return Trained(run_dir, run_dir / runfolder.BEST, summary)


def choose_run_folder(request: RetrainRequest, recipe: TrainingRecipe, start: Path, say: Say) -> Path:
    """Return the run folder: `-o`, the run that is resumed, or a new folder in the workspace."""
    out, workspace, resume = request.out, request.workspace, request.resume
    if resume not in ("auto", "never"):
        run_dir = checkpoint.locate_checkpoint(Path(resume), hashes=False)[0]
        if out is not None and out.resolve() != run_dir.resolve():
            raise UsageError(f"--resume {resume} resumes in {run_dir}, but -o says {out}.", "Leave -o out.")
        return run_dir
    if out is not None:
        return out
    new = runfolder.new_run(workspace, recipe.name, recipe.train.seed)
    if rank() > 0:
        return new  # rank 0 decides
    unfinished = find_interrupted(workspace, recipe, start) if workspace.is_dir() else None
    if unfinished is not None and resume == "auto":
        return unfinished
    if unfinished is not None:
        say(f"An interrupted run of this recipe is in {unfinished}; --resume auto resumes it.")
    return new


EXAMPLES = (
    "leansurgeon retrain runs/lean --data texts/ --time 20m",
    "leansurgeon retrain runs/digits-vit-h8-l3 --recipe digits-vit",
)
COMMAND = Command("retrain", RetrainRequest, retrain, EXAMPLES, gives_model=True)
