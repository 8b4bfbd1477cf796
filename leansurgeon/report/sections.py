"""Group the collected runs into tables: experiments, single runs of a task, GLUE, and untrained models.

GLUE is laid out as in the paper's Table 1: a row per pretrained model, a column per task, and the mean of all eight.
Each task shows the metric that its run recorded: accuracy, but F1 for MRPC and QQP, Pearson's correlation for STS-B and
Matthews' for CoLA (MNLI: the matched part). Runs belong together if they started from the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from leansurgeon.errors import plural
from leansurgeon.reading.values import stamp
from leansurgeon.report.humans import join_words, spread
from leansurgeon.report.rows import GLUE, Note, Row, Section, follow, make_row
from leansurgeon.report.runs import Run, compare_models, display_name, find_judged, name_runs
from leansurgeon.training.runs.summary import DONE, own_test

APART = (
    "A table of its own: no run here began with it or was cut and learned from it, so nobody judged it on the samples "
    "of the others. `leansurgeon judge MODEL --against OTHER --data RUN` compares any two on the data of a run."
)
ROLES = ("original", "lean", "control")


def sections(runs: Sequence[Run]) -> list[Section]:
    """Group the collected runs into tables, the one with the newest run first, models last.

    A model that some runs scored on their held-out samples, or that was compared with its source, appears in each of
    those tables instead.
    """
    found = []
    runs = sorted(runs, key=lambda run: -run.when)
    compared = compare_models(runs)
    for one in runs:
        judged = [find_judged(one, run) for run in runs if run.kind == "run"] if one.kind == "model" else []
        found += {made.task: made for made in judged if made}.values() or compared.get(one.path) or [one]
    groups = {}
    for run in found:
        groups.setdefault(_group_key(run), []).append(run)
    made = [_experiment(group) if key[0] == "experiment" else _singles(key[0], group) for key, group in groups.items()]
    if any(own_test(run.summary) for run in found):
        made = [replace(one, notes=(*one.notes, Note(APART, "quality"))) if one.task is None else one for one in made]
    together = make_glue_section(found)
    return sorted([*made, *([together] if together else [])], key=lambda s: s.kind == "models")


def _group_key(run: Run) -> tuple:
    if run.task is None:
        return ("models",)
    if run.part is None or not run.part.name:
        return ("runs", run.task)
    # Debug runs share an experiment's name but not its data; arms with their own task compare only with each other.
    sizes = (run.summary.task.train_samples, run.task.eval_samples)
    return ("experiment", run.part.name, run.task.name, *sizes, run.part.own_task)


def _singles(kind: str, runs: list[Run]) -> Section:
    """Return a section of single runs of a task with the models they scored ("runs"), or of untrained models
    ("models").
    """
    models = sorted((run for run in runs if run.kind == "model"), key=lambda run: -(run.summary.model.parameters or 0))
    runs = [*models, *(run for run in runs if run.kind == "run")]
    names = name_runs(runs)
    rows = tuple(make_row(names[run.path], run.kind, [run]) for run in runs)
    if kind == "models":
        return Section(kind, "shrunk, not trained yet" if all(run.cut for run in runs) else "models", None, rows)
    judged = {}
    for run in runs:
        if run.judged_in:
            judged.setdefault(run.judged_in, []).append(names[run.path])
    notes = [
        Note(
            f"{join_words(some)}: as {display_name(run)} judged {'it' if len(some) == 1 else 'them'} at its end.",
            "quality",
        )
        for run, some in judged.items()
    ]
    return Section(kind, runs[0].task.name, runs[0].task, rows, tuple(notes))


def _experiment(runs: list[Run]) -> Section:
    (arms, notes), rows = _arms(runs), []
    for arm, group in arms.items():
        cut, control_of = group[0].cut, group[0].part.control_of
        unchanged = cut is not None and cut.plan.before is not None and cut.plan.before == cut.plan.after
        role = "original" if arm == "original" or unchanged else "lean"
        role = "control" if control_of or arm.startswith("control") else role
        rows.append(make_row(arm, role, group, control_of))
    if original := next((r for r in rows if r.role == "original"), None):
        rows = [replace(r, inherited_epochs=original.epochs) if r.init == "transfer" else r for r in rows]
    rows = [replace(r, reference_parameters=original and original.parameters) for r in rows]
    # Parallel trainings end in any order, but a table must be the same each time, with `h2` before `h10`.
    rows.sort(key=lambda r: (ROLES.index(r.role), re.sub(r"\d+", lambda digits: digits[0].zfill(12), r.name)))
    seeds = max((len(r.seeds) for r in rows), default=0)
    notes += [
        Note(f"{r.name} has only {len(r.seeds)} of {seeds} seeds.", "quality", caveat=True)
        for r in rows
        if len(r.seeds) < seeds
    ]
    spans = [(stamp(run.summary.started), stamp(run.summary.finished)) for group in arms.values() for run in group]
    known = sorted(span for span in spans if None not in span)
    if any(later[0] < earlier[1] for earlier, later in pairwise(known)):
        said = "Trainings ran side by side, so ms/step also shows what the others took: compare it with care."
        notes.append(Note(said, "speed", caveat=True))
    name, own = runs[0].part.name, runs[0].part.own_task
    return Section("experiment", f"{name}, {own}" if own else name, runs[0].task, tuple(rows), tuple(notes))


def _arms(runs: list[Run]) -> tuple[dict[str, list[Run]], list[Note]]:
    """Return the runs of every arm, in the order of their training: the newest of each seed, and only those of one
    recipe.
    """

    def settings(run: Run) -> tuple:
        """Return what seeds of one arm share: the number of steps, and the digest of all settings if it was stored."""
        return run.summary.steps, run.part.digest

    arms = {}
    older, other, unfinished = [], [], []
    for run in runs:  # newest first
        arm = run.part.arm or "?"
        group = arms.setdefault(arm, [])
        if run.summary.status != DONE:
            unfinished.append(arm)
        elif group and settings(run) != settings(group[0]):
            other.append(arm)
        elif any(run.summary.seed == one.summary.seed for one in group):
            older.append(arm)
        else:
            group.append(run)
    notes = []
    for left_out, why in (
        (older, "repeated by a newer one of the same seed"),
        (other, "with other settings than the newest"),
        (unfinished, "not finished"),
    ):
        if left_out:
            which = join_words(dict.fromkeys(left_out))
            notes.append(Note(f"Left out: {plural(len(left_out), 'run')} {why} ({which}).", "runs"))
    kept = {arm: sorted(group, key=lambda run: run.when) for arm, group in arms.items() if group}
    return dict(sorted(kept.items(), key=lambda item: item[1][0].when)), notes


def make_glue_section(runs: Sequence[Run]) -> Section | None:
    """Return the table of all finished runs of task `glue`; None if there are none."""
    models: dict[tuple[str, ...], dict[str, dict[int | None, Run]]] = {}
    for run in runs:
        if run.glue_task not in GLUE or run.summary.status != DONE:
            continue
        began, arm = run.summary.model, run.part.arm if run.part else ""
        # What identifies a pretrained model: the arm of an experiment, or the digests of the weights that a run started
        # from.
        weights = sorted(f"{k}={v}" for k, v in began.start.files.items() if k.endswith(".safetensors"))
        key = (arm, run.part.name) if arm else (began.start.name or began.source or "?", *weights)
        models.setdefault(key, {}).setdefault(run.glue_task, {}).setdefault(run.summary.seed, run)
    rows = []
    for (name, *_), tasks in sorted(models.items(), key=lambda item: item[0][0]):
        used = [run for seeds in tasks.values() for run in seeds.values()]
        scores = {}
        for task, seeds in tasks.items():
            both = [[follow(run.summary, f"{which}.metric") for which in ("final", "best")] for run in seeds.values()]
            if score := spread(best if last is None else last for last, best in both):
                scores[task] = score
        # Only what all tasks share.
        rows.append(Row(name, "run", shape=used[0].shape, scores=scores, runs=tuple(used)))
    if not rows:
        return None
    said = [
        "MNLI matched, SST-2, RTE, QNLI: accuracy; QQP, MRPC: F1; STS-B: Pearson's, CoLA: Matthews' correlation; all "
        "times 100, on the development sets, after the last step, as means over seeds.",
    ]
    if missing := [row.name for row in rows if len(row.scores or {}) < len(GLUE)]:
        said.append(f"A mean is said of all eight tasks only; some are missing of {join_words(missing)}.")
    return Section("glue", "GLUE", None, tuple(rows), tuple(Note(line, "quality") for line in said))
