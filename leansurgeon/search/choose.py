"""Choose one shape for a number of parameters, for `shrink --params -30%`, by trying alternatives on sample data.

The same number of parameters can be saved by fewer layers, by a narrower MLP, or by some of both; which costs least
depends on the model. So for each of the usual MLP widths the deepest shape that fits is refitted on a part of the
sample data and judged on the guard samples; the proof's held-out data stays unseen.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError, plural
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.progress import Say, track
from leansurgeon.search.space import Budget, Candidate, Space, budget_of, enumerate_shapes
from leansurgeon.surgery.requested_shape import RequestedShape

SHARE = Fraction(1, 4)  # of the sample data


def by_parameters(
    source: Source, text: str, wanted: RequestedShape, data: Calibration | None, seed: int, say: Say
) -> tuple[RequestedShape, list[str]]:
    """Choose the shape with at most this many parameters that is best after a short refit; without data, the one that
    keeps the MLP. Heads stay unchanged, or as in `wanted`. Return it with the reason in sentences. Raises `UsageError`
    if no shape is small enough.
    """
    most = budget_of(text, source.parameters.total)
    if most >= source.parameters.total:
        raise UsageError(
            f"--params {text} allows {most:,} parameters, and {source.name} has {source.parameters.total:,}.",
            "Give fewer, such as -30%.",
        )
    space = Space(wanted.heads or "1x", wanted.layers, wanted.mlp_dim, wanted.head_dim)
    shapes = enumerate_shapes(
        source, space, Budget(parameters=most), init=wanted.init, calibrated=source.learned and data is not None
    )
    tried = [
        replace(c, wanted=replace(c.wanted, class_attention=wanted.class_attention)) for c in deepest(shapes.candidates)
    ]
    if data is None or not source.learned or len(tried) == 1:
        best = tried[0]
        why = (
            "it is the only one that fits" if len(tried) == 1 else "it keeps the MLP; without sample data none is tried"
        )
        return best.wanted, [f"{describe_candidate(best, source)}: {why}."]
    from leansurgeon.search.heals import HealTrial

    with scratch() as place:
        bench = HealTrial(source, replace(data, heldout=[]), place, seed, say=say)
        say(f"Refitting {plural(len(tried), 'shape')} of about this size on a quarter of the sample data ...")
        scores = {c.name: bench.of(c, SHARE)["choosing"] for c in track(tried, "shapes", "shapes/s")}
    worked = [candidate for candidate in tried if scores[candidate.name].score is not None]
    if not worked:
        raise UsageError(f"None of the shapes could be refitted: {scores[tried[0].name].failed}")
    best = min(worked, key=lambda candidate: scores[candidate.name].score.key)
    score = scores[best.name].score
    others = [f"{describe_candidate(c, source)} {scores[c.name].score.text}" for c in worked if c is not best]
    why = f", the best of {len(scores)} shapes of about this size" if others else ""
    says = [f"{describe_candidate(best, source)}: {score.label} {score.text} after a short refit{why}."]
    return best.wanted, [*says, *([f"The others: {'; '.join(others)}."] if others else [])]


def deepest(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """Return the shape with the most parameters for every MLP width, the widest MLP first."""
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        key = tuple(stage.mlp_dim for stage in candidate.shape.stages)
        if key not in best or candidate.parameters > best[key].parameters:
            best[key] = candidate
    return [best[key] for key in sorted(best, reverse=True)]


def describe_candidate(candidate: Candidate, source: Source) -> str:
    """Describe a candidate: `24 layers, MLP 1,152, 98,123,456 parameters (-27.1 %)`."""
    change = 100 * (candidate.parameters / source.parameters.total - 1)
    layers, mlp = (candidate.shape.column(key) for key in ("depth", "mlp_dim"))
    return f"{layers} layers, MLP {mlp}, {candidate.parameters:,} parameters ({change:+.1f} %)"
