"""What stands around a table in words: its title, and how the numbers in it came about."""

from __future__ import annotations

from leansurgeon.errors import plural
from leansurgeon.report.rows import Section
from leansurgeon.report.verdict import is_accuracy, longer_training, verdicts


def title(section: Section) -> str:
    """`digits-vit: digits, 360 evaluation samples, 3 seeds, cpu, fp32`."""
    if section.kind in ("models", "glue"):
        return section.name
    task = section.task
    said = [task.name] if section.kind == "experiment" and task.name != section.name else []
    if task.eval_samples:
        said.append(plural(task.eval_samples, "evaluation sample"))
    seeds = max((len(r.seeds) for r in section.rows), default=0)
    if section.kind == "experiment":
        said.append(plural(seeds, "seed"))
    for values in ({r.device for r in section.rows}, {r.precision for r in section.rows}):
        if len(values) == 1 and "" not in values:
            said += values
    return f"{section.name}: {', '.join(said)}" if said else section.name


def notes(section: Section, kappa: bool = False) -> list[str]:
    """How the numbers came about, in as few sentences as honesty allows."""
    found = []
    rows = section.rows
    if not kappa:
        found += longer_training(section)
    if section.task and not kappa:
        many = any(r.metric and r.metric.sd is not None for r in rows)
        begin = "± is the standard deviation over seeds; the" if many else "The"
        better = "" if section.task.higher_is_better else ", lower is better"
        found.append(f"{begin} {section.task.label} is that of the last step, not of the best{better}.")
    if not kappa and any(r.test for r in rows):
        found.append("test: the published test split, read once, with the weights that were best in validation.")
    if not kappa and any(v.standard_error for v in verdicts(section)):
        size = (
            "the seeds and the size of the test set"
            if is_accuracy(section.task)
            else "the seeds only, not the test text"
        )
        found.append(
            f"Standard errors count {size}; better or worse is said from two on, with few seeds later "
            "(Student's t, 95 %)."
        )
    with_kappa = [r.kappa for r in rows if r.kappa]
    if with_kappa:
        first = with_kappa[0]
        dtype = "fp32" if first.dtype == "float32" else first.dtype
        averaged = "" if kappa else "; median layer and worst layer"
        counts = sorted({k.samples for k in with_kappa})
        taken = str(first.samples) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}, not the same for all rows"
        found.append(
            f"kappa: input of the output projection, per sample ({taken}), real tokens, {dtype} forward, "
            f"fp64 spectrum{averaged}."
        )
        if kappa and any(k.output for k in with_kappa):
            found.append(
                "A, W_q, W_k, W_v and W_o depend on the basis of every head, which changes nothing that the model "
                "computes. A W_o, the block's Jacobian (≥: a lower bound by probes) and, over heads, W_o W_v and "
                "W_q' W_k do not."
            )
        lost = sum(k.deficient for k in with_kappa)
        if lost:
            found.append(
                f"{plural(lost, 'block')} lacked full rank (≥ marks a bound) and stand in no mean: look for repeated "
                "tokens, heads without effect, or fewer columns than tokens."
            )
        elif any(bound and not bound.exact for k in with_kappa for bound in (k.mean, k.median, k.worst)):
            found.append(f"≥ marks values that a {dtype} forward caps; measure in fp32.")
    if not kappa and any(r.memory for r in rows):
        kinds = {r.on_gpu for r in rows if r.memory}
        if len(kinds) > 1:
            found.append("Memory is of two kinds, not comparable: CPU, peak RSS of the process; GPU, allocator's peak.")
        elif kinds == {False}:
            found.append("Peak RSS is that of the whole training process, libraries included.")
    if section.kind == "runs" and len(rows) > 1 and not kappa:
        found.append(
            "Single runs: a difference between rows is no result; `leansurgeon run` repeats, with seeds and a control."
        )
    return found + list(section.notes)
