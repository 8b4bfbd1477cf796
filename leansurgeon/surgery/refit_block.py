"""Heal one filled block: refit its output projections to the teacher's hidden states at the same place. Imports torch.

Two forms, depending on what follows the MLP:

*pre-norm* (`reach` is a factor): the projection adds to the residual stream, so the least-squares target is simply
teacher minus student.

*post-norm* (`closing_norm`): the block's output is LN(r), where the length of r per token is free. A block that
replaces dropped ones gets the closing norm of the last of them. z = (target - beta) / gamma is then the direction that
r must have, and the projection is refitted so that r becomes `std(r) z + mean(r)` in every token, weighted by 1 /
std^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.recorded.decided import BlockRefit, ProjectionRefit
from leansurgeon.surgery import probes as handles
from leansurgeon.surgery import ridge
from leansurgeon.surgery.probes import add_to, flat, inputs_of, way_back

POST_RIDGES = (0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Samples:
    """Hidden states of one part of the calibration data: the student's stream with its position, the teacher's hidden
    states that the block should output (`target`), and which tokens are real.
    """

    stream: Stream
    hidden: list[Tensor]
    target: list[Tensor]
    masks: Sequence[Tensor | None]

    def __len__(self) -> int:
        return len(self.hidden)


@dataclass(frozen=True)
class BlockFit:
    """A filled block `layer` of the skeleton that `fit` and `guard` run through."""

    layer: int
    fit: Samples
    guard: Samples
    exact: bool = True  # sums of products in float64; else in float32, piece by piece

    def run(self, samples: Samples, b: int) -> Tensor:
        """Return the block's output for batch `b`, without gradients."""
        with torch.no_grad():
            return samples.stream.call(b, samples.hidden[b], self.layer)

    def first(self) -> Tensor:
        """Return the block's output for the first batch of the guard, in fp32: whether a projection reaches it linearly
        depends on small differences, which rounding to bf16 would hide.
        """
        with torch.no_grad():
            return self.guard.stream.call(0, self.guard.hidden[0], self.layer, rounded=False)


@dataclass(frozen=True)
class HealResult:
    """What a refit decided, the guard's error before it, and the block's output on the guard after it, if that had to
    be computed (on the skeleton's home).
    """

    record: BlockRefit
    before: float
    guard: list[Tensor] | None = None


def error(site: BlockFit, samples: Samples, outputs: Sequence[Tensor] | None = None) -> float:
    """Return the root mean square over real tokens of |output - target| / |target|.

    `outputs` are those of the block; if None, it is run.
    """
    total, tokens = 0.0, 0.0
    for b in range(len(samples)):
        out = site.run(samples, b) if outputs is None else outputs[b]
        out, target = (flat(x, samples.masks[b]) for x in (out, samples.target[b].to(out.device)))
        total += float((ridge.relative_weights(target) * (out - target).double().pow(2).sum(1)).sum())
        tokens += len(target)
    return sqrt(total / max(tokens, 1))


def refit_sums(site: BlockFit, samples: Samples, module: nn.Module, scale: Tensor | None) -> ridge.NormalEquations:
    """Return the sums for refitting `module`, whose output reaches the block's output by the factor `scale`. The target
    is the missing part divided by the scale, and errors count by the squared scale. If the path to the block's output
    is no sum (None: post-norm), the target is the present output.
    """
    if scale is None:
        sums = equations(module, handles.weight_of(module).device)
    else:
        sums = equations(module, scale.device, scale.double() ** 2, exact=site.exact)
        safe = torch.where(scale.abs() > 1e-6, scale, torch.inf)
    for b in range(len(samples)):
        with inputs_of(module) as seen:
            out = site.run(samples, b)
        mask = samples.masks[b]
        # In the order of the block's output, unless the library has cut the tokens into windows.
        alike = seen[0][..., 0].numel() == out[..., 0].numel()
        a = flat(seen[0].reshape(*out.shape[:-1], -1) if alike else seen[0], mask)
        if scale is None:
            sums.add(a, a.new_zeros(len(a), sums.cross.shape[1]))
        else:
            goal = flat(samples.target[b].to(out.device), mask)
            sums.add(a, (goal - flat(out, mask)) / safe, ridge.relative_weights(goal))
    return sums


def equations(
    module: nn.Module, device: torch.device, worth: Tensor | None = None, *, exact: bool = True
) -> ridge.NormalEquations:
    """Return empty normal equations for a linear module, with a constant if it has a bias."""
    outputs, inputs = handles.weight_of(module).shape
    constant = module.bias is not None
    return ridge.NormalEquations(inputs, outputs, constant=constant, device=device, worth=worth, exact=exact)


def refit_projection(site: BlockFit, module: nn.Module, scale: Tensor) -> ridge.Refit:
    """Refit one projection of a pre-norm block in place, if the guard improves."""
    refit = ridge.refit(*(refit_sums(site, samples, module, scale) for samples in (site.fit, site.guard)))
    add_to(module, refit.weight, refit.bias)
    return refit


def heal_pre_norm(site: BlockFit, *, attention: bool) -> HealResult | None:
    """Refit the MLP's output (experts stay unchanged), with `attention` after refitting the attention's. Return None
    unless it is a pre-norm block.
    """
    skeleton = site.fit.stream.skeleton
    experts = skeleton.experts(site.layer)
    down = skeleton.mlp_down(site.layer) if experts is None else None
    scale = None if down is None else handles.reach(down, site.first)
    if down is not None and scale is None:
        return None
    record = BlockRefit()
    if attention:
        for module in skeleton.projections(site.layer):
            direct = handles.reach(module, site.first, freeze=experts if down is None else down)
            if direct is not None:
                record = replace(record, o=refit_attention(site, module, direct))
    if down is not None:
        record = replace(record, down=refit_projection(site, down, scale).record)
    # The sums of the first refit hold the block's error before it.
    first = record.o or record.down
    return HealResult(record, first.guard_before) if first else None


def refit_attention(site: BlockFit, module: nn.Module, scale: Tensor) -> ProjectionRefit:
    """Refit an attention's output projection. The sums ignore the MLP's response, so the block is run on the guard."""
    restore = way_back(module)
    refit = refit_projection(site, module, scale)
    record = refit.record
    if record.kept:
        after = error(site, site.guard)
        kept = after < refit.before
        if not kept:
            restore()
        record = replace(record, kept=kept, block_before=round(refit.before, 6), block_after=round(after, 6))
    return record


# -- post-norm ------------------------------------------------------------------------------------


def absorb(site: BlockFit, closing: nn.LayerNorm) -> HealResult | None:
    """Let a post-norm block replace the dropped ones behind it, the last of which has the norm `closing`. Return None
    unless it is a post-norm block; everything is restored if the guard does not improve.
    """
    norm = handles.closing_norm(site.fit.stream.skeleton.block(site.layer), site.first)
    if norm is None:
        return None
    down = site.fit.stream.skeleton.mlp_down(site.layer)
    restore = way_back(norm, down)
    fit, _ = norm_moments(site, site.fit, down, norm, closing)
    guard, plain = norm_moments(site, site.guard, down, norm, closing, outputs=True)
    before = error(site, site.guard, plain)
    norm.weight.data.copy_(closing.weight)
    if norm.bias is not None:
        norm.bias.data.copy_(shift_of(closing))
    refit = ridge.refit(fit, guard, POST_RIDGES)
    add_to(down, refit.weight, refit.bias)
    healed = site.guard.stream.run(site.layer, site.guard.hidden)
    after = error(site, site.guard, healed)
    kept = after < before
    if not kept:
        restore()
    record = BlockRefit(
        down=replace(refit.record, kept=kept and refit.record.kept),
        norm="taken over" if kept else "own",
        block_before=round(before, 6),
        block_after=round(after, 6),
    )
    return HealResult(record, before, healed if kept else plain)


def norm_moments(
    site: BlockFit, samples: Samples, down: nn.Module, norm: nn.Module, closing: nn.LayerNorm, *, outputs: bool = False
) -> tuple[ridge.NormalEquations, list[Tensor]]:
    """Return the sums of the post-norm form (see above), for any norm of the block itself, and on request its
    `outputs`.
    """
    gain, shift, states = closing.weight.detach(), shift_of(closing), []
    sums = equations(down, gain.device, exact=site.exact)
    gain = torch.where(gain.abs() > 1e-6, gain, torch.inf)
    for b in range(len(samples)):
        with inputs_of(down) as seen, inputs_of(norm) as summed:
            out = site.run(samples, b)
        if outputs:
            states.append(out.to(samples.stream.skeleton.home))
        mask = samples.masks[b]
        r = flat(summed[0], mask)
        z = (flat(samples.target[b].to(r.device), mask) - shift) / gain
        std, mean = r.std(1, keepdim=True, correction=0).clamp(min=1e-12), r.mean(1, keepdim=True)
        sums.add(flat(seen[0], mask), std * z + mean - r, 1 / std[:, 0].double().pow(2) / r.shape[1])
    return sums, states


def shift_of(norm: nn.LayerNorm) -> Tensor:
    """Return the shift of a norm; zeros if it has none."""
    return torch.zeros_like(norm.weight.detach()) if norm.bias is None else norm.bias.detach()
