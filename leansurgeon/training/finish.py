"""The end of a training: the last model, its summary, final measurements and model cards.

Final measurements start once the summary is written. They are announced, limited in time, and stopped by the first
Ctrl-C. A measurement that is cut short is missing from the summary, but the exit code is that of success.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.checkpoints.places import without_places
from leansurgeon.checkpoints.publish.card import Measured, Metric, Training, write_card
from leansurgeon.errors import plural
from leansurgeon.intervals import paired_interval
from leansurgeon.progress import duration_text
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training import budget, distributed, evaluator, measures, starting, state
from leansurgeon.training.objective import Objective, TeacherObjective
from leansurgeon.training.processes.signals import StopRequested, TimeUp, until
from leansurgeon.training.recipe.durations import parse_duration
from leansurgeon.training.runs import checkpoint, summary
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import OnTest, Part, Scores, Summary, own_test
from leansurgeon.training.state import Run
from leansurgeon.version import __version__

BATCHES = 32  # of a test split at least, if it has that many samples
LONGEST = 600.0  # seconds, or as long as the training took: the time limit of the final measurements


def finish(run: Run, experiment: Part | None) -> Summary:
    """Save the last model and write the summary, which marks the folder as complete. Then measure and add the findings
    to the same summary.
    """
    seconds = run.seconds_spent()
    evaluator.export_model(run, runfolder.LAST)
    if not run.train.checkpoint.keep_best:
        evaluator.export_model(run, runfolder.BEST)
    made = _summary(run, experiment, seconds)
    _publish(run, made)
    known = measure_at_end(run, seconds)
    if run.group.share(lambda: list(known)):
        made = replace(made, **known)
        _publish(run, made)
    run.group.on_main(lambda: write_cards(run.folder, run.loaded.folder, made, run.task.identity))
    run.say(f"done in {duration_text(run.seconds_spent())}: {run.folder}")
    run.trainer.accelerator.free_memory()
    return made


def measure_at_end(run: Run, seconds: float) -> JsonObject:
    """Return the final measurements of a training of `seconds`, as far as they got: `test`, `kappa`, `heads`. All
    processes must call this.
    """
    known: JsonObject = {}
    if "test" in run.task.splits and run.train.eval.test:
        run.say(f"The result is in {run.folder}; now the test split. Ctrl-C skips it.")
        try:
            known["test"] = _test_best(run)
        except StopRequested:
            run.say("The test split and all other measurements are skipped.")
            return known
    wanted = measures.list_wanted(run)
    names = [one.kind for one in wanted]
    if not names:
        return known
    whole = parse_duration(run.train.duration).seconds
    limit = max(LONGEST, seconds) if whole is None else budget.MEASURES * whole
    now = f"now measuring {' and '.join(names)}, {duration_text(limit)} at most"
    run.say(f"The result is in {run.folder}; {now}. Ctrl-C skips it.")
    start = time.perf_counter()
    try:
        with until(limit):
            measures.measure(run, wanted, known, end=True)
    except TimeUp as end:
        left = [name for name in names if name not in known]
        run.say(f"{plural(len(left), 'measure')} left out ({', '.join(left)}): {end}.")
    else:
        run.say(f"Measured in {duration_text(time.perf_counter() - start)}.")
    return known


def _test_best(run: Run) -> OnTest:
    """Return the test scores of the best weights, as chosen on the evaluation split.

    The test split is read once, after the training, and nothing is chosen by it. A published split also scores the last
    weights; a split of the user's own data also scores the starting weights, to show what training gained. The models
    are already on disk.
    """
    best, done, own = run.history.best, run.history.done, run.task.held_out is not None
    other, kept = best.step != done, best.step != done and run.train.checkpoint.keep_best
    before = None
    if budget.judges_start(run):
        before = _on_test(run, _score_model(run, starting.load_start(run.recipe, run.loaded.folder, run.task)))
    last = None if own and kept else _on_test(run, run.judged)
    if last and not kept:
        chosen = last
    elif before and best.step == 0:
        chosen = before
    else:  # read back from the run folder
        torch.manual_seed(run.train.seed)
        model = load(run.folder / runfolder.BEST, run.task.head, run.task.model_overrides())
        chosen = _on_test(run, _score_model(run, model))
    result = OnTest(
        run.task.size("test"),
        last and last.scores(),
        None if other and not kept else chosen.scores(),
        before and before.scores(),
        _on_test(run, TeacherObjective(run.judged)).scores() if budget.judges_source(run) else None,
    )
    if result.best and chosen.parts:
        sums, counts = zip(*chosen.parts, strict=True)
        result = replace(result, sums=sums, counts=counts)
    if before:  # by how much each batch's metric sum changed, and its label count
        both = list(zip(before.parts, chosen.parts, strict=True))
        if gain := paired_interval([new - old for (old, _), (new, _) in both], [count for _, (_, count) in both]):
            result = replace(result, gain_low=gain[0], gain_high=gain[1])
    metric = run.task.metric
    which = "best by validation" if kept else "last step"
    run.say(
        f"test split, {plural(result.samples, 'sample')}: {metric.label} {metric.format_value(chosen.metric)} ({which})"
    )
    run.note(type="test", step=done, **result.as_dict(), metric_key=metric.key)
    return result


def _on_test(run: Run, scored: Objective) -> evaluator.Evaluation:
    """Evaluate on the test split in small batches: dozens of them, whose spread gives an interval."""
    train, check = run.train, run.stops.raise_if_asked
    batch = min(train.eval.batch, max(1, run.task.size("test") // (BATCHES * run.group.processes)))
    return evaluator.evaluate(
        scored, run.task, run.trainer.accelerator, batch=batch, check=check, workers=train.workers, split="test"
    )


def _score_model(run: Run, loaded: Loaded) -> Objective:
    teacher = run.task.head == "features" and run.judged.teacher.of_copy(loaded)
    return Objective(loaded, run.task, run.train, teacher or None).to(run.device)


def _publish(run: Run, made: Summary) -> None:
    """Write the summary to the run folder. All processes must call this."""

    def write() -> None:
        run.check_folder()
        summary.write(run.folder, made)
        shutil.rmtree(run.folder / checkpoint.FOLDER, ignore_errors=True)  # its weights are in model/ and last/

    run.group.on_main(write)


def _summary(run: Run, experiment: Part | None, seconds: float) -> Summary:
    info, metric, scheme, history = run.loaded.info, run.task.metric, run.plan, run.history
    windows = history.windows[1:] or history.windows  # the first window includes warm-up
    step_seconds = state.median_step(windows)
    rate, unit = state.get_rate(run, 1, step_seconds)
    trained = sum(spent for _, spent in history.windows)
    return Summary(
        name=run.recipe.name,
        model=summary.Model(
            **{key: info.get(key) for key in ("source", "shape", "parameters", "parts", "surgery", "init_std")},
            start=summary.Start(runfolder.display_name(run.loaded.folder), run.origin),
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
        seed=run.train.seed,
        device=distributed.device_name(run.device),
        world_size=scheme.processes,
        micro_batch=scheme.micro,
        precision=run.train.precision,
        versions={"leansurgeon": __version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "timm", "accelerate")},
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
        memory=summary.Memory(int(run.group.largest([max(history.peak, run.memory.bytes)])[0]), run.memory.kind),
        recipe=run.recipe.model_dump(mode="json"),
        started=history.started,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        experiment=experiment,
        last_losses_still_falling=evaluator.still_falling(history.eval_losses),
    )


def write_cards(run_dir: Path, start: Path, made: Summary, split: Mapping[str, str]) -> None:
    """Write README.md for the best and the last model of a run, and add the training data, a task with this `split`, to
    their records. `start` is the folder that the training began with.
    """
    part = made.experiment  # the folder of an experiment's training is named by its seed alone
    run = f"{part.name}-{part.arm}-s{part.seed}" if part and part.name else run_dir.resolve().name
    for name, scores in ((runfolder.BEST, made.best), (runfolder.LAST, made.final)):
        folder = run_dir / name
        if (folder / "config.json").is_file():
            surgery = record.read_if_whole(folder)
            if surgery:
                surgery = record.write(folder, replace(surgery, fitted=(*surgery.fitted, split)))
            write_card(folder, surgery, run, start, describe_training(made, scores))


def describe_training(made: Summary, scores: Scores) -> Training:
    """Return the scores of these weights, and how they were trained."""
    task, own, before, count = made.task, own_test(made), made.before, made.task.eval_samples
    data = str(without_places(task.data.get("source") or task.name))
    measured = [Measured(f"{data}, evaluation", metrics_of(made, scores))]
    if own:  # scores on held-out data that chose nothing
        scores, before, count = made.test.best or made.test.last, made.test.before, made.test.samples
        measured = [Measured(f"{data}, held out", metrics_of(made, scores))]
    elif made.test and made.test.best:
        metric = Metric(task.metric, task.metric_label, made.test.best.metric)
        measured.append(Measured(f"{data}, published test split", (metric,)))
    told = task.format_metric(scores.metric)
    told = f"{task.format_metric(before.metric)} before and {told} after" if before else told
    says = (
        f"Trained for {made.steps:,} steps ({made.epochs:.3g} epochs) on {data} with seed {made.seed}.",
        f"{task.metric_label}: {told} of {count:,} {'held-out ' if own else ''}samples.",
    )
    return Training(tuple(measured), says)


def metrics_of(made: Summary, scores: Scores) -> tuple[Metric, ...]:
    """Return the metric, macro F1 where `largest_class` is known, and the loss."""
    task = made.task
    known = [Metric(task.metric, task.metric_label, scores.metric)]
    known += [Metric("f1", "macro F1", scores.metrics["macro_f1"])] if scores.largest_class else []
    known += [Metric("loss", "loss", scores.loss)] if task.metric != "loss" else []
    return tuple(known)
