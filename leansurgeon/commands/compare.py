"""Compare models of any origin by measuring them now: quality on the same held-out samples, inference cost, kappa."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject

if TYPE_CHECKING:
    from leansurgeon.report.rows import Section
    from leansurgeon.report.runs import Run

KAPPA_SAMPLES = 16


def measure_answers(runs: Sequence[Run], say: Say, seconds: float | None = None) -> dict[Path, JsonObject]:
    """Measure the inference cost of all these in turns; return it by folder, and save it for runs."""
    from leansurgeon.measure.costs import inference
    from leansurgeon.training.runs import folder as runfolder

    models = {run.path: runfolder.model_of(run.path) for run in runs}
    made = inference.measure(list(models.values()), say, seconds)
    found = {path: made[model] for path, model in models.items()}
    for run in runs:
        if run.kind == "run":
            runfolder.write_json(run.path / inference.NAME, found[run.path])
    return found


def measure_models(
    runs: Sequence[Run], data: str | None, columns: str | None, seconds: float | None, say: Say
) -> Section:
    """Compare all models with the first: on held-out samples of the data (None: what one of them was trained on), in
    turns on this machine, and by their kappa.

    Stops early after `seconds`, and reports what is missing then. Raises `UsageError` with the reason if two cannot be
    compared.
    """
    from leansurgeon.checkpoints.kind import LANGUAGE
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.commands.judge import refuse_unlike
    from leansurgeon.commands.samples import data_to_measure
    from leansurgeon.measure.kappa.study import study
    from leansurgeon.report.rows import Note, Section, make_row
    from leansurgeon.report.runs import compared_on, display_name, inference_of, name_runs
    from leansurgeon.surgery import judged
    from leansurgeon.training.runs import folder as runfolder

    if len(runs) < 2:
        raise UsageError("One model alone compares with nothing.", "Name the original first, then the others.")
    began, notes, names = time.perf_counter(), [], name_runs(runs)
    opened = [open_source(str(runfolder.model_of(run.path))) for run in runs]
    first, *others = opened
    for other in others:
        refuse_unlike(other, first)
    named = data or next((str(run.path) for run in runs if run.kind == "run"), None)
    if named is None:
        raise UsageError("Nothing to compare them on.", "Add --data FILES.")
    sample = data_to_measure(first, data, named, "Comparing", None, 0, say, columns)
    costs = measure_answers(runs, say, seconds and seconds / 3)
    made = []
    for run, source in zip(runs, opened, strict=True):
        late = seconds is not None and time.perf_counter() - began > 0.8 * seconds
        kappa = None if late else study(source, sample, samples=KAPPA_SAMPLES, probes=0, say=say)
        compared = None
        if source is not first:
            if late:
                notes.append(Note(f"{names[run.path]} was not judged: no time was left.", "quality", True))
            else:
                say(f"Judging {names[run.path]} on {named} ...")
                how = {"fitted": source.fitted}
                compared = judged.on_data(sample, first, source.folder, source.parameters.total, **how)
        answering = inference_of(costs[run.path])
        made.append(replace(run, measured=answering, summary=replace(run.summary, kappa=kappa), compared=compared))
    task, made = compared_on(made, display_name(Path(named)), language=first.head in LANGUAGE)
    rows = [make_row(names[one.path], "lean" if i else "original", [one]) for i, one in enumerate(made)]
    rows = [replace(row, reference_parameters=rows[0].parameters) for row in rows]
    return Section("comparison", display_name(Path(named)), task, tuple(rows), tuple(notes))


def tabulate(cut: Path, *runs: Path) -> str:
    """Return the `report` table of a cut model, its source, and `runs` that trained it, all scored on the same held-out
    samples. Empty if only one of them was.
    """
    from leansurgeon.checkpoints import record, whereabouts
    from leansurgeon.report.collect import collect
    from leansurgeon.report.sections import sections
    from leansurgeon.report.tables.render import draw_table

    made = record.read_if_whole(cut)
    origin = whereabouts.find(made.source) if made else None
    places = [place for place in (origin and Path(origin), cut, *runs) if place and place.is_dir()]
    found = sections(collect(places).runs)
    shown = (f"\n{one.name}\n\n{draw_table(one)[0]}" for one in found if one.task and len(one.rows) > 1)
    return next(shown, "")
