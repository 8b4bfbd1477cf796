"""What lets others check a section: the paper's row, commands, seeds, samples, versions, recipes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.measure.data.parts import RANDOM
from leansurgeon.reading.values import text
from leansurgeon.report import humans
from leansurgeon.report.evidence.run import SHAPE, Run
from leansurgeon.report.evidence.surgery import Cut
from leansurgeon.report.humans import NONE, listed
from leansurgeon.report.page.blocks import Block, Code, Facts, cell, folded, table, words
from leansurgeon.report.page.cut import shortened, values_of
from leansurgeon.report.rows.rows import Row, Section
from leansurgeon.report.tables.columns import spread_cell
from leansurgeon.training.runs.folder import call_in

FLAGS = (("layers", "depth"), ("heads", "heads"), ("mlp-dim", "mlp_dim"))
PRINTED = (
    "The paper's figures are printed ones, from its own data, schedule and hardware (its memory is of all GPUs "
    "together). They are no measurement of ours."
)


@dataclass(frozen=True)
class Printed:
    """What the paper prints for a shape: where, the model's name, parameters as its text, score and memory (GB)."""

    where: str
    model: str
    parameters: str | None
    score_name: str
    score: float | None
    memory: float | None


def printed(preset: str, wanted: dict[str, str] | None) -> list[Printed]:
    """Every row of the paper's tables (not its figures, whose points are no text) with this preset and shape."""
    from leansurgeon import paper

    known = [(exhibit, r) for exhibit in paper.TABLES for r in exhibit.rows if r.preset == preset]
    if not known or not wanted:
        return []
    from leansurgeon.paper.audit import Start, target_of

    rows = []
    for exhibit, candidate in known:
        try:
            shape = target_of(Start(preset), candidate.words, candidate.policy).shape
        except LeanSurgeonError:
            continue
        if {key: shape.column(key) for key in SHAPE} == wanted:
            said = candidate.printed
            score = said.scores.get(exhibit.headline)
            model = f"{candidate.model}, {candidate.role}"
            rows.append(Printed(exhibit.name, model, said.parameters, exhibit.headline, score, said.memory))
    return rows


def paper(section: Section) -> list[Block]:
    """The paper's figures beside ours for arms of the same shape; never in place of ours."""
    rows = []
    for row in section.rows:
        preset = row.cut.record.preset if row.cut else ""
        for said in printed(preset, row.shape) if preset else ():
            percent = section.task is not None and section.task.percent
            ours = spread_cell(row.metric, section.task.decimals, percent) if section.task else NONE
            rows.append(
                [
                    cell(row.name),
                    cell(ours, row.metric and row.metric.mean),
                    cell(NONE if said.score is None else f"{said.score} ({said.score_name})"),
                    cell(humans.count(row.parameters), row.parameters),
                    cell(said.parameters or NONE),
                    cell(NONE if said.memory is None else f"{said.memory:g} GB"),
                    cell(f"{said.where}: {said.model}"),
                ]
            )
    if not rows:
        return []
    label = section.task.label if section.task else "metric"
    heads = ["", f"{label}, measured here", "the paper's", "parameters here", "the paper's", "memory, the paper's"]
    return [*words([PRINTED]), table("Ours beside the paper's row", [*heads, "where"], rows)]


# -- commands -------------------------------------------------------------------------------------


def reproduce(section: Section) -> list[Block]:
    """What was run, on what, and how to run it again."""
    runs = section.runs
    first = runs[0] if runs else None
    task = first.summary.task if first else None
    versions = first.summary.versions if first else {}
    amounts = [(task.train_samples, "to train"), (task.eval_samples, "to evaluate")] if task else []
    pairs = [
        ("seeds", seeds(section)),
        ("samples", ", ".join(f"{n:,.0f} {what}" for n, what in amounts if n is not None)),
        ("kappa", kappa_samples(section)),
        ("data", data_of(first) if first else ""),
        ("hardware", listed(dict.fromkeys(run.summary.device for run in runs if run.summary.device))),
        ("precision", listed(dict.fromkeys(row.precision for row in section.rows if row.precision))),
        ("software", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("finished", span([run.summary.finished for run in runs])),
    ]
    lines = commands(section)
    known = tuple(pair for pair in pairs if pair[1])
    return [
        *([Code("\n".join(lines))] if lines else []),
        *([Facts(known)] if known else []),
        *recipes(runs),
    ]


def data_of(run: Run) -> str:
    """The source of a run's data, with its licence where it is known."""
    source, licence = (text(run.summary.task.data.get(key)) for key in ("source", "licence"))
    return f"{source} ({licence})" if licence else source


def seeds(section: Section) -> str:
    """`0, 1, 2`, or which row has which where they differ."""
    by_row = {row.name: seeds_of(row).replace(",", ", ") for row in section.rows if row.seeds}
    if len(set(by_row.values())) == 1:
        return next(iter(by_row.values()))
    return "; ".join(f"{name}: {said}" for name, said in by_row.items())


def kappa_samples(section: Section) -> str:
    """The numbers of samples the condition numbers were measured on; empty without any."""
    counts = dict.fromkeys(row.kappa.samples for row in section.rows if row.kappa)
    return f"{listed(str(n) for n in counts)} samples" if counts else ""


def span(dates: Sequence[str]) -> str:
    """The first and the last of the dates, or the one there is."""
    known = sorted(d for d in dates if d)
    if not known:
        return ""
    return known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def commands(section: Section) -> list[str]:
    """The commands that make the section's rows again, a line each."""
    if section.kind == "experiment":
        return [experiment_command(section)]
    return [line for row in section.rows for run in row.runs[:1] for line in again(run)]


def experiment_command(section: Section) -> str:
    """The call that made the experiment, as it was typed where `run` noted it, with its --set and --seeds."""
    file = next((run.experiment_file for run in section.runs if run.experiment_file), None)
    if file and file.call:
        return shlex.join(shortened(word) if word.startswith("/") else word for word in shlex.split(file.call))
    known = next((seeds_of(row) for row in section.rows if row.seeds), "0")
    name = shlex.quote(file.path.name if file else section.name.split(",")[0])
    note = "the file below" if file else "and the --set of the first call, if there was one"
    return f"leansurgeon run {name} --seeds {known}    # {note}"


def seeds_of(row: Row) -> str:
    """The row's known seeds in order, joined by commas as `--seeds` takes them."""
    return ",".join(map(str, sorted(s for s in row.seeds if s is not None)))


def again(run: Run) -> list[str]:
    """The commands that lead to one model or run: the cut, and the training behind it."""
    lines = [shrink_command(run.cut)] if run.cut and run.cut.changes_shape else []
    if run.kind == "run":
        # The recipe of a run is resolved and holds all of its settings.
        lines.append(f"leansurgeon retrain {model_of(run)} --recipe {shlex.quote(f'{run.path.name}/recipe.yaml')}")
        lines[-1] += "" if run.summary.seed is None else f" --seed {run.summary.seed}"
    return lines


def model_of(run: Run) -> str:
    """What a run began with, as its own recipe notes it."""
    call = shlex.split(call_in(run.recipe or ""))
    return shlex.quote(shortened(call[2])) if len(call) > 2 else "MODEL"


def shrink_command(cut: Cut) -> str:
    """The cut as a command: only what differs from the source, and what is not the default."""
    words = ["leansurgeon", "shrink", shortened(cut.source) if cut.source != "?" else "SOURCE"]
    method = cut.method
    for flag, key in FLAGS:
        old, new = (values_of(side, key) for side in (cut.plan.before, cut.plan.after))
        if old != new:
            words += [f"--{flag}", ",".join(str(v) for v in new)]
    words += ["--head-dim", str(cut.plan.head_policy)] if cut.plan.head_policy else []
    words += ["--init", cut.plan.init] if cut.plan.init not in ("", "transfer") else []
    words += ["--method", str(method["layers"])] if method.get("layers") not in (None, "", "auto") else []
    words += ["--keep", str(method["keep"])] if method.get("keep") else []
    words += ["--more-heads", str(method["more"])] if method.get("more") not in (None, "", "add") else []
    words += [
        flag for key, flag in (("balance", "--balance"), ("uncalibrated", "--uncalibrated")) if method.get(key) is True
    ]
    words += ["--heal", str(method["heal"])] if method.get("heal") in ("none", "closed") else []
    words += ["--heal-time", f"{method['heal_time']:.9g}s"] if method.get("heal_time") else []
    words += ["--class-attention"] if cut.plan.class_attention else []
    data = cut.record.decided.calibration
    if data and (data.name or data.says) and data.name != RANDOM:  # those come without --calibrate
        words += ["--calibrate", data.name or "DATA"]
        words += ["--columns", data.columns] if data.columns else []
        words += ["--samples", str(data.asked)] if data.asked else []
    return shlex.join([*words, *(["--seed", str(cut.plan.seed)] if cut.plan.seed else [])])  # a record may say anything


def recipes(runs: Sequence[Run]) -> list[Block]:
    """The settings in full: the experiment's file where `run` left one, else the recipe of the first run."""
    for run in runs:
        file = run.experiment_file
        said = without_call(file.text if file else run.recipe or "")
        if said:
            whose = "the experiment" if file else f"{run.path.name} (every run has its own in its folder)"
            return folded(f"Recipe of {whose}, with every setting", [Code(said.rstrip())])
    return []


def without_call(recipe: str) -> str:
    """A recipe without the command in its first line, which may name folders of this machine."""
    return recipe.split("\n", 1)[-1] if call_in(recipe) else recipe
