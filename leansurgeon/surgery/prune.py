"""Prune heads by measured importance: the same number from every layer of a stage, key/value groups whole, so that the
result is an ordinary, smaller checkpoint. An uneven set of heads, which masking allows, can be loaded by no library
.

Output projections are then refitted on the calibration data, so that the heads that stay take over what they can;
without that, what remains is exactly the masked model that `leansurgeon heads` has scored as `even`.
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
    """`"40%"` as 0.4. Raises `UsageError` for anything else."""
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
    """What `carry_out` writes: the most important heads stay, `values` (all heads,) in the order of `sites`.

    Raises what `check` and `calibrate` raise.
    """
    strength = {(site.index, site.group): part for site, part in zip(sites, strengths(sites, values), strict=True)}
    steps = replace(check(source, asked, seed, heal=heal), strength=strength, calibrated=True)
    if not heal:
        return DecidedCut(steps, record=Decisions(calibration=calibration.as_record()), calibration=calibration)
    from leansurgeon.surgery.calibrate import calibrate  # scipy.stats and more, which `heads` does without

    say("Refitting output projections ...")
    try:
        outcome = calibrate(steps, calibration, say, device)
    except UnsupportedModel as error:
        raise UnsupportedModel(error.message, "--no-heal leaves the heads that stay as they are.") from error
    return DecidedCut(steps, outcome.edits, outcome.record, calibration, outcome.close)


def check(source: Source, asked: float, seed: int = 0, *, heal: bool = True) -> Plan:
    """The same plan before anything is measured. Raises `UsageError` for a share that is no whole key/value group (no
    head, where all or none share their keys), and `UnsupportedModel` where the family cannot store fewer heads of the
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
