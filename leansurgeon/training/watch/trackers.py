"""Where numbers go besides `metrics.jsonl`: tensorboard, trackio or wandb, through Accelerate, where installed."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError
from leansurgeon.reading.jsonfile import JsonObject, by_dotted_key
from leansurgeon.training.recipe.schema import TrainingRecipe

_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "trackio": ("trackio",), "wandb": ("wandb",)}


def check(names: tuple[str, ...]) -> None:
    """Raises `UsageError` for a tracker that is not installed."""
    for name in names:
        if not any(find_spec(package) for package in _PACKAGES[name]):
            raise UsageError(
                f"The recipe asks for the tracker {name}, which is not installed.",
                f"`pip install {name}`, or leave it out of train.trackers; metrics.jsonl is always written.",
            )


class Trackers:
    """The trackers of one run; without any, everything here does nothing. Rank 0 alone makes one."""

    def __init__(self, recipe: TrainingRecipe, run_dir: Path, *, main: bool) -> None:
        self._trackers: list[Any] = []
        names = recipe.train.trackers if main else ()
        if not names:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        for name in names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            folder = {"logging_dir": str(run_dir / "trackers")} if kind.requires_logging_directory else {}
            with redirect_stdout(sys.stderr):  # trackio talks, and stdout is for data
                tracker = kind(recipe.name, **folder)
                if hasattr(tracker, "start"):  # newer versions of Accelerate open a tracker in two steps
                    tracker.start()
                tracker.store_init_configuration(_plain(recipe.model_dump(mode="json", exclude_none=True)))
            self._trackers.append(tracker)

    def log(self, values: dict[str, float | None], step: int) -> None:
        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        for tracker in self._trackers:
            tracker.log(numbers, step=step)

    def close(self) -> None:
        for tracker in self._trackers:
            with redirect_stdout(sys.stderr):
                if tracker.name == "trackio":  # Accelerate's way leaves it to end, and talk, once more with the process
                    import trackio

                    trackio.finish()
                else:
                    tracker.finish()
        self._trackers = []


def _plain(settings: JsonObject) -> JsonObject:
    """`{"train.optim.lr": 1e-3, ...}`, lists as text: what every tracker takes."""
    values = by_dotted_key(settings)
    return {key: v if isinstance(v, (int, float, str, bool)) else str(v) for key, v in values.items()}
