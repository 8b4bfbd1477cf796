"""Lower bound of the condition number of an attention block's Jacobian, by Jacobian-vector products.

J is the derivative of the block's output (behind W_o, before the residual sum) by its input (what q, k and v read,
behind the norm), for one sample of n real tokens: a matrix of n * width columns. It is a property of the function: a
change of basis within a head does not alter it. It is too large to be formed, so it is examined through P probes.

The estimator: for P orthonormal directions V of the input, J V is computed column by column, exactly up to the
forward's own precision, by forward-mode differentiation, and

    kappa(J V) = sigma_1(J V) / sigma_P(J V)  <=  kappa(J)

since restricting a matrix to a subspace can neither raise its largest singular value nor lower its smallest. Random
directions would show little (of 32 among thousands, kappa(J V) is about 2 whatever J is), so each direction is J^T J
times the previous one, orthogonalized against all before (Lanczos): these find the largest singular value within a few
percent and approach the small ones, without necessarily finding them. So it is a lower bound, comparable only between
blocks with equal P and similar n and width. With P = n * width it is kappa(J) itself (`exact`).

All layers share the passes: tangents (and gradients) enter and leave at the projections of each layer. Letters: n real
tokens, D width, P probes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from leansurgeon.checkpoints.model import Loaded
from leansurgeon.hooks import Hooks
from leansurgeon.measure.costs.precision import at_rest
from leansurgeon.measure.data.batches import Batch, first_rows, rows_of, some_rows
from leansurgeon.measure.kappa.blocks import Mask, TokenMask, of_layer
from leansurgeon.measure.kappa.spectrum import kappa_above, noise_floor
from leansurgeon.measure.kappa.weights import AttentionModule
from leansurgeon.reading.jsonfile import JsonObject

PROBES, SAMPLES = 16, 2
ROUNDING = 8.0  # errors of a forward relative to those of storing its result, a generous estimate
EXHAUSTED = 1e-5  # a remainder this small of a direction is rounding: earlier directions span it
Attentions = dict[int, AttentionModule]  # by layer


def jacobian(
    loaded: Loaded,
    modules: list[AttentionModule | None],
    batches: Iterable[Batch],
    token_mask: TokenMask,
    *,
    samples: int = SAMPLES,
    probes: int = PROBES,
) -> list[JsonObject | None]:
    """Return, for every attention, the median over `samples` samples of kappa(J V) with at most `probes` probes:
    `{"at_least": x, "exact": False, "probes": 16, "columns": 151296, "samples": 2}`. None if queries, keys and values
    read different inputs (cross-attention), if tokens are split into windows, or if the model uses functions without a
    forward-mode derivative.
    """
    device = next(loaded.model.parameters()).device
    attentions = {layer: attention for layer, attention in enumerate(modules) if attention is not None}
    rows = {layer: [] for layer in attentions}
    taken = 0
    quiet = sdpa_kernel(SDPBackend.MATH)  # fused kernels have no forward mode
    with torch.no_grad(), at_rest(loaded.model, device), quiet:
        for batch in batches:
            for i in range(min(rows_of(batch), samples - taken)):
                one = first_rows(some_rows(batch, slice(i, i + 1)), 1, device)
                for layer, values in _one_sample(loaded, attentions, one, token_mask(one), probes).items():
                    rows[layer].append(values)
                taken += 1
    found = [None for _ in modules]
    for layer, values in rows.items():
        if values:
            kappas, sizes, exact = zip(*values, strict=True)
            columns, known = min(sizes), {"at_least": median(kappas), "exact": all(exact)}
            found[layer] = known | {"probes": min(probes, columns), "columns": columns, "samples": len(values)}
    return found


def _one_sample(
    loaded: Loaded, attentions: Attentions, one: Batch, mask: Mask, probes: int
) -> dict[int, tuple[float, int, bool]]:
    """Return (kappa(J V), columns of J, whether it is kappa(J)) for every layer that supports it, on one sample."""
    inputs, outputs = _record(loaded, attentions, one)
    generator = torch.Generator().manual_seed(0)  # the same start for every model of this size: paired
    real = {layer: _real(x, of_layer(mask, layer)) for layer, x in inputs.items()}
    columns = {layer: len(at) * inputs[layer].shape[-1] for layer, at in real.items()}
    bases = {layer: [] for layer in inputs}  # V and J V, each a list of (n * D,)
    images = {layer: [] for layer in inputs}
    nexts = {layer: torch.randn(size, generator=generator, dtype=torch.float64) for layer, size in columns.items()}
    for turn in range(probes):
        live = [layer for layer in inputs if turn < columns[layer]]
        if not live:
            break
        for layer in live:
            bases[layer].append(_direction(nexts[layer], bases[layer], generator))
        pushed = _push(loaded, attentions, one, {n: _whole(bases[n][-1], inputs[n], real[n]) for n in live})
        if pushed is None:
            return {}
        for layer in live:
            images[layer].append(pushed[layer][0, real[layer]].flatten().double().cpu())
        back = {n: _whole(images[n][-1], outputs[n], real[n]) for n in live}
        # One graph serves all probes: only backward is recomputed.
        pulled = torch.autograd.grad(
            [outputs[n] for n in live], [inputs[n] for n in live], list(back.values()), retain_graph=True
        )
        nexts = {n: g[0, real[n]].flatten().double().cpu() for n, g in zip(live, pulled, strict=True)}
    found = {}
    for layer, whole in columns.items():
        images_PM = torch.stack(images[layer])
        sigma = torch.linalg.svdvals(images_PM)
        floor = ROUNDING * noise_floor(sigma, *images_PM.shape, torch.finfo(outputs[layer].dtype).eps)
        value, bound, rank = kappa_above(sigma, len(sigma), floor)
        full = rank == len(sigma)  # otherwise rounding hides the smallest value, and only a bound is known
        found[layer] = (value if full else bound), whole, full and len(sigma) == whole
    return found


def _real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the positions of the real tokens: (n,)."""
    return torch.arange(x.shape[1], device=x.device) if mask is None else mask[0].to(x.device).nonzero()[:, 0]


def _whole(values: Tensor, like: Tensor, real: Tensor) -> Tensor:
    """Scatter a flat direction (n * D,) to the positions of the real tokens: (1, N, D)."""
    whole = torch.zeros_like(like)
    whole[0, real] = values.reshape(len(real), -1).to(like)
    return whole


def _direction(wanted: Tensor, before: list[Tensor], generator: torch.Generator) -> Tensor:
    """Return the normalized part of `wanted` orthogonal to the directions `before`; a random one if nothing is left."""
    while True:
        left = wanted.clone()
        for _ in range(2):  # twice is enough (Kahan, Parlett)
            if before:
                basis = torch.stack(before)
                left -= basis.T @ (basis @ left)
        if left.norm() > EXHAUSTED * wanted.norm():
            return left / left.norm()
        wanted = torch.randn(len(wanted), generator=generator, dtype=torch.float64)


# -- the two ends of every attention: its readers (q, k, v) and its output projection --------------------------------


def _record(loaded: Loaded, attentions: Attentions, one: Batch) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Record input and output (1, N, D) of every attention whose readers share one input, with a graph of their own."""
    seen = {}
    outputs = {}

    def enter(layer: int, x: Tensor) -> Tensor:
        if layer not in seen:
            plain = x.dim() == 3 and x.shape[0] == 1
            seen[layer] = (x.data_ptr(), x.detach().requires_grad_() if plain else None)
        address, leaf = seen[layer]
        if leaf is None or address != x.data_ptr():
            seen[layer] = (address, None)
            return x
        return leaf

    def leave(layer: int, out: Tensor) -> Tensor:
        outputs.setdefault(layer, out)
        return out.detach()

    with torch.enable_grad(), _hook_attentions(loaded, attentions, enter, leave):
        loaded.forward(one)
    inputs = {n: leaf for n, (_, leaf) in seen.items() if leaf is not None and n in outputs}
    alike = {n: x for n, x in inputs.items() if outputs[n].requires_grad and outputs[n].shape[:2] == x.shape[:2]}
    return alike, {n: outputs[n] for n in alike}


def _push(loaded: Loaded, attentions: Attentions, one: Batch, tangents: dict[int, Tensor]) -> dict[int, Tensor] | None:
    """Return J times a tangent (1, N, D) for every layer; None if a function has no forward-mode derivative."""
    pushed = {}

    def enter(layer: int, x: Tensor) -> Tensor:
        return forward_ad.make_dual(x, tangents[layer]) if layer in tangents else x

    def leave(layer: int, out: Tensor) -> Tensor:
        primal, tangent = forward_ad.unpack_dual(out)
        if layer in tangents:
            pushed.setdefault(layer, torch.zeros_like(primal) if tangent is None else tangent)
        return primal

    try:
        with warnings.catch_warnings(), forward_ad.dual_level(), _hook_attentions(loaded, attentions, enter, leave):
            warnings.simplefilter("ignore", FutureWarning)  # torch's own derivative rules raise these
            loaded.forward(one)
    except (NotImplementedError, RuntimeError) as error:
        if "forward AD" in str(error) or "forward mode AD" in str(error):
            return None
        raise
    return pushed


@contextmanager
def _hook_attentions(
    loaded: Loaded,
    attentions: Attentions,
    enter: Callable[[int, Tensor], Tensor],
    leave: Callable[[int, Tensor], Tensor],
) -> Iterator[None]:
    module_of = loaded.model.get_submodule
    with Hooks() as hooks:
        for layer, attention in attentions.items():
            for name in dict.fromkeys(attention.readers):
                hooks.before(module_of(name), lambda _, args, n=layer: (enter(n, args[0]), *args[1:]))
            hooks.after(module_of(attention.projection), lambda _, _args, out, n=layer: leave(n, out))
        yield
