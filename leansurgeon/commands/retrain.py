"""Retrain: choose the model, the run folder and the recipe (a named one, that of the model's preset, or one made for
model and data), and train.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from leansurgeon import clock
from leansurgeon.architectures.presets import PRESETS
from leansurgeon.checkpoints import record
from leansurgeon.commands import compare
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
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.request import Opt
from leansurgeon.tasks import user_data
from leansurgeon.training.processes.launch import check_gpus, group_size
from leansurgeon.training.recipe import from_model, reading
from leansurgeon.training.recipe.from_model import RecipeInputs
from leansurgeon.training.recipe.schema import ExperimentRecipe, TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.resume import find_interrupted
from leansurgeon.training.runs.summary import OnTest, Scores, Summary, Task

BY_LOSS = ("micro_f1", "spearman")  # not means over samples: their losses are compared
GPU_ONLY = {"precision": ("fp16", "fp32", "fp32 instead of fp16"), "compile": (True, False, "no compile")}
Made = TypeVar("Made", TrainingRecipe, ExperimentRecipe)


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
    group_size()
    folder = runfolder.model_of(request.model) if request.model else runfolder.newest_shrunk(request.workspace)
    asked = request.model_dump(include={"data", "time", "columns", "new_tokenizer", "recipe", "resume", "lora"})
    recipe = recipe_of(folder, RecipeInputs(**asked, sets=request.set), say)
    if request.data is None and not request.eval_only:
        from leansurgeon.training.setup import for_classes

        recipe = for_classes(recipe, folder, say)
    recipe = for_device(recipe, cpu=request.cpu, say=say)
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
    if heals and (told := did_it_help(summary, folder)):
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


# -- the recipe -----------------------------------------------------------------------------------


def recipe_of(folder: Path, asked: RecipeInputs, say: Say) -> TrainingRecipe:
    """Return the recipe for the model in `folder`. A recipe made here is printed, since the user has not seen it.

    Raises `UsageError` for flags that exclude each other and for missing data, before anything heavy.
    """
    if asked.data is None:
        return find_named_recipe(folder, asked, say)
    if asked.recipe is not None:
        raise UsageError(
            "--data and --recipe exclude each other: --data makes a recipe of its own.",
            "Leave one of them out, or --set task.data=...",
        )
    data = user_data.recognise(asked.data)
    if asked.resume not in ("auto", "never") and not asked.sets:  # resuming uses the recipe made for that run
        recipe = checkpoint.locate_checkpoint(Path(asked.resume), hashes=False)[0] / runfolder.RECIPE
        if recipe.is_file():
            return reading.load_training(str(recipe))
    made = from_model.make_recipe(folder, data, asked, cache_folder(), say)
    say(f"The recipe for {folder} and {asked.data} is kept in the run folder, to be edited and used with --recipe:")
    say("".join(f"    {line}\n" for line in reading.brief(made).splitlines()).rstrip("\n"))
    return made


def find_named_recipe(folder: Path, asked: RecipeInputs, say: Say) -> TrainingRecipe:
    """Return the named recipe, or that of the preset that the model was cut from. Raises `UsageError` if
    there is none.
    """
    if asked.columns:
        raise UsageError(f"--columns {asked.columns} describes a table, and no table is named.", "Add --data FILE.")
    name = asked.recipe
    if not name:
        hint = (
            "--data PATH heals it on your own data. Or name a recipe: --recipe NAME (`leansurgeon recipes list`) or "
            "--recipe FILE.yaml."
        )
        made = record.read(folder)
        if made is None:
            raise UsageError(f"{folder} holds no surgery.json, so no recipe is bound to it.", hint)
        preset = made.source.preset
        name = PRESETS[preset].recipe if preset in PRESETS else None
        if name is None:
            of = f"its preset '{preset}' has no recipe" if preset else "it was not cut from a preset"
            raise UsageError(f"No recipe is bound to {folder}: {of}.", hint)
    sets = list(asked.sets)
    if asked.time:
        sets.append(f"train.duration={asked.time}")
        train = reading.load_training(name, asked.sets, transferred=runfolder.has_learned(folder)).train
        if isinstance(train.schedule.warmup, str):  # in epochs or steps, whose number is unknown
            sets.append("train.schedule.warmup=0.1")
            say(f"--time {asked.time}: the warm-up of {train.schedule.warmup} becomes a tenth of the time.")
    sets += ["train.new_tokenizer=true"] if asked.new_tokenizer else []
    sets += [f"train.lora.rank={asked.lora}"] if asked.lora else []
    settings = reading.load_training(name, sets, transferred=runfolder.has_learned(folder))
    if asked.recipe is None:
        say(f"Model {folder}, recipe {name}.")
    return settings


def for_device(settings: Made, *, cpu: bool, say: Say) -> Made:
    """Adapt the recipe to this machine: without a GPU, fp32 instead of fp16 and no `compile`, reported in one line.

    For an experiment, this includes the settings of arms with transferred weights.
    """
    own = getattr(settings, "retrain", {})
    of_all, of_own = instead(settings.train.model_dump()), instead(own)
    if not (of_all or of_own):
        return settings
    import torch

    if not cpu and torch.accelerator.is_available():
        return settings
    told = (said for key, (_, _, said) in GPU_ONLY.items() if key in of_all or key in of_own)
    say(f"There is no GPU to train on: {' and '.join(told)}.")
    changes = {"train": settings.train.model_copy(update=of_all)}
    return settings.model_copy(update=changes | ({"retrain": own | of_own} if own else {}))


def instead(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the replacements for settings that need a GPU."""
    return {key: here for key, (asked, here, _) in GPU_ONLY.items() if settings.get(key) == asked}


def did_it_help(summary: Summary, folder: Path) -> str | None:
    """Describe the effect of healing in one sentence, on samples that chose nothing if there are any. None if there is
    nothing to compare with.
    """
    best, task, test = summary.best or summary.final, summary.task, summary.test
    kept_start = best is not None and best.step == 0
    before, after = summary.before, summary.final if kept_start else best
    if test and test.before and (test.best or test.last):
        before, after = test.before, test.best or test.last
    if before is None or after is None or before.metric is None or after.metric is None:
        return None

    def show_metric(value: float) -> str:
        """Return the metric in per cent or as a plain number, as the task defines it."""
        return f"{100 * value:.2f} %" if task.percent else f"{value:.4g}"

    if summary.recipe["train"].get("new_head"):
        return f"Its new head reaches {task.metric_label} {show_metric(after.metric)}{macro_f1(after)}."
    change = f"{task.metric_label} {show_metric(before.metric)} before and {show_metric(after.metric)} after"
    change += macro_f1(before, after)
    better = (
        not kept_start and (after.metric > before.metric) == task.higher_is_better and after.metric != before.metric
    )
    if test and test.before:
        higher, (low, high) = task.higher_is_better and task.metric not in BY_LOSS, (test.gain_low, test.gain_high)
        sure = low is not None and high is not None and (low > 0 if higher else high < 0)
        change += f", on {test.samples:,} held-out samples{gain(test, task)}"
        if better and not sure:
            return f"Not shown to help: {change}. Give it more --time, or more data."
    if better and not test:
        return f"Better on the samples that chose its best step, which proves little: {change}. No others were judged."
    if better:
        return f"It healed: {change}."
    where = f"The model as it was is in {folder}{', and was kept as the best' if kept_start else ''}"
    return f"It did not help: {change}. {where}; give it more --time, or more data."


def macro_f1(*scores: Scores) -> str:
    """Return ` (macro F1 49.00 % and 72.10 %; the largest class has 96.0 %)` if the largest class has that many
    samples.
    """
    known = [f"{100 * one.metrics['macro_f1']:.2f} %" for one in scores if one.largest_class]
    most = f"the largest class has {100 * scores[-1].largest_class:.1f} %" if known else ""
    return f" (macro F1 {' and '.join(known)}; {most})" if known else ""


def gain(test: OnTest, task: Task) -> str:
    """Return the interval of a gain as text; empty if unknown."""
    if test.gain_low is None or test.gain_high is None:
        return ""
    times, digits, unit = (100, ".2f", " points") if task.percent else (1, ".4f", "")
    if task.metric in BY_LOSS or not task.higher_is_better:
        times, digits, unit = 1, ".4f", " of loss" if task.metric in BY_LOSS else " nats a token"
    return f" (difference {times * test.gain_low:+{digits}} to {times * test.gain_high:+{digits}}{unit}, 95 %)"


EXAMPLES = (
    "leansurgeon retrain runs/lean --data texts/ --time 20m",
    "leansurgeon retrain runs/digits-vit-h8-l3 --recipe digits-vit",
)
COMMAND = Command("retrain", RetrainRequest, retrain, EXAMPLES, gives_model=True)
