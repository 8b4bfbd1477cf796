"""The text around a table: its title, and how its numbers were measured."""

from __future__ import annotations

import shlex

from leansurgeon.errors import plural
from leansurgeon.report.humans import join_words, plain
from leansurgeon.report.kappa import Kappa
from leansurgeon.report.paired import compare
from leansurgeon.report.rows import Note, Section, heals, shows_best
from leansurgeon.report.verdict import expectations, is_accuracy, verdicts
from leansurgeon.training.runs.folder import BEST


def title(section: Section) -> str:
    """Return `digits-vit: digits, 360 held-out samples, 3 seeds, cpu, fp32`."""
    said = setting(section)
    return f"{section.name}: {', '.join(said)}" if said else section.name


def setting(section: Section) -> list[str]:
    """Return what was measured, on how many samples, and on what machine."""
    if section.kind in ("models", "glue"):
        return []
    task = section.task
    said = [task.name] if section.kind == "experiment" and task and task.name != section.name else []
    if task and task.eval_samples:  # with too little time nothing was evaluated
        said.append(plural(task.eval_samples, f"{'held-out' if task.held_out else 'evaluation'} sample"))
    seeds = max((len(r.seeds) for r in section.rows), default=0)
    if section.kind == "experiment":
        said.append(plural(seeds, "seed"))
    for values in ({r.device for r in section.rows}, {r.precision for r in section.rows}):
        if len(values) == 1 and "" not in values:
            said += values
    return said


def notes(section: Section, kappa: bool = False) -> list[Note]:
    """Return how the numbers were measured, in as few sentences as honesty allows. With `kappa`, for a table of layers
    only.
    """
    measured = of_kappa([row.kappa for row in section.rows if row.kappa], kappa)
    if kappa:
        return measured + list(section.notes)
    lines = [*of_quality(section), *of_expectations(section)]
    for row in section.rows:  # data on which a model was compared with its source (`judge`, mixed sources)
        for run in row.runs:
            seed = f" (seed {run.summary.seed})" if len(row.runs) > 1 else ""
            lines += [Note(f"{row.name}{seed} on {name}: {says}", "quality") for name, says in run.judged]
    lines += measured
    for row in section.rows if measured else ():  # how to fill the empty cells
        lacking = next((run for run in row.runs if not run.summary.kappa), None)
        if row.kappa is None and lacking:
            words = [lacking.path, *(["--data", lacking.judged_in] if lacking.judged_in else [])]
            lines.append(Note(f"kappa of {row.name}: `leansurgeon kappa {shlex.join(map(str, words))}`", "kappa"))
    untrained = [row.name for row in section.rows if row.role == "model"]
    if untrained and section.task:
        said = f"{join_words(untrained)}: not trained here, so without memory and time of a step."
        lines.append(Note(said, "kappa"))
    answering = [(row, run) for row in section.rows for run in row.runs[:1] if row.latency and run.inference]
    gpu = {row.on_gpu for row in section.rows if row.memory}
    if answering:
        of = answering[0][1].inference
        said = (
            f"latency: one sample, median of rounds in which all models took turns on {of.device}. memory: weights and "
            f"activations at the peak of {of.load}, fp32."
        )
        lines.append(Note(said, "speed"))
        if len({row.measured for row, _ in answering}) > 1:
            said = "Some rows were timed in another run, so their latencies do not compare: "
            lines.append(Note(f"{said}`leansurgeon report --measure`.", "speed", caveat=True))
    elif len(gpu) > 1:
        said = "Memory is of two kinds, not comparable: CPU, peak RSS of the process; GPU, allocator's peak."
        lines.append(Note(said, "memory", caveat=True))
    elif gpu == {False}:
        lines.append(Note("Peak RSS is that of the whole training process, libraries included.", "memory"))
    if section.kind == "runs" and sum(row.role == "run" for row in section.rows) > 1:
        said = (
            "Single runs: a difference between rows is no result; `leansurgeon run` repeats, with seeds and a control."
        )
        lines.append(Note(said, "quality", caveat=True))
    return lines + list(section.notes)


def of_quality(section: Section) -> list[Note]:
    """Return notes on the metric: its step, its spread, and unequal lengths of training."""
    original, longer = section.original, {}  # by epochs: arms that continue from the trained original
    for row in section.rows if section.kind == "experiment" and original else ():
        if row.init == "transfer" and row is not original:
            longer.setdefault(row.epochs, []).append(row)
    warned, said = [], []
    for epochs, rows in longer.items():
        known = epochs is not None and original.epochs is not None
        figures = f"{original.epochs:.3g} + {epochs:.3g} epochs against {original.epochs:.3g}" if known else "longer"
        continues = f"continue{'' if len(rows) > 1 else 's'} from the trained {original.name}"
        warned.append(Note(f"{join_words(r.name for r in rows)} {continues}: {figures}.", "quality", caveat=True))
    if section.task:
        many = any(r.metric and r.metric.sd is not None for r in section.rows)
        begin = "± is the standard deviation over seeds; the" if many else "The"
        better = "" if section.task.higher_is_better else ", lower is better"
        chosen = [row for row in section.rows if row.runs and all(shows_best(run.summary) for run in row.runs)]
        gone = [row.name for row in chosen if not all((run.path / BEST).is_dir() for run in row.runs)]
        of_best = f"that of the {'best model' if gone else 'model in model/, the best'} of all evaluations"
        if all(row.role == "model" for row in section.rows):
            said.append(f"The {section.task.label} is that of each model on the same samples{better}.")
        elif chosen and len(chosen) == len([row for row in section.rows if row.runs and row.role != "model"]):
            said.append(f"{begin} {section.task.label} is {of_best}{better}.")
        else:
            said.append(f"{begin} {section.task.label} is that of the last step, not of the best{better}.")
            said += [f"For {join_words(row.name for row in chosen)} it is {of_best}."] if chosen else []
        # healed, and no step was better
        healed = [(row.name, run.summary.best) for row in chosen for run in row.runs if heals(run.summary)]
        if unchanged := dict.fromkeys(name for name, best in healed if best and best.step == 0):
            where = "" if gone else ", which is in model/"
            said.append(f"{' and '.join(unchanged)}: no step was better than the model as it was{where}.")
        if gone:
            said.append(f"{' and '.join(gone)}: the run folder no longer holds a model.")
    if share := max((r.largest_class or 0.0 for r in section.rows), default=0.0):
        said.append(f"The largest class has {100 * share:.1f} % of the samples: macro F1 counts every class alike.")
    if any(r.test for r in section.rows):
        said.append("test: the published test split, read once, with the weights that were best in validation.")
    if any(row.role == "lean" and original and compare(row, original) for row in section.rows):
        many = max(len(row.seeds) for row in section.rows) > 1
        seeds = ", and count the spread of the seeds" if many else ""
        said.append(f"Intervals compare the same held-out samples in pairs{seeds}.")
    elif any(v.standard_error for v in verdicts(section)):
        size = (
            "the seeds and the size of the test set"
            if is_accuracy(section.task)
            else "the seeds only, not the test text"
        )
        said.append(
            f"Standard errors count {size}; better or worse is said from two on, with few seeds later "
            "(Student's t, 95 %)."
        )
    return warned + [Note(line, "quality") for line in said]


def of_expectations(section: Section) -> list[Note]:
    """Return a sentence for each row with expectations in its recipe, with values such as `accuracy 97.6 % (here 97.5
    %, which agrees)`.
    """
    said = {}
    differ = set()
    for one in expectations(section):
        if one.figure == "parameters":
            expected, here = f"{one.expected:,.0f}", "" if one.agrees else f" (here {one.measured:,.0f})"
        else:
            own = section.task and section.task.percent and one.figure == section.task.metric
            percent = own or section.kind == "glue"
            expected, measured = (f"{100 * v:.1f} %" if percent else plain(v) for v in (one.expected, one.measured))
            word = {True: ", which agrees", False: ", which does not agree", None: ""}[one.agrees]
            here = f" (here {measured}{word})"
        said.setdefault(one.name, []).append(f"{one.figure} {expected}{here}")
        differ |= {one.name} if one.agrees is False else set()
    return [
        Note(f"The recipe, as it is shipped, expects of {name}: {', '.join(some)}.", "quality", caveat=name in differ)
        for name, some in said.items()
    ]


def of_kappa(measured: list[Kappa], by_layer: bool) -> list[Note]:
    """Return notes on how condition numbers were measured: precision, samples, what is averaged."""
    if not measured:
        return []
    first = measured[0]
    dtype = "fp32" if first.dtype == "float32" else first.dtype
    averaged = "" if by_layer else "; median layer and worst layer"
    counts = sorted({k.samples for k in measured})
    taken = str(first.samples) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}, not the same for all rows"
    said = [
        f"kappa: input of the output projection, per sample ({taken}), real tokens, {dtype} forward, "
        f"fp64 spectrum{averaged}."
    ]
    if by_layer and any(k.output for k in measured):
        said.append(
            "A, W_q, W_k, W_v and W_o depend on the basis of every head, which changes nothing that the model "
            "computes. A W_o, the block's Jacobian (≥: a lower bound by probes) and, over heads, W_o W_v and "
            "W_q' W_k do not."
        )
    notes = [Note(line, "kappa") for line in said]
    lost = sum(k.deficient for k in measured)
    if lost:
        lacking = (
            f"{plural(lost, 'block')} lacked full rank (≥ marks a bound) and stand in no mean: look for repeated "
            "tokens, heads without effect, or fewer columns than tokens."
        )
        notes.append(Note(lacking, "kappa", caveat=True))
    return notes
