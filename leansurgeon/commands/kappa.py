"""Kappa: how well conditioned the attention of a model is on sample data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say

if TYPE_CHECKING:
    from leansurgeon.measure.kappa.study import KappaDocument

SAMPLES, PROBES = 256, 16
PRECISIONS = ("fp32", "bf16", "fp16")


def kappa(
    model: str,
    data: str | None,
    say: Say,
    *,
    samples: int = SAMPLES,
    probes: int = PROBES,
    precision: str = "fp32",
    seed: int = 0,
    columns: str | None = None,
    allow_pickle: bool = False,
) -> KappaDocument:
    """Measure a model on held-out samples of `data`. None is what a run was trained on; then the document is also kept
    as kappa.json in its folder.

    Raises `UsageError` for another precision, a preset, or missing data; and what opening and measuring raise.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision}: give one of {', '.join(PRECISIONS)}.")
    from leansurgeon.checkpoints.record import shown_if_newer
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.report.evidence.collect import KAPPA
    from leansurgeon.training.runs.folder import keep_beside, run_of
    from leansurgeon.training.runs.sample_data import data_for_kappa

    with shown_if_newer(say):
        opened = open_source(model, allow_pickle=allow_pickle)
        sample = data_for_kappa(opened, data, model, seed, say, columns)
        from leansurgeon.measure.kappa.study import study

        document = study(opened, sample, samples=samples, probes=probes, precision=precision, say=say)
    if data is None and (run := run_of(model)):  # figures of its own data, which a report shows
        keep_beside(run / KAPPA, document, say)
    return document
