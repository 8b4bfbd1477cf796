"""Parts of a section that let others check it: the paper's row, commands, seeds, samples, versions, recipes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leansurgeon.report import folder, humans
from leansurgeon.report.collect import Entry
from leansurgeon.report.columns import spread_cell
from leansurgeon.report.html import Child, Markup, data, join, table, tag
from leansurgeon.report.html_results import Entries, entries_of, facts
from leansurgeon.report.html_surgery import as_list, shortened, surgery_of
from leansurgeon.report.humans import NONE, listed, number, part, text, whole
from leansurgeon.report.paper_rows import preset_of, printed
from leansurgeon.report.rows import Row, Section

FLAGS = (("layers", "depth"), ("heads", "heads"), ("mlp-dim", "mlp_dim"))


# -- the paper ------------------------------------------------------------------------------------


def paper(section: Section, entries: Entries) -> Markup | None:
    """The paper's figures beside ours for arms of the same shape; never in place of ours."""
    rows: list[list[Child]] = []
    for row in section.rows:
        found = entries_of(row, entries)
        preset = preset_of(surgery_of(found[0])) if found else ""
        for said in printed(preset, row) if preset else ():
            percent = section.task is not None and section.task.percent
            ours = spread_cell(row.metric, section.task.decimals, percent) if section.task else NONE
            rows.append(
                [
                    row.name,
                    data(ours, row.metric and row.metric.mean),
                    NONE if said.score is None else f"{said.score} ({said.score_name})",
                    data(humans.count(row.parameters), row.parameters),
                    said.parameters or NONE,
                    NONE if said.memory is None else f"{said.memory:g} GB",
                    f"{said.where}: {said.model}",
                ]
            )
    if not rows:
        return None
    label = section.task.label if section.task else "metric"
    heads = [
        "",
        f"{label}, measured here",
        "the paper's",
        "parameters here",
        "the paper's",
        "memory, the paper's",
        "where",
    ]
    says = (
        "The paper's figures are printed ones, from its own data, schedule and hardware (its memory is of all GPUs "
        "together). They are no measurement of ours."
    )
    return join(tag("p", says), table("Ours beside the paper's row", heads, rows))


# -- commands -------------------------------------------------------------------------------------


def reproduce(section: Section, entries: Entries) -> Markup:
    """What was run, on what, and how to run it again."""
    found = [e for row in section.rows for e in entries_of(row, entries)]
    first = found[0] if found else None
    task = part(first.data, "task") if first else None
    samples = [
        f"{n:,.0f} {what}"
        for key, what in (("train_samples", "to train"), ("eval_samples", "to evaluate"))
        if (n := number(part(task, key))) is not None
    ]
    source = join(text(part(task, "data", "source")), licence(task)) if task else ""
    pairs: list[tuple[str, Child]] = [
        ("seeds", seeds(section)),
        ("samples", ", ".join(samples)),
        ("kappa", kappa_samples(section)),
        ("data", source),
        ("hardware", listed(dict.fromkeys(text(e.data.get("device")) for e in found if text(e.data.get("device"))))),
        ("precision", listed(dict.fromkeys(r.precision for r in section.rows if r.precision))),
        ("software", versions(first.data) if first else None),
        ("finished", span([text(e.data.get("finished")) or text(e.data.get("created")) for e in found])),
    ]
    lines = commands(section, entries)
    return join(tag("pre", tag("code", "\n".join(lines))) if lines else None, facts(pairs), recipes(section, entries))


def licence(task: Any) -> str:
    found = text(part(task, "data", "licence"))
    return f" ({found})" if found else ""


def seeds(section: Section) -> str:
    """`0, 1, 2`, or which row has which where they differ."""
    by_row = {row.name: seeds_of(row).replace(",", ", ") for row in section.rows if row.seeds}
    if len(set(by_row.values())) == 1:
        return next(iter(by_row.values()))
    return "; ".join(f"{name}: {said}" for name, said in by_row.items())


def kappa_samples(section: Section) -> str:
    counts = dict.fromkeys(row.kappa.samples for row in section.rows if row.kappa)
    return f"{listed(str(n) for n in counts)} samples" if counts else ""


def versions(record: dict[str, Any]) -> str:
    found = record.get("versions")
    return ", ".join(f"{text(k)} {text(v)}" for k, v in found.items()) if isinstance(found, dict) else ""


def span(dates: Sequence[str]) -> str:
    known = sorted(d for d in dates if d)
    if not known:
        return ""
    return known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def commands(section: Section, entries: Entries) -> list[str]:
    if section.kind == "experiment":
        found = next((e for row in section.rows for e in entries_of(row, entries)), None)
        file = folder.experiment_recipe(found) if found else None
        known = next((seeds_of(row) for row in section.rows if row.seeds), "0")
        name = shlex.quote(file.name if file else section.name.split(",")[0])
        note = "the file below" if file else "and the --set of the first call, if there was one"
        return [f"leansurgeon run {name} --seeds {known}    # {note}"]
    lines = []
    for row in section.rows:
        for entry in entries_of(row, entries)[:1]:
            lines += again(entry)
    return lines


def seeds_of(row: Row) -> str:
    return ",".join(map(str, sorted(s for s in row.seeds if s is not None)))


def again(entry: Entry) -> list[str]:
    """The commands that lead to one model or run: the cut, and the training behind it."""
    lines, record = [], surgery_of(entry)
    steps = record.get("plan") or {}
    if record and steps.get("before") != steps.get("after"):
        lines.append(shrink_command(record, steps))
    if entry.kind == "run":
        # The recipe of a run is resolved and holds all of its settings.
        lines.append(f"leansurgeon retrain MODEL --recipe {shlex.quote(f'{entry.path.name}/recipe.yaml')}")
        seed = whole(entry.data.get("seed"))
        lines[-1] += "" if seed is None else f" --seed {seed}"
    return lines


def shrink_command(record: dict[str, Any], steps: dict[str, Any]) -> str:
    """The cut as a command: only what differs from the source, and what is not the default."""
    words = ["leansurgeon", "shrink", shlex.quote(shortened(text(part(record, "source", "name"), "SOURCE")))]
    before, after = (as_list(part(steps, side, "stages")) for side in ("before", "after"))
    for flag, key in FLAGS:
        old, new = ([whole(part(stage, key)) for stage in stages] for stages in (before, after))
        if old != new:
            words += [f"--{flag}", ",".join(str(v) for v in new)]
    method = steps.get("method") if isinstance(steps.get("method"), dict) else {}
    policy = text(steps.get("head_policy")) or whole(steps.get("head_policy"))
    if policy:
        words += ["--head-dim", str(policy)]
    if text(steps.get("init")) not in ("", "transfer"):
        words += ["--init", text(steps.get("init"))]
    if text(method.get("layers"), "auto") != "auto":
        words += ["--method", text(method.get("layers"))]
    if text(method.get("keep")):
        words += ["--keep", text(method.get("keep"))]
    if text(method.get("more"), "add") != "add":
        words += ["--more-heads", text(method.get("more"))]
    words += [
        flag for key, flag in (("balance", "--balance"), ("uncalibrated", "--uncalibrated")) if method.get(key) is True
    ]
    if method.get("heal") is False:
        words.append("--no-heal")
    if whole(method.get("fit")):
        words += ["--fit", str(whole(method.get("fit")))]
    if steps.get("class_attention") is True:
        words.append("--class-attention")
    used = part(record, "decided", "calibration")
    if isinstance(used, dict):
        words += ["--calibrate", shlex.quote(text(used.get("name"), "DATA"))]
        words += ["--calibration-samples", str(whole(used.get("asked")))] if whole(used.get("asked")) else []
    seed = whole(steps.get("seed"))
    return " ".join([*words, *(["--seed", str(seed)] if seed else [])])


def recipes(section: Section, entries: Entries) -> Markup | None:
    """The settings in full: the experiment's file where `run` left one, else the recipe of the first run."""
    found = [e for row in section.rows for e in entries_of(row, entries)]
    for entry in found:
        file: Path | None = folder.experiment_recipe(entry)
        said = folder.text_of(file) if file else folder.recipe_text(entry)
        if said:
            whose = "the experiment" if file else f"{entry.path.name} (every run has its own in its folder)"
            return join(
                tag("p", f"Recipe of {whose}, with every setting:", class_="quiet"),
                tag("pre", tag("code", said.rstrip())),
            )
    return None
