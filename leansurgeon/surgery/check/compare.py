"""`--compare`: the same shape from three starting points, each written, reloaded and scored on the same held-out data.

fresh   everything initialised by the library's rules (the paper's way)
naive   what copying without thought gives: layers at equal spacing, heads renumbered by the config alone
best    the plan at hand
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from leansurgeon.checkpoints.prove import prove
from leansurgeon.checkpoints.report_numbers import of_comparison
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery.plan.method import Method
from leansurgeon.surgery.plan.planning import Plan, plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.write.apply import apply


@dataclass(frozen=True)
class Start:
    """One starting point and how its outputs compare with the source's (`checkpoints.prove.against`)."""

    name: str
    compared: dict[str, Any]


def starts(
    source: Source,
    wanted: Wanted,
    plan_at_hand: Plan,
    calibration: Calibration,
    best: dict[str, Any],
    say: Callable[[str], None] = lambda _: None,
) -> list[Start]:
    """Fresh and naive built and scored; `best` is the proof of the plan at hand. Raises `UsageError` where the source
    has no weights to compare with.
    """
    refuse_unlearned(source, wanted)
    found, target = [], plan_at_hand.after
    wanted = replace(wanted, layers=",".join(str(stage.depth) for stage in target.stages))
    for init in ("fresh", "naive"):
        say(f"--compare: building the {init} start ...")
        even = Method(layers="even", uncalibrated=True)
        steps = plan(source, replace(wanted, init=init), plan_at_hand.seed, even)
        assert steps.after == target, "starting points of different shapes"
        found.append(Start(init, scored(steps, source, calibration)))
    return [*found, Start("best", best)]


def refuse_unlearned(source: Source, wanted: Wanted) -> None:
    """Raises `UsageError` where there is nothing to compare with."""
    if not source.learned or wanted.init == "fresh":
        raise UsageError(f"--compare: nothing of {source.name} is kept, so there is nothing to compare with.")


def scored(steps: Plan, source: Source, calibration: Calibration) -> dict[str, Any]:
    causal = calibration.task is not None and calibration.task.head == "causal-lm"
    with tempfile.TemporaryDirectory(prefix="leansurgeon-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        apply(steps, source, folder)
        proof = prove(
            folder,
            steps.parameters_after.total,
            source=source.folder,
            batches=calibration.heldout,
            kind="causal-lm" if causal else "plain",
        )
    return proof["compared"]


def keep(folder: Path, record: dict[str, Any], starts: list[Start]) -> None:
    """Add the starting points to the surgery.json of a written result, for the report of its training."""
    found = record | {"starts": {start.name: start.compared for start in starts}}
    aside = folder / ".surgery.json.tmp"
    aside.write_text(json.dumps(found, indent=2) + "\n")
    aside.replace(folder / "surgery.json")


def table(starts: list[Start], calibration: Calibration) -> str:
    """The starting points as a person compares them, the source first."""
    language = calibration.task is not None and calibration.task.head in ("causal-lm", "masked-lm")
    rows = [of_comparison(start.name, start.compared, language) for start in starts]
    source = {key: "" for key in rows[0]} | {"start": "source"} | source_numbers(starts[-1].compared, language)
    return tabulate([source, *rows], headers="keys", disable_numparse=True, stralign="right")


def source_numbers(compared: dict[str, Any], language: bool) -> dict[str, str]:
    if "loss" not in compared:
        return {}
    swapped = {key: {"result": compared[key]["source"]} for key in ("loss", "accuracy")}
    return {k: v for k, v in of_comparison("source", swapped, language).items() if v}
