"""Prune heads by measured importance: the same number from every layer of a stage, with whole key/value groups, so that
the result is an ordinary, smaller checkpoint. No library can load the uneven sets of heads that masking allows.

Output projections are then refitted on the calibration data, so that the remaining heads take over what they can.
Without the refit, the result is exactly the masked model that `leansurgeon heads` has scored as `even`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.heads.pruning import strengths
from leansurgeon.measure.heads.sites import Site
from leansurgeon.progress import Say, silent
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.operators import keeps_size
from leansurgeon.surgery.planning import Plan, plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut

MEASURED = "of the highest measured importance"


def share(text: str) -> float:
    """Parse `"40%"` as 0.4. Raises `UsageError` for anything else."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not text.endswith("%") or not 0 < value < 1:
        raise UsageError(f"--prune {text}: a share of the heads is needed, such as 40%.")
    return value


def decide(
    source: Source,
    sites: Sequence[Site],
    values: np.ndarray,
    asked: float,
    calibration: Calibration,
    *,
    seed: int = 0,
    heal: bool = True,
    say: Say = silent,
    device: str = "cpu",
) -> DecidedCut:
    """Return what `carry_out` writes: the most important heads stay. `values` (all heads,) are in the order of `sites`.

    Raises what `check` and `calibrate` raise.
    """
    strength = {(site.index, site.group): part for site, part in zip(sites, strengths(sites, values), strict=True)}
    steps = replace(check(source, asked, seed, heal=heal), strength=strength, calibrated=True)
    if not heal:
        return DecidedCut(steps, record=Decisions(calibration=calibration.as_record()), calibration=calibration)
    from leansurgeon.surgery.calibrate import calibrate  # imports scipy.stats and more, which `heads` does not need

    say("Refitting output projections ...")
    try:
        outcome = calibrate(steps, calibration, say, device)
    except UnsupportedModel as error:
        raise UnsupportedModel(error.message, "--no-heal leaves the heads that stay as they are.") from error
    return DecidedCut(steps, outcome.edits, outcome.record, calibration, outcome.close)


def check(source: Source, asked: float, seed: int = 0, *, heal: bool = True) -> Plan:
    """Return the same plan before anything is measured. Raises `UsageError` if the share is less than one key/value
    group (one head, if all or none share keys), and `UnsupportedModel` if the family cannot store fewer heads of the
    same size.
    """
    stages, arch = source.shape.stages, source.architecture
    have = [stage.kv_heads if stage.kv_heads > 1 else stage.heads for stage in stages]
    left = [max(1, n - round(asked * n)) for n in have]
    if left == have:
        most = max(have)
        what = "key/value groups" if any(1 < s.kv_heads < s.heads for s in stages) else "heads"
        raise UsageError(
            f"--prune {100 * asked:g}% of {most} {what} is less than one.",
            f"Give at least {100 / most:.0f}%." if most > 1 else "A layer needs one of them.",
        )
    if not keeps_size(source):
        raise UnsupportedModel(
            f"{arch.library} derives head_dim of {arch.name} from width // heads, so fewer heads of the same size "
            "cannot be stored.",
            "Importance, ablation and curves are measured all the same: leave --prune out.",
        )
    heads = (str(n * stage.heads // all_of_it) for n, all_of_it, stage in zip(left, have, stages, strict=True))
    wanted = RequestedShape(heads=",".join(heads), head_dim="keep", whole_groups=True)
    return plan(source, wanted, seed, Method(heal="closed" if heal else "none"), calibrated=heal, heads_by=MEASURED)
