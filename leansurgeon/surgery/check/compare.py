"""`--compare`: the same shape from three starting points, each written, reloaded and scored on the same held-out data.

fresh   everything initialised by the library's rules (the paper's way)
naive   what copying without thought gives: layers at equal spacing, heads renumbered by the config alone
best    the plan at hand
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tabulate import tabulate

from leansurgeon.checkpoints.proof.report_numbers import cells_of
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.record import Comparison
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.progress import Say, silent
from leansurgeon.surgery.check.judged import on_data
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.planning import Plan, plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import predicts_words
from leansurgeon.surgery.write.apply import apply


def starts(
    wanted: Wanted,
    plan_at_hand: Plan,
    calibration: Calibration,
    best: Comparison,
    say: Say = silent,
) -> dict[str, Comparison]:
    """Fresh and naive built and scored, each by how its outputs compare with the source's; `best` is that of the plan
    at hand. Raises `UsageError` where the source has no weights to compare with.
    """
    source = plan_at_hand.source  # its class attention follows already
    refuse_unlearned(source, wanted.init)
    wanted = replace(wanted, class_attention=False)
    comparisons: dict[str, Comparison] = {}
    target = plan_at_hand.after
    wanted = replace(wanted, layers=",".join(str(stage.depth) for stage in target.stages))
    for init in ("fresh", "naive"):
        say(f"--compare: building the {init} start ...")
        even = Method(layers="even", uncalibrated=True)
        steps = plan(source, replace(wanted, init=init), plan_at_hand.seed, even)
        assert steps.after == target, "starting points of different shapes"
        comparisons[init] = scored(steps, calibration)
    return comparisons | {"best": best}


def refuse_unlearned(source: Source, init: str) -> None:
    """Raises `UsageError` where there is nothing to compare with."""
    if not source.learned or init == "fresh":
        raise UsageError(f"--compare: nothing of {source.name} is kept, so there is nothing to compare with.")


def scored(steps: Plan, calibration: Calibration) -> Comparison:
    """Write the plan to a scratch folder and compare its outputs with the source's."""
    with scratch() as place:
        folder = place / "model"
        folder.mkdir()
        apply(steps, folder)
        total = steps.parameters_after.total
        return on_data(calibration, steps.source, folder, total, calibration.heldout, steps.architecture)


def table(starts: Mapping[str, Comparison], calibration: Calibration) -> str:
    """The starting points as a person compares them, the source first."""
    language = predicts_words(calibration)
    rows = [cells_of(name, compared, language) for name, compared in starts.items()]
    source = dict.fromkeys(rows[0], "") | cells_of("source", starts["best"], language, "source")
    return tabulate([source, *rows], headers="keys", disable_numparse=True, stralign="right")
