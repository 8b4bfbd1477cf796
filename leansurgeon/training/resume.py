"""Where an interrupted training goes on, and whether it may: the same recipe, the same data, the same start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError
from leansurgeon.training import checkpoint, runfolder
from leansurgeon.training.recipe import TrainingRecipe

NEVER, AUTO = "never", "auto"
# Keys that change nothing that is computed.
_FREE = ("expected", "train.trackers", "train.checkpoint.every", "train.checkpoint.keep_last")


def point(
    run_dir: Path,
    recipe: TrainingRecipe,
    origin: dict[str, str],
    *,
    resume: str,
    anyway: bool = False,
    replace: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Path | None:
    """The checkpoint from which the training in `run_dir` goes on; None where it starts at step 0 in a free folder.

    `resume` is "never", "auto" (go on where there is something to go on from) or the path of a checkpoint or run
    folder. `replace` gives up a run that cannot be continued instead of refusing. Raises `UsageError`: a folder that is
    no unfinished run, a recipe or a starting model that has changed.
    """
    if resume == NEVER or not run_dir.exists() or not any(run_dir.iterdir()):
        if resume not in (NEVER, AUTO):
            checkpoint.located(Path(resume))
        runfolder.check_free(run_dir, replace=replace)
        return None
    if not (run_dir / runfolder.RECIPE).is_file():
        raise UsageError(f"{run_dir} is not empty and no run, so there is nothing to resume.", "Choose another -o.")
    if (run_dir / runfolder.SUMMARY).is_file():
        if replace:
            return None
        raise UsageError(f"The run in {run_dir} is finished.", "Choose another folder with -o to train it again.")
    found = checkpoint.newest(run_dir, say) if resume == AUTO else checkpoint.located(Path(resume))[1]
    if found is None:
        say(f"{run_dir} was interrupted before its first checkpoint; it starts anew.")
        return None
    try:
        check_same(checkpoint.read_state(found), recipe, origin, found, anyway=anyway)
    except UsageError:
        if replace:
            return None
        raise
    return found


def check_same(
    state: dict[str, Any], recipe: TrainingRecipe, origin: dict[str, str], found: Path, *, anyway: bool
) -> None:
    """Raises `UsageError` naming the first key of the recipe, or the file of the model, that has changed."""
    if anyway:
        return
    key = first_difference(state["recipe"], recipe.model_dump(mode="json"))
    hint = "Give back the old value, start a new run, or go on with the new one: --resume-anyway."
    if key is not None:
        name, old, new = key
        raise UsageError(f"The recipe has changed since {found}: {name} was {old!r} and is {new!r}.", hint)
    for file, digest in origin.items():
        if state["origin"].get(file) not in (None, digest):
            raise UsageError(f"The model that this run started with has changed since {found}: {file} differs.", hint)


def check_data(state: dict[str, Any], data: dict[str, int]) -> None:
    """Raises `UsageError` where the data has another size: its order would be another one."""
    for split, size in data.items():
        if state["data"][split] != size:
            raise UsageError(
                f"The {split} data has {size} samples, and {state['data'][split]} when this run was interrupted.",
                "Bring back the old data, or start a new run.",
            )


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first key, in the order of the recipe, whose value differs, with both values."""
    if any(path == free or path.startswith(f"{free}.") for free in _FREE):
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            found = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
            if found:
                return found
        return None
    return None if old == new else (path, old, new)


def origin_of(model_dir: Path) -> dict[str, str]:
    """Name and SHA-256 of the weight files that a training starts from."""
    return {file.name: checkpoint.digest(file) for file in sorted(Path(model_dir).glob("*.safetensors"))}


def interrupted(workspace: Path, recipe: TrainingRecipe, model_dir: Path) -> Path | None:
    """The youngest unfinished run below `workspace` of this recipe and this model that nobody is training now."""
    found = []
    for file in workspace.glob(f"*/{checkpoint.FOLDER}"):
        folder = file.parent
        if (folder / runfolder.SUMMARY).exists() or not (folder / runfolder.RECIPE).is_file():
            continue
        newest = checkpoint.newest(folder)
        if newest is None or runfolder.is_held(folder):
            continue
        state = checkpoint.read_state(newest)
        same = first_difference(state["recipe"], recipe.model_dump(mode="json")) is None
        if same and state["origin"] == origin_of(model_dir):
            found.append(folder)
    return max(found, key=lambda folder: folder.stat().st_mtime_ns, default=None)
