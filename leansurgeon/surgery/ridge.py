"""Refit an output projection in closed form, so that its block also adds what the dropped layers added.

A block ends in a matrix that writes into the residual stream, `y = W a + b`. If the student's hidden state misses the
teacher's by E, the change of W that best corrects it is a linear least-squares problem in the student's activations
`a`: no gradient, no labels, no new parameters, the same shape.

    minimise over D, d:   sum_t w_t |D a_t + d - E_t|^2 + ridge * mean(diag G) * |D|^2,     G = sum_t w_t a_t a_t^T

The ridge pulls towards the existing weight (D = 0), so few samples change little. With `w_t = 1 / |target_t|^2` every
token counts by its relative error; without it, only the few tokens of huge norm in decoders (above all the first) would
be fitted, although the next norm divides by that length. Sums and solution are in float64. Guard samples not used in
the sums decide which ridge is best, and whether to change anything.

After ReplaceMe (arXiv 2505.02819), which solves for a square map behind W; here W itself is solved for, which has more
freedom (as many inputs as MLP units) and a natural prior.

Letters: N tokens, I inputs of the projection, O its outputs (the width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor

from leansurgeon.checkpoints.recorded.decided import ProjectionRefit
from leansurgeon.errors import Diverged

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 0.3, 1.0)
LEAST_GAIN = 0.005  # of the guard's relative error; a smaller gain is not worth a changed tensor
CHUNK = 2**22  # elements held in float64 at once (32 MiB)


class NormalEquations:
    """The sums of one least-squares problem, accumulated batch by batch without storing the activations.

    Memory: (I + 1)^2 + (I + 1) * O numbers of 8 bytes.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        constant: bool,
        device: torch.device | str = "cpu",
        worth: Tensor | None = None,
        exact: bool = True,
        chunk: int = CHUNK,
    ) -> None:
        """`constant` adds an input that is always 1, for a projection with a bias. `worth` (O,) weighs the squared
        error of each output (default 1); it does not affect the solution, since outputs are independent, but the
        errors, which sum over them. `exact` False takes products of a few thousand tokens in float32, which is twice as
        fast and accurate enough to compare candidates; `chunk` elements are multiplied at once.
        """
        self.number = torch.float64 if exact else torch.float32
        size = inputs + int(constant)
        self.inputs, self.constant, self.chunk = inputs, constant, chunk
        self.gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size, outputs, dtype=torch.float64, device=device)
        self.energy = torch.zeros(outputs, dtype=torch.float64, device=device)  # sum of w E^2
        self.worth = torch.ones_like(self.energy) if worth is None else worth.to(self.energy)
        self.tokens = 0

    def add(self, a_NI: Tensor, e_NO: Tensor, weight_N: Tensor | None = None) -> None:
        """Add samples; those of weight 0 are ignored. Raises `Diverged` if a number is not finite."""
        step = max(1, self.chunk // (self.gram.shape[0] + e_NO.shape[1]))
        for start in range(0, len(a_NI), step):
            a, e = (x[start : start + step].to(self.number) for x in (a_NI, e_NO))
            w = None if weight_N is None else weight_N[start : start + step].to(self.number)
            if self.constant:
                a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            if w is not None:
                seen = w > 0
                root = w[seen].sqrt()[:, None]
                a, e = a[seen].mul_(root), e[seen].mul_(root)
            if self.number == self.gram.dtype:
                self.gram.addmm_(a.T, a)
                self.cross.addmm_(a.T, e)
            else:
                self.gram += a.T @ a
                self.cross += a.T @ e
            self.energy += e.pow(2).sum(0)
            self.tokens += len(a)
        if not (torch.isfinite(self.cross).all() and torch.isfinite(self.energy).all()):
            raise Diverged("The calibration activations hold NaN or infinity, so nothing can be fitted to them.")

    def solve(self, ridge: float) -> Tensor:
        """Return the change that minimizes the penalized error, (I [+ 1], O) in float64."""
        system = self.system(ridge)
        diagonal = system.diagonal()
        # The system is singular if a unit never fires, or at ridge 0 with fewer samples than units.
        floor = 1e-12 * float(diagonal.mean()) or 1.0
        for attempt in range(6):
            factor, failed = torch.linalg.cholesky_ex(system)
            if not failed:
                return torch.cholesky_solve(self.cross, factor)
            diagonal += floor * 100**attempt
        raise Diverged("The normal equations of a refit have no solution in float64.")

    def system(self, ridge: float) -> Tensor:
        """Return the sums of products plus the penalty, (I [+ 1], I [+ 1]) in float64. The constant has no penalty."""
        system = self.gram.clone()
        system.diagonal()[: self.inputs] += ridge * float(self.gram.diagonal()[: self.inputs].mean())
        return system

    def error(self, change: Tensor | None = None) -> float:
        """Return the sum of w |D a + d - E|^2, outputs weighted by `worth`, for a change (none: D = 0); at least 0."""
        error = self.energy
        if change is not None:
            change = change.to(self.cross)
            error = error + (self.gram @ change).sub_(self.cross, alpha=2).mul_(change).sum(0)
        return max(0.0, float((error * self.worth).sum()))

    def relative(self, change: Tensor | None = None) -> float:
        """Return the root of the mean error; with weights 1 / |target|^2, the relative error of the hidden state."""
        return sqrt(self.error(change) / self.tokens) if self.tokens else 0.0


@dataclass(frozen=True)
class Refit:
    """A change of one projection and its record. `weight` (O, I) and `bias` (O,) are to be added; None means no change.
    `before` is the guard's error without it.
    """

    weight: Tensor | None
    bias: Tensor | None
    before: float
    record: ProjectionRefit


def refit(fit: NormalEquations, guard: NormalEquations, ridges: Sequence[float] = RIDGES) -> Refit:
    """Return the ridge with the smallest guard error, and its change; none if the error falls by less than
    `LEAST_GAIN`.
    """
    before, after, ridge, best = guard.relative(), inf, None, None
    tried = {}
    for weaker in sorted(ridges, reverse=True):
        change = fit.solve(weaker)
        now = guard.relative(change)
        tried[f"{weaker:g}"] = round(now, 6)
        if now > after:
            break  # a weaker ridge only overfits more
        if now < after:
            after, ridge, best = now, weaker, change
    kept = best is not None and after < before * (1 - LEAST_GAIN)
    if not kept:
        ridge, after, best = None, before, None
    errors = (round(error, 6) for error in (before, after, fit.relative(best)))
    record = ProjectionRefit(kept, ridge, *errors, fit.tokens, tried)
    weight = best[: fit.inputs].T.float().contiguous() if kept else None
    bias = best[fit.inputs].float() if kept and fit.constant else None
    return Refit(weight, bias, before, record)


def relative_weights(target_NO: Tensor) -> Tensor:
    """Return 1 / |target|^2 for every token (N,), 0 where the target is zero."""
    square = target_NO.double().pow(2).sum(-1)
    return torch.where(square > 0, 1 / square.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
