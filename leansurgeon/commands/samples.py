"""Sample data of a command: what the user names, or what the run of the model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from leansurgeon.errors import Interrupted, LeanSurgeonError, OutOfMemory, UsageError, readable
from leansurgeon.progress import Say
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.files import in_home

if TYPE_CHECKING:
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.measure.data.calibration import Calibration
    from leansurgeon.training.recipe.schema import TaskChoice

T = TypeVar("T")
# What libraries raise for a call that does not fit their model; the user did not ask for this call.
CALLED_WRONGLY = (
    RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError, MemoryError,
)  # fmt: skip
BY_YOURS = "Yours alone decide; the result may be worse on others."
BY_WEIGHTS = "The weights alone decide; --calibrate DATA does much better."


def task_of_run(source: str) -> TaskChoice | None:
    """Return the task of the run that the model comes from, by its recipe; None if there is none."""
    folder = in_home(source)
    recipes = [place / "recipe.yaml" for place in (folder, folder.parent) if (place / "recipe.yaml").is_file()]
    if not recipes or not ((folder / "config.json").exists() or (folder / "model" / "config.json").exists()):
        return None
    from leansurgeon.training.recipe.reading import load

    return load(str(recipes[0])).task


def sample_data(
    opened: Source,
    named: str | None,
    task: TaskChoice | None,
    samples: int | None,
    seed: int,
    say: Say,
    flag: str = "--calibrate",
    device: str | None = "cpu",
    columns: str | None = None,
) -> Calibration:
    """Open the data that the user `named` with `flag`, else data of the `task`.

    Samples that the model generates itself are made on `device` (None: do not generate any). An encoder-decoder gets
    pairs of texts. Raises `UsageError` for missing or unsuitable data.
    """
    from leansurgeon.measure.data import calibration, own, pairs
    from leansurgeon.measure.data.choose_task import has_two_stacks

    if named == own.NAME and device:
        try:
            return own.samples(opened, seed=seed, device=device, say=say)
        except UsageError as error:
            hint = "Give other data."
            if flag == "--calibrate":
                hint = "Without --calibrate, the included novel or random tokens are used instead."
            raise UsageError(f"{opened.name} cannot make samples of its own: {error.message}", hint) from error
    if columns and not named:
        raise UsageError(f"--columns {columns} describes a table, and no table is named.", "Name the table.")
    how = {"samples": samples, "seed": seed, "say": say}
    if has_two_stacks(opened):
        return pairs.open_pairs(named or f"task:{task.name}", opened, flag=flag, columns=columns, **how)
    if named:
        return calibration.open_calibration(named, opened, cache=cache_folder(), flag=flag, columns=columns, **how)
    without = " (--uncalibrated does without)" if flag == "--calibrate" else ""
    say(f"Sample data: task {task.name}, as in the run's recipe{without}.")
    return calibration.from_task(task.name, task.options, opened, cache=cache_folder(), **how)


def sample_data_of_all(
    opened: Source,
    named: Sequence[str],
    task: TaskChoice | None,
    samples: int | None,
    seed: int,
    say: Say,
    device: str = "cpu",
    columns: str | None = None,
) -> Calibration:
    """Open the data that the user named, several sources mixed evenly. If texts are so few that fitting them would harm
    the model on others, add samples that the model generates itself. Raises what `sample_data` raises.
    """
    from leansurgeon.measure.data import own
    from leansurgeon.measure.data.choose_task import PREFIX, has_two_stacks
    from leansurgeon.measure.data.mixed import fill_up, is_thin, mix_sources

    if len(set(named)) < len(named):
        raise UsageError("--calibrate names the same data twice.")
    if not all(named):
        raise UsageError("--calibrate names no data.", "Give text files, a folder of images or task:NAME.")
    if not named:
        return sample_data(opened, None, task, samples, seed, say, columns=columns)
    parts = [sample_data(opened, name, None, samples, seed, say, device=device, columns=columns) for name in named]
    whole = mix_sources(parts)
    has_own = own.NAME in named or any(name.startswith(PREFIX) for name in named)
    if has_own or has_two_stacks(opened) or not is_thin(whole, prose=own.prose(opened) is not None):
        return whole
    made = own_samples(opened, seed, device, say, BY_YOURS)
    if made is None:
        return whole
    made = fill_up(whole, made)
    say(f"{whole.says}: few samples, so the model's own stand beside them ({made.says}).")
    return mix_sources([*parts, made])


def try_work(work: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `work` returns or, if it fails because of what the model is, None and the reason."""
    try:
        return work(), ""
    except (Interrupted, OutOfMemory):
        raise
    except LeanSurgeonError as error:
        return None, error.message
    except CALLED_WRONGLY as error:
        return None, readable(f"{type(error).__name__}: {error}")


def own_samples(opened: Source, seed: int, device: str, say: Say, otherwise: str = BY_WEIGHTS) -> Calibration | None:
    """Return samples that the model generates itself or, if it cannot, samples shipped with the package.

    Beside the user's data (`otherwise` is `BY_YOURS`), only generated ones. If there are none, reports the reason and
    returns None.
    """
    from leansurgeon.measure.data import own

    made, why = try_work(lambda: own.samples(opened, seed=seed, device=device, say=say))
    why = f"{opened.name} cannot make samples of its own: {why}" if why else ""
    if made is None and otherwise == BY_WEIGHTS:
        made, lacking = try_work(lambda: own.make_shipped_samples(opened, cache=cache_folder(), seed=seed))
        why += f" {lacking}" if lacking else ""
    if made is None:
        say(f"{why} {otherwise}")
    elif otherwise == BY_WEIGHTS:
        say(f"{why} Sample data: none of yours, so {made.says}.".strip())
        say("--calibrate takes yours; --uncalibrated does without.")
    return made


def data_to_measure(
    opened: Source,
    named: str | None,
    model: str,
    what: str,
    samples: int | None,
    seed: int,
    say: Say,
    columns: str | None = None,
) -> Calibration:
    """Return the data on which to measure `what`, for commands with --data, which may also name a run for its training
    data.

    Raises `UsageError` if nothing is named and `model` is not a run.
    """
    task = task_of_run(named or model)
    named = None if task else named
    if not named and task is None:
        raise UsageError(
            f"{what} needs sample data, and {model} is no run that says what it was trained on.",
            "Give --data: text files, a folder of images, or task:NAME.",
        )
    return sample_data(opened, named, task, samples, seed, say, "--data", None, columns)
