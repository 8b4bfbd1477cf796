"""How to reproduce a section: commands, seeds, samples, versions, recipes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from leansurgeon.reading.values import text
from leansurgeon.report.humans import join_words
from leansurgeon.report.page.parts import Block, Code, Facts, Group, shorten
from leansurgeon.report.rows import Section
from leansurgeon.report.runs import Run
from leansurgeon.training.runs.folder import call_in


def show_commands(section: Section) -> list[Block]:
    """Return what was run, on what, and how to run it again."""
    runs, kappas = section.runs, [row.kappa for row in section.rows if row.kappa]
    if not runs:
        return []
    first = runs[0].summary
    amounts = [(first.task.train_samples, "to train"), (first.task.eval_samples, "to evaluate")]
    source, licence = (text(first.task.data.get(key)) for key in ("source", "licence"))
    seeds = [(row.name, sorted(seed for seed in row.seeds if seed is not None)) for row in section.rows if row.seeds]
    by_row = {name: ", ".join(map(str, known)) for name, known in seeds}
    same = len(set(by_row.values())) == 1
    dates = sorted({run.summary.finished for run in runs} - {""})
    pairs = {
        "seeds": "; ".join(list(by_row.values())[:1] if same else (f"{name}: {said}" for name, said in by_row.items())),
        "samples": ", ".join(f"{n:,.0f} {what}" for n, what in amounts if n is not None),
        "kappa": f"{join_words(dict.fromkeys(str(k.samples) for k in kappas))} samples" if kappas else "",
        "data": f"{source} ({licence})" if licence else source,
        "hardware": join_words(dict.fromkeys(run.summary.device for run in runs if run.summary.device)),
        "precision": join_words(dict.fromkeys(row.precision for row in section.rows if row.precision)),
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
    """Return the command of the experiment, as it was typed if `run` recorded it, with its --set and --seeds."""
    file = next((run.experiment_file for run in section.runs if run.experiment_file), None)
    if file and file.call:
        return show_call(file.call)
    seeds = next((row.seeds for row in section.rows if row.seeds), (0,))
    known = ",".join(map(str, sorted(seed for seed in seeds if seed is not None)))
    name = shlex.quote(file.path.name if file else section.name.split(",")[0])
    note = "the file below" if file else "and the --set of the first call, if there was one"
    return f"leansurgeon run {name} --seeds {known}    # {note}"


def list_commands(run: Run) -> list[str]:
    """Return the commands that lead to one model or run: the cut, and the training after it."""
    made = call_in(f"# {run.cut.record.call}") if run.cut else ""  # checked: a record may hold any text
    lines = [show_call(made)] if made else []
    if run.kind == "run":
        call = shlex.split(call_in(run.recipe or ""))  # its own recipe records the model it began with
        model = shlex.quote(shorten(call[2])) if len(call) > 2 else "MODEL"
        # A run's recipe is resolved and holds all its settings.
        lines.append(f"leansurgeon retrain {model} --recipe {shlex.quote(f'{run.path.name}/recipe.yaml')}")
    return lines


def show_call(call: str) -> str:
    """Return a recorded command without the folders of this machine."""
    return shlex.join(shorten(word) if word.startswith("/") else word for word in shlex.split(call))


def show_recipe(runs: Sequence[Run]) -> list[Block]:
    """Return the settings in full: the experiment's file if `run` wrote one, else the recipe of the first run, without
    the command in its first line, which may name folders of this machine.
    """
    for run in runs:
        file = run.experiment_file
        said = file.text if file else run.recipe or ""
        said = said.split("\n", 1)[-1] if call_in(said) else said
        if said:
            whose = "the experiment" if file else f"{run.path.name} (every run has its own in its folder)"
            return [Group(f"Recipe of {whose}, with every setting", (Code(said.rstrip()),), folded=True)]
    return []
