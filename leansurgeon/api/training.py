"""`retrain` and `heal`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, overload

from leansurgeon.api.cutting import Place
from leansurgeon.commands import in_memory
from leansurgeon.commands.results import Trained
from leansurgeon.commands.surface import Progress, public, speaker, trusting

if TYPE_CHECKING:
    import torch

Changes = Mapping[str, object] | Sequence[str]


@overload
def retrain(model: Place | None = None, **options: Any) -> Trained: ...
@overload
def retrain(model: torch.nn.Module, **options: Any) -> torch.nn.Module: ...
@public
def retrain(
    model: Place | torch.nn.Module | None = None,
    *,
    data: in_memory.Data | None = None,
    time: str | float | None = None,
    columns: str | None = None,
    classes: str | Sequence[str] | None = None,
    recipe: str | os.PathLike[str] | None = None,
    set: Changes = (),
    lora: int | None = None,
    new_tokenizer: bool = False,
    gpus: int | None = None,
    cpu_processes: int | None = None,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    workspace: str | os.PathLike[str] = "runs",
    resume: str | os.PathLike[str] = "never",
    resume_anyway: bool = False,
    limit_batches: int | None = None,
    tokenizer: object | None = None,
    tower: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = True,
) -> Trained | torch.nn.Module:
    """Train a model by a recipe, or heal it on `data` without one; a run folder is left.

    `model` is a folder, a run, a result of `shrink`, or a model in memory; None is the newest shrunk model in the
    `workspace`. A path gives a `Trained`: the run, its summary, the best model. A model in memory gives a model, whose
    `Trained` is `model.leansurgeon`. `recipe` is the name of a shipped one or a file, and `set` changes keys of it
    (`{"train.optim.lr": 1e-3}`); `time` is the length of the whole call (`"20m"`, or seconds).

    Raises `errors.UsageError`, `errors.OutOfMemory`, `errors.Diverged`, and after a signal `errors.Stopped` or
    `errors.Interrupted`, when everything is saved.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> run = leansurgeon.retrain(cut, out=f"{folder}/run", set={"train.duration": "2st"}, progress=False)
    >>> run.summary.steps, run.summary.task.metric
    (2, 'accuracy')
    """
    from leansurgeon.architectures.towers import meant
    from leansurgeon.commands import retrain as command
    from leansurgeon.tasks.classes import naming
    from leansurgeon.training.recipe.asked import Asked

    began = perf_counter()
    say = speaker(progress)
    source = in_memory.written(model, tokenizer) if in_memory.is_model(model) else None
    folder = source.folder if source else None if model is None else Path(in_memory.place(model, "model"))
    length = f"{time:g}s" if isinstance(time, int | float) else time
    named = None if recipe is None else os.fspath(recipe)
    how = Asked(in_memory.data(data), length, columns, new_tokenizer, named, changes(set), os.fspath(resume), lora)
    asked = command.Running(
        gpus, cpu_processes, seed, None if out is None else Path(out), Path(workspace), resume_anyway, limit_batches
    )
    with trusting(trust_remote_code), meant(tower), naming(classes):
        ready = command.prepare(folder, how, asked, say)
        trained = command.retrain(ready, how, asked, say, began=began, talk=None if progress is True else say)
        made = Trained(trained.folder, trained.best, trained.summary, (source,) if source else ())
        return in_memory.returned(made, model) if source else made


@overload
def heal(model: Place, data: in_memory.Data, **options: Any) -> Trained: ...
@overload
def heal(model: torch.nn.Module, data: in_memory.Data, **options: Any) -> torch.nn.Module: ...
def heal(
    model: Place | torch.nn.Module, data: in_memory.Data, *, time: str | float | None = None, **options: Any
) -> Any:
    """`retrain` on one's own data: the model learns from the one that it was cut from, where that is at hand, and is
    kept as it was where nothing got better. Takes and gives what `retrain` does.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> leansurgeon.heal(cut, ["some text"], progress=False)
    Traceback (most recent call last):
    leansurgeon.errors.UsageError: lean takes images, and ...
    """
    return retrain(model, data=data, time=time, **options)


def changes(given: Changes) -> tuple[str, ...]:
    """Changed keys as `--set` takes them.

    >>> changes({"train.optim.lr": 1e-3, "train.compile": False, "train.duration": "2st"})
    ('train.optim.lr=0.001', 'train.compile=false', 'train.duration=2st')
    """
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Mapping):
        return tuple(given)
    return tuple(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items())
