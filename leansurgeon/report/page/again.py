"""What lets others check a section: the paper's row, commands, seeds, samples, versions, recipes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from leansurgeon.errors import LeanSurgeonError
from leansurgeon.measure.data.parts import RANDOM
from leansurgeon.reading.values import text
from leansurgeon.report import humans
from leansurgeon.report.evidence.run import SHAPE, Run
from leansurgeon.report.evidence.surgery import Cut
from leansurgeon.report.humans import NONE, listed
from leansurgeon.report.page.blocks import Block, Code, Facts, Group, Table, cell, sentences
from leansurgeon.report.page.parts import numbers_of, shorten
from leansurgeon.report.rows.rows import Row, Section
from leansurgeon.report.tables.columns import show_spread
from leansurgeon.training.runs.folder import call_in

if TYPE_CHECKING:
    from leansurgeon.paper.base import Exhibit
    from leansurgeon.paper.base import Row as PaperRow

FLAGS = (("--layers", "depth"), ("--heads", "heads"), ("--mlp-dim", "mlp_dim"))
PRINTED = (
    "The paper's figures are printed ones, from its own data, schedule and hardware (its memory is of all GPUs "
    "together). They are no measurement of ours."
)


def list_printed(preset: str, wanted: Mapping[str, str] | None) -> list[tuple[Exhibit, PaperRow]]:
    """Every row of the paper's tables (not its figures, whose points are no text) with this preset and shape."""
    from leansurgeon.paper import TABLES
    from leansurgeon.paper.audit import Start, target_of

    found = []
    for exhibit in TABLES if wanted else ():
        for printed in exhibit.rows:
            with suppress(LeanSurgeonError):
                if printed.preset == preset:
                    shape = target_of(Start(preset), printed.words, printed.policy).shape
                    found += [(exhibit, printed)] * ({key: shape.column(key) for key in SHAPE} == wanted)
    return found


def show_paper(section: Section) -> list[Block]:
    """The paper's figures beside ours for arms of the same shape; never in place of ours."""
    rows, task = [], section.task
    for row in section.rows:
        preset = row.cut.record.preset if row.cut else ""
        for exhibit, printed in list_printed(preset, row.shape) if preset else ():
            said, score = printed.printed, printed.printed.scores.get(exhibit.headline)
            ours = show_spread(row.metric, task.decimals, task.percent) if task else NONE
            rows.append(
                [
                    cell(row.name),
                    cell(ours, row.metric and row.metric.mean),
                    cell(NONE if score is None else f"{score} ({exhibit.headline})"),
                    cell(humans.count(row.parameters), row.parameters),
                    cell(said.parameters or NONE),
                    cell(NONE if said.memory is None else f"{said.memory:g} GB"),
                    cell(f"{exhibit.name}: {printed.model}, {printed.role}"),
                ]
            )
    if not rows:
        return []
    heads = ["", f"{task.label if task else 'metric'}, measured here", "the paper's", "parameters here", "the paper's"]
    table = Table("Ours beside the paper's row", [*heads, "memory, the paper's", "where"], rows)
    return [*sentences([PRINTED]), table]


# -- commands -------------------------------------------------------------------------------------


def show_commands(section: Section) -> list[Block]:
    """What was run, on what, and how to run it again."""
    runs, kappas = section.runs, [row.kappa for row in section.rows if row.kappa]
    if not runs:
        return []
    first = runs[0].summary
    amounts = [(first.task.train_samples, "to train"), (first.task.eval_samples, "to evaluate")]
    source, licence = (text(first.task.data.get(key)) for key in ("source", "licence"))
    by_row = {row.name: join_seeds(row).replace(",", ", ") for row in section.rows if row.seeds}
    same = len(set(by_row.values())) == 1
    dates = sorted({run.summary.finished for run in runs} - {""})
    pairs = {
        "seeds": "; ".join(list(by_row.values())[:1] if same else (f"{name}: {said}" for name, said in by_row.items())),
        "samples": ", ".join(f"{n:,.0f} {what}" for n, what in amounts if n is not None),
        "kappa": f"{listed(dict.fromkeys(str(k.samples) for k in kappas))} samples" if kappas else "",
        "data": f"{source} ({licence})" if licence else source,
        "hardware": listed(dict.fromkeys(run.summary.device for run in runs if run.summary.device)),
        "precision": listed(dict.fromkeys(row.precision for row in section.rows if row.precision)),
        "software": ", ".join(f"{name} {version}" for name, version in first.versions.items()),
        "finished": " to ".join((*dates[:1], *dates[1:][-1:])),
    }
    if section.kind == "experiment":
        lines = [experiment_command(section)]
    else:
        lines = [line for row in section.rows for run in row.runs[:1] for line in list_commands(run)]
    known = tuple(pair for pair in pairs.items() if pair[1])
    return [
        *([Code("\n".join(lines))] if lines else []),
        *([Facts(known)] if known else []),
        *show_recipe(runs),
    ]


def experiment_command(section: Section) -> str:
    """The call that made the experiment, as it was typed where `run` noted it, with its --set and --seeds."""
    file = next((run.experiment_file for run in section.runs if run.experiment_file), None)
    if file and file.call:
        return shlex.join(shorten(word) if word.startswith("/") else word for word in shlex.split(file.call))
    known = next((join_seeds(row) for row in section.rows if row.seeds), "0")
    name = shlex.quote(file.path.name if file else section.name.split(",")[0])
    note = "the file below" if file else "and the --set of the first call, if there was one"
    return f"leansurgeon run {name} --seeds {known}    # {note}"


def join_seeds(row: Row) -> str:
    """The row's known seeds in order, joined by commas as `--seeds` takes them."""
    return ",".join(map(str, sorted(s for s in row.seeds if s is not None)))


def list_commands(run: Run) -> list[str]:
    """The commands that lead to one model or run: the cut, and the training behind it."""
    lines = [shrink_command(run.cut)] if run.cut and run.cut.changes_shape else []
    if run.kind == "run":
        call = shlex.split(call_in(run.recipe or ""))  # its own recipe notes what it began with
        model = shlex.quote(shorten(call[2])) if len(call) > 2 else "MODEL"
        # The recipe of a run is resolved and holds all of its settings.
        line = f"leansurgeon retrain {model} --recipe {shlex.quote(f'{run.path.name}/recipe.yaml')}"
        lines.append(line + ("" if run.summary.seed is None else f" --seed {run.summary.seed}"))
    return lines


def shrink_command(cut: Cut) -> str:
    """The cut as a command: only what differs from the source, and what is not the default."""
    method, plan, data = cut.method, cut.plan, cut.record.decided.calibration
    named = data and (data.name or data.says) and data.name != RANDOM  # random samples come without --calibrate
    before, after = ({flag: numbers_of(side, key) for flag, key in FLAGS} for side in (plan.before, plan.after))
    flags = {flag: ",".join(map(str, after[flag])) for flag in after if after[flag] != before[flag]}
    flags |= {
        "--head-dim": plan.head_policy,
        "--init": plan.init if plan.init != "transfer" else "",
        "--method": method.get("layers") if method.get("layers") != "auto" else "",
        "--keep": method.get("keep"),
        "--more-heads": method.get("more") if method.get("more") != "add" else "",
        "--balance": method.get("balance") is True,
        "--uncalibrated": method.get("uncalibrated") is True,
        "--heal": method.get("heal") if method.get("heal") in ("none", "closed") else "",
        "--heal-time": method.get("heal_time") and f"{method['heal_time']:.9g}s",
        "--class-attention": bool(plan.class_attention),
        "--calibrate": named and (data.name or "DATA"),
        "--columns": named and data.columns,
        "--samples": named and data.asked,
        "--seed": plan.seed,
    }
    words = [word for flag, value in flags.items() if value for word in (flag, value) if word is not True]
    source = shorten(cut.source) if cut.source != "?" else "SOURCE"
    return shlex.join(["leansurgeon", "shrink", source, *map(str, words)])  # a record may say anything


def show_recipe(runs: Sequence[Run]) -> list[Block]:
    """The settings in full: the experiment's file where `run` left one, else the recipe of the first run; without the
    command in the first line, which may name folders of this machine.
    """
    for run in runs:
        file = run.experiment_file
        said = file.text if file else run.recipe or ""
        said = said.split("\n", 1)[-1] if call_in(said) else said
        if said:
            whose = "the experiment" if file else f"{run.path.name} (every run has its own in its folder)"
            return [Group(f"Recipe of {whose}, with every setting", (Code(said.rstrip()),), folded=True)]
    return []
