"""What a comparison allows to conclude. "Better" requires at least two standard errors.

The standard error of a difference of two arms adds, as squares: each arm's spread over seeds, sd / sqrt(seeds), and for
accuracies the error of each arm from the size of the test set, sqrt(p (1 - p) / N). More seeds reduce the first and
never the second. The second treats the arms' test sets as independent, which is conservative. Perplexity has only the
first.

Several comparisons of one table are corrected together by Holm's step-down rule (1979): the clearest of m needs the
quantile for 5 % / m, the next that for 5 % / (m - 1), and so on; after the first that is not shown, none is.

What a recipe expects of its arms (`expected:`) is compared with the measurements in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from leansurgeon.checkpoints.record import FRESH
from leansurgeon.errors import plural
from leansurgeon.intervals import NEEDED, binomial_variance, degrees_of_freedom, errors_needed, p_value
from leansurgeon.reading.jsonfile import value_at
from leansurgeon.reading.values import items, text, whole
from leansurgeon.report.humans import plain
from leansurgeon.report.paired import compare, describe
from leansurgeon.report.rows import Row, Section, Task

FEW = 50  # held-out samples
LONGER = 1.01  # times the epochs
ONE_SEED = "; one seed is not a result."
SMALL_WIDTH = 256  # up to this width the default initialization is known to leave deep models under-trained


@dataclass(frozen=True)
class Verdict:
    """`difference` is arm minus against in the metric's own unit (a fraction for percentages). `verdict` is a fixed
    word for programs: "better", "worse", "not shown", "one seed", "not credible", "not comparable" or "no spread".
    `needed` is the number of standard errors required in this table, `p` the probability of such a difference by
    chance.
    """

    arm: str
    against: str
    difference: float
    standard_error: float | None
    standard_errors: float | None
    verdict: str
    sentence: str
    needed: float | None = None
    p: float | None = None


def verdicts(section: Section) -> list[Verdict]:
    """Compare every lean arm with the original and with its control."""
    if section.kind != "experiment" or section.task is None:
        return []
    originals = [r for r in section.rows if r.role == "original"]
    leans = [row for row in section.rows if row.role == "lean"]
    pairs = [(lean, other) for lean in leans for other in [*originals, *controls_of(lean, section.rows)]]
    found = {i: verdict for i, pair in enumerate(pairs) if (verdict := judge(*pair, section.task))}
    tested = sorted((i for i in found if found[i].p is not None), key=lambda i: found[i].p)
    left = len(tested)
    for i in tested:
        found[i] = judge(*pairs[i], section.task, left)
        left -= found[i].verdict != "not shown"
    return [*found.values()]


def conclude(section: Section) -> list[str]:
    """Return a section's conclusions as sentences: what each lean arm keeps and gains, if tested on the same samples;
    else what the seeds allow.
    """
    found, told, original, task = verdicts(section), [], section.original, section.task
    for row in section.rows if original and task else ():
        if row.role == "lean" and (said := describe(row, original, controls_of(row, section.rows), task)):
            told += said
            found = [verdict for verdict in found if verdict.arm != row.name]
    if told and (task.eval_samples or FEW) < FEW:
        told.append(f"{plural(task.eval_samples, 'held-out sample')}: too few to tell small differences.")
    if told and section.kind == "experiment" and all(len(row.seeds) == 1 for row in section.rows):
        told.append("One seed: the intervals count samples, and not what another training would give.")
    return [*told, *sentences(found)]


def sentences(verdicts_here: list[Verdict]) -> list[str]:
    """Return the sentences of all verdicts; more than three with one seed become one sentence."""
    single = [v for v in verdicts_here if v.sentence.endswith(ONE_SEED)]
    said = [v.sentence for v in verdicts_here if len(single) <= 3 or v not in single]
    if len(single) > 3:
        said.append(f"One seed is not a result: {'; '.join(v.sentence.removesuffix(ONE_SEED) for v in single)}.")
    if (tested := sum(v.p is not None for v in verdicts_here)) > 1:
        said.append(f"The {tested} comparisons are corrected together (Holm), so that chance shows in 1 of 20 tables.")
    return said


def controls_of(lean: Row, rows: tuple[Row, ...]) -> list[Row]:
    """Return the controls of this arm: those that name it, else those whose name contains its name, else all that name
    no arm.
    """
    controls = [r for r in rows if r.role == "control"]
    bound = [r for r in controls if r.control_of == lean.name]
    free = [r for r in controls if not r.control_of]
    return bound or [r for r in free if r.name == f"control-{lean.name}"] or free


def judge(arm: Row, other: Row, task: Task, comparisons: int = 1) -> Verdict | None:
    """Compare two arms, with `comparisons` comparisons of the table still to be tested; None if one has no metric."""
    if arm.metric is None or other.metric is None:
        return None
    difference = arm.metric.mean - other.metric.mean
    ahead = difference > 0 if task.higher_is_better else difference < 0
    if task.percent:
        figure = f"{100 * difference:+.{task.decimals}f} points"
    else:
        figure = f"{task.label} {'-' if difference < 0 else '+'}{plain(abs(difference))}"
    begin = f"{arm.name} vs {other.name}: {figure}"
    if arm.metric.n < 2 or other.metric.n < 2:
        return Verdict(arm.name, other.name, difference, None, None, "one seed", f"{begin}{ONE_SEED}")
    paired = compare(arm, other)
    of_test = variance_of_test(arm, task) + variance_of_test(other, task)
    if paired and not paired.ratio:
        of_test = paired.of_samples**2
    error = math.sqrt(arm.metric.error**2 + other.metric.error**2 + of_test)
    if error == 0:
        sentence = f"{begin}; the seeds do not differ, so there is no spread to judge by."
        return Verdict(arm.name, other.name, difference, 0.0, None, "no spread", sentence)
    ratio = abs(difference) / error
    freedom = degrees_of_freedom(error, [(one.metric.error, one.metric.n) for one in (arm, other)])
    enough = errors_needed(freedom, comparisons)
    word, ending = _words(arm, other, ahead, ratio, enough, comparisons)
    # Truncated, not rounded: 1.96 must not read as the 2.0 that would have been enough.
    sentence = f"{begin}, {math.floor(ratio * 10) / 10:.1f} standard errors: {ending}."
    return Verdict(arm.name, other.name, difference, error, ratio, word, sentence, enough, p_value(ratio, freedom))


def _words(arm: Row, other: Row, ahead: bool, ratio: float, enough: float, comparisons: int) -> tuple[str, str]:
    control = other.role == "control"
    if ratio < enough:
        ending = "not shown to be better" if ahead or ratio == 0 else "behind, but not shown to be worse"
        if ratio >= NEEDED:
            of = "few seeds" if comparisons == 1 else "few seeds and many comparisons"
            ending = f"{math.ceil(enough * 10) / 10:.1f} are needed with so {of}; {ending}"
        return "not shown", ending + (", so more heads are not shown to help" if control else "")
    if ahead and arm.trained > LONGER * other.trained:
        return "not comparable", "ahead, but trained longer, so not comparable"
    if ahead and other.seeds_still_improving:
        return "not credible", f"ahead, but {other.name} was still improving at its end: not a credible win"
    if ahead:
        return "better", "better"
    return "worse", "worse" + (
        ", though it was still improving when its training ended" if arm.seeds_still_improving else ""
    )


def is_accuracy(task: Task) -> bool:
    """Return whether the metric is a share of correct samples."""
    return task.percent and "accuracy" in task.metric


def variance_of_test(row: Row, task: Task) -> float:
    """Return what the size of the test set adds to the variance of an accuracy; 0 for other metrics."""
    known = row.metric and task.eval_samples and is_accuracy(task)
    return binomial_variance(row.metric.mean, task.eval_samples) if known else 0.0


def warnings(section: Section) -> list[str]:
    """Return what makes a comparison doubtful whatever its numbers."""
    if section.kind != "experiment":
        return []
    told = []
    for row in (row for row in section.rows if row.role == "original"):
        if row.seeds_still_improving:
            of = f" in {row.seeds_still_improving} of {len(row.seeds)} seeds" if len(row.seeds) > 1 else ""
            told.append(
                f"{row.name} was still improving when its training ended{of}: it is not fully trained, so "
                "a win of another arm over it is not credible. Train longer."
            )
        made = row.runs[0].summary.model
        # else the weights were not initialized here
        fresh = text(value_at(made.surgery, "plan", "init"), FRESH) == FRESH
        stages = items(value_at(made.shape, "stages")) or [None]
        std, width = made.init_std if fresh else None, whole(value_at(stages[0], "width"))
        natural = 1 / math.sqrt(width) if width else 0.0
        if std and width and width <= SMALL_WIDTH and std < natural / 2:
            told.append(
                f"{row.name} starts from weights of std {std:g}; at width {width} that is far below "
                f"1/sqrt(width) = {natural:.3f}, which holds deep models back and flatters shallow ones."
            )
    roles = {row.role for row in section.rows}
    heads = {row.shape["heads"] for row in section.rows if row.shape}
    if "lean" in roles and "control" not in roles and len(heads) > 1:
        told.append("There is no control (same depth, old heads, equal parameters): a gain may come from depth alone.")
    return told


DEBUG = "-debug"  # suffix of an experiment that was only a test run: its recipe's expectations do not apply


@dataclass(frozen=True)
class Expected:
    """One value of one row. `agrees` is None if one seed cannot tell; parameters must be equal."""

    name: str
    figure: str
    expected: float
    measured: float
    agrees: bool | None


def expectations(section: Section) -> list[Expected]:
    """Return every value that a row's recipe expects and this report has measured.

    An expectation is found by the name of an arm; for a single run, by its number of parameters, if that identifies one
    arm of the recipe.
    """
    found, task = [], section.task
    for row in section.rows if section.kind != "models" and not section.name.endswith(DEBUG) else ():
        arms = row.runs[0].expected if row.runs else {}
        wanted = arms.get(row.name, {})
        if section.kind == "runs":
            same = [arm for arm in arms.values() if arm.get("parameters") == row.parameters]
            wanted = same[0] if len(same) == 1 and row.parameters is not None else {}
        figures = {"loss": row.loss} | ({task.metric: row.metric} if task else {}) | (row.scores or {})
        for figure, value in wanted.items():
            measured = figures.get(figure)
            if figure == "parameters" and row.parameters is not None:
                found.append(Expected(row.name, figure, value, row.parameters, row.parameters == value))
            elif measured is not None:
                agrees = None
                if measured.n > 1:  # within what the seeds and the size of the test set allow
                    of_test = variance_of_test(row, task) if task is not None and measured is row.metric else 0.0
                    error = (measured.error**2 + of_test) ** 0.5
                    freedom = degrees_of_freedom(error, [(measured.error, measured.n)])
                    agrees = abs(measured.mean - value) <= errors_needed(freedom) * error
                found.append(Expected(row.name, figure, value, measured.mean, agrees))
    return found
