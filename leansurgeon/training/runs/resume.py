"""Where to resume an interrupted training, and whether that is allowed: the same recipe, data and starting model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say, silent
from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.tasks import Task
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder

# Keys that do not change what is computed.
FREE = ("expected", "train.trackers", "train.checkpoint.every", "train.checkpoint.keep_last", "train.workers")


def point(
    run_dir: Path,
    recipe: TrainingRecipe,
    origin: dict[str, str],
    *,
    resume: str,
    anyway: bool = False,
    replace: bool = False,
    say: Say = silent,
) -> Path | None:
    """Return the checkpoint from which to resume the training in `run_dir`; None to start at step 0 in a free folder.

    `resume` is "never", "auto" (resume if there is something to resume) or the path of a checkpoint or run folder.
    `replace` discards a run that cannot be resumed instead of refusing. Raises `UsageError` if the folder is not an
    unfinished run, or the recipe or the starting model has changed.
    """
    given = None if resume in ("never", "auto") else checkpoint.locate_checkpoint(Path(resume))
    if given and given[0].resolve() != run_dir.resolve():
        raise UsageError(f"The run in {given[0]} can only be resumed there, not in {run_dir}.")
    with runfolder.explain_errors(run_dir):
        free = not run_dir.is_dir() or not any(run_dir.iterdir())
    if resume == "never" or free:
        runfolder.check_free(run_dir, replace=replace)
        return None
    if not (run_dir / runfolder.RECIPE).is_file():
        raise UsageError(f"{run_dir} is not empty and not a run, so there is nothing to resume.", "Choose another -o.")
    if (run_dir / runfolder.SUMMARY).is_file():
        if replace:
            return None
        raise UsageError(f"The run in {run_dir} is finished.", "Choose another folder with -o to train it again.")
    checkpoint_dir = given[1] if given else checkpoint.newest(run_dir, say)
    if checkpoint_dir is None:
        say(f"{run_dir} was interrupted before its first checkpoint; it starts again.")
        return None
    try:
        check_same(checkpoint.read_state(checkpoint_dir), recipe, origin, checkpoint_dir, anyway=anyway)
    except UsageError:
        if replace:
            return None
        raise
    return checkpoint_dir


def check_same(state: JsonObject, recipe: TrainingRecipe, origin: dict[str, str], saved: Path, *, anyway: bool) -> None:
    """Raise `UsageError` naming the first key of the recipe, or the file of the model, that has changed."""
    if anyway:
        return
    hint = "Restore the old value, start a new run, or resume with the new one: --resume-anyway."
    if key := first_difference(today(state["recipe"]), recipe.model_dump(mode="json")):
        name, old, new = key
        raise UsageError(f"The recipe has changed since {saved}: {name} was {old!r} and is {new!r}.", hint)
    for file, digest in origin.items():
        if state["origin"].get(file) not in (None, digest):
            raise UsageError(f"The model that this run started with has changed since {saved}: {file} differs.", hint)


def check_data(state: JsonObject, task: Task, *, anyway: bool = False) -> None:
    """Raise `UsageError` if the size of the task's data has changed, since its order would change too; and, unless
    `anyway`, if its cache entry has: as many samples, but others.
    """
    for split in ("train", "eval"):
        size = task.size(split)
        if state["data"][split] != size:
            raise UsageError(
                f"The {split} data has {size:,} samples, and had {state['data'][split]:,} when this run was "
                "interrupted.",
                "Restore the old data, or train again on the new data: -o with another folder, on the model here or "
                "on RUN/model, the best of this run so far.",
            )
    before, entry = state.get("entry"), task.prepared_as
    if None not in (before, entry) and before != entry and not anyway:
        raise UsageError(
            f"The data has changed since this run was interrupted. It was prepared as {before}, and is {entry} now.",
            "Restore the old data, start a new run, or resume with the new one: --resume-anyway.",
        )


def is_free(path: str, free: tuple[str, ...]) -> bool:
    """Return whether this key, or one around it, is among those that may differ."""
    return any(path == key or path.startswith(f"{key}.") for key in free)


def first_difference(old: Json, new: Json, free: tuple[str, ...] = FREE, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the first key, in the order of the recipe, whose value differs, with both values; keys in `free` may
    differ.
    """
    if is_free(path, free):
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        parts = ((old.get(key), new.get(key), free, f"{path}.{key}" if path else str(key)) for key in new | old)
        return next(filter(None, (first_difference(*part) for part in parts)), None)
    return None if old == new else (path, old, new)


def today(recipe: JsonObject) -> JsonObject:
    """Return a saved recipe with keys that were added since at their defaults."""
    try:
        return TrainingRecipe.model_validate(recipe).model_dump(mode="json")
    except ValueError:
        return recipe


def origin_of(model_dir: Path) -> dict[str, str]:
    """Return name and SHA-256 of the files that a training starts from: config and weights."""
    files = [*sorted(Path(model_dir).glob("*.safetensors")), Path(model_dir) / "config.json"]
    return {file.name: checkpoint.digest(file) for file in files if file.is_file()}


def find_interrupted(workspace: Path, recipe: TrainingRecipe, model_dir: Path) -> Path | None:
    """Return the newest unfinished run below `workspace` of this recipe and this model that no process is training.

    Hashes only the model, and only if a recipe matches; resuming checks the rest.
    """
    wanted, origin = recipe.model_dump(mode="json"), None
    folders = [file.parent for file in workspace.glob(f"*/{checkpoint.FOLDER}")]
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime_ns, reverse=True):
        if (folder / runfolder.SUMMARY).exists() or not (folder / runfolder.RECIPE).is_file():
            continue
        if runfolder.is_held(folder):
            continue
        state = None
        for path in checkpoint.all_of(folder):
            if state is None and checkpoint.torn(path, hashes=False) is None:
                with suppress(UsageError):  # its contents were not checked
                    state = checkpoint.read_state(path)
        if not state or first_difference(today(state["recipe"]), wanted):
            continue
        origin = origin or origin_of(model_dir)
        if state["origin"] == origin:
            return folder
    return None
