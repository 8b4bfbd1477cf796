"""The end of a training: the last model, its summary, and what is measured once that stands: announced, bounded, ended
by the first Ctrl-C.

A measure that is cut short costs no result: it is missing from the summary, and the exit code is that of success.
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from leansurgeon.errors import plural
from leansurgeon.progress import duration_text
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training import budget, judge, testing
from leansurgeon.training.cards import cards
from leansurgeon.training.evaluate import all_reduced, still_falling
from leansurgeon.training.processes import engine
from leansurgeon.training.processes.signals import Wish
from leansurgeon.training.runs import checkpoint, summary
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Part, Summary
from leansurgeon.training.watch import bounded, measures, speed
from leansurgeon.version import __version__

if TYPE_CHECKING:
    from leansurgeon.training.state import Run

LONGEST = 600.0  # seconds, or as long as the training took: after that nobody waits for a measure


def finish(run: Run, experiment: Part | None) -> Summary:
    """Save the last model and write the summary: a folder that has one is complete. Then measure, and write what was
    found into the same summary.
    """
    seconds = run.spent()
    judge.saved(run, runfolder.LAST)
    if not run.recipe.train.checkpoint.keep_best:
        judge.saved(run, runfolder.BEST)
    made = _summary(run, experiment, seconds)
    _publish(run, made)
    known = measured(run, seconds)
    if any(run.council.share(lambda: list(known))):
        made = replace(made, **known)
        _publish(run, made)
    run.council.on_main(lambda: cards(run.folder, run.loaded.folder, made))
    run.progress.say(f"done in {duration_text(run.spent())}: {run.folder}")
    run.trainer.accelerator.free_memory()
    return made


def measured(run: Run, seconds: float) -> JsonObject:
    """What the summary of a training of `seconds` holds besides, as far as it came: `test`, `kappa`, `heads`. To be
    called by all processes.
    """
    known: dict[str, Any] = {}
    if testing.is_wanted(run):
        run.progress.say(f"The result is in {run.folder}; now the test split. Ctrl-C leaves it out.")
        try:
            known["test"] = testing.at_end(run, run.stops.raise_if_asked)
        except Wish:
            run.progress.say("The test split is left out, and so is everything else.")
            return known
    names = measures.wanted_names(run)
    if not names:
        return known
    limit = budget.measures_seconds(run) or max(LONGEST, seconds)
    said = " and ".join(names)
    run.progress.say(
        f"The result is in {run.folder}; now measuring {said}, {duration_text(limit)} at most. Ctrl-C leaves it out."
    )
    start = time.perf_counter()
    try:
        with bounded.until(limit):
            measures.at_end(run, known)
    except bounded.Enough as end:
        left = [name for name in names if name not in known]
        run.progress.say(f"{plural(len(left), 'measure')} left out ({', '.join(left)}): {end}.")
        return known
    run.progress.say(f"Measured in {duration_text(time.perf_counter() - start)}.")
    return known


def _publish(run: Run, made: Summary) -> None:
    """Put the summary in its place. Called by all processes."""

    def write() -> None:
        run.check_folder()
        summary.write(run.folder, made)
        checkpoint.remove(run.folder)

    run.council.on_main(write)


def _summary(run: Run, experiment: Part | None, seconds: float) -> Summary:
    info, metric, scheme, history = run.loaded.info, run.task.metric, run.plan, run.history
    windows = history.windows[1:] or history.windows  # the first one warms up
    step_seconds = statistics.median([spent / steps for steps, spent in windows for _ in range(int(steps))])
    rate, unit = speed.rate(run, history.done, 1, step_seconds)
    trained = sum(spent for _, spent in history.windows)
    return Summary(
        name=run.recipe.name,
        model=summary.Model(
            **{key: info.get(key) for key in ("source", "shape", "parameters", "parts", "surgery", "init_std")},
            start_name=_called(run.loaded.folder),
            start_files=run.origin,
        ),
        task=summary.Task(
            run.task.name,
            metric.key,
            metric.label,
            metric.higher_is_better,
            metric.percent,
            run.task.size("train"),
            run.task.size("eval"),
            run.task.describe(),
        ),
        seed=run.trainer.seed,
        device=engine.device_name(run.trainer.accelerator),
        world_size=scheme.processes,
        micro_batch=scheme.micro,
        precision=run.recipe.train.precision,
        versions=_versions(),
        before=history.before,
        final=history.last,
        best=history.best,
        averaged=run.trainer.average is not None,
        epochs=scheme.position(history.done) / scheme.epoch_samples,
        steps=history.done,
        stopped_early=history.early,
        left_out_steps=tuple(step + 1 for step in history.given_up),
        resumed_after=tuple(history.resumed),
        seconds=seconds,
        step_ms=1000 * step_seconds,
        throughput=rate,
        throughput_unit=unit,
        data_wait=history.waited / max(trained, 1e-9),
        memory_bytes=_largest(max(history.peak, run.memory.bytes), run),
        memory_kind=run.memory.kind,
        recipe=run.recipe.model_dump(mode="json"),
        started=history.started,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        experiment=experiment,
        last_losses_still_falling=still_falling(history.eval_losses),
    )


def _called(folder: Path) -> str:
    """The name of a model's folder; of a run, whose model lies in a folder of its own, that of the run."""
    folder = Path(folder).resolve()
    return folder.parent.name if folder.name in (runfolder.BEST, runfolder.LAST) else folder.name


def _largest(value: int, run: Run) -> int:
    """The largest `value` of any process."""
    accelerator = run.trainer.accelerator
    values = torch.zeros(accelerator.num_processes, dtype=torch.int64, device=accelerator.device)
    values[accelerator.process_index] = value
    return int(all_reduced(values, accelerator).max())


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "transformers", "timm", "accelerate")}
    return {"leansurgeon": __version__, "python": platform.python_version(), **packages}
