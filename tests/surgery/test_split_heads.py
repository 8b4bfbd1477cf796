"""More heads from those that are there: exact forms against the libraries' own modules, near ones against theory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from leansurgeon.shape import Stage
from leansurgeon.surgery import split_factors, split_heads
from leansurgeon.surgery.canonical import Attention
from leansurgeon.surgery.split_factors import Torch, parts, refit_output, score_moments, some


def attention(
    heads: int,
    head_dim: int,
    width: int,
    seed: int = 0,
    *,
    bias: bool = True,
    rank: int = 0,
) -> Attention:
    """Random; with `rank` every head's score form has that rank."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (draw.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    q, k = 2 * normal(heads, head_dim, width), 2 * normal(heads, head_dim, width)
    q_bias = normal(heads, head_dim) if bias else None
    if rank:
        mix = normal(heads, head_dim, rank) @ normal(heads, rank, head_dim)
        q = mix @ q
        q_bias = None if q_bias is None else (mix @ q_bias[..., None])[..., 0]
    return Attention(
        q=q,
        k=k,
        v=normal(heads, head_dim, width),
        o=normal(width, heads, head_dim),
        q_bias=q_bias,
        k_bias=normal(heads, head_dim) if bias else None,
        v_bias=normal(heads, head_dim) if bias else None,
        o_bias=normal(width) if bias else None,
    )


def stage(heads: int, head_dim: int, width: int) -> Stage:
    return Stage(1, heads, head_dim, heads, 8, width)


def coloured(count: int, batch: int, tokens: int, width: int, seed: int = 0) -> list[torch.Tensor]:
    """Batches of tokens whose covariance is far from white, with a mean."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) * torch.logspace(0, -1.5, width)
    return [torch.randn(batch, tokens, width, generator=generator) @ mix.T / 2 + mix[:, 0] / 2 for _ in range(count)]


def runner(a: Attention, causal: bool = False) -> Torch:
    """An attention of a library that takes the scale of scores from head_dim."""
    return Torch.of(a, a.head_dim**-0.5, causal)


def every(x: torch.Tensor) -> torch.Tensor:
    """A mask of real tokens alone."""
    return torch.ones(x.shape[:2], dtype=torch.bool)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# -- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [(8, 8), (12, 8), (8, 12), (4, 12)], ids=str)  # the last two: head_dim grows
@pytest.mark.parametrize("causal", [False, True])
def test_exact_split_is_the_parent(after: tuple[int, int], causal: bool) -> None:
    old = attention(4, 8, 20)
    new = split_heads.exact(old, stage(*after, 20), (after[1] / 8) ** 0.5)
    assert new.q.shape == new.k.shape == (*after, 20)
    x, mask = coloured(1, 3, 7, 20)[0], torch.ones(3, 7, dtype=torch.bool)
    mask[0, 5:] = False
    truth = runner(old, causal=causal).output(x, mask)
    assert relative(runner(new, causal=causal).output(x, mask), truth) < 1e-6
    owners = (new.o != 0).any(0).sum()  # every column of the output projection has one owner
    assert owners == 4 * 8


def test_runner_is_torchs_own_attention() -> None:
    """What the other tests compare with is itself compared, with `nn.MultiheadAttention`."""
    old, x = attention(4, 5, 20), coloured(1, 2, 6, 20)[0]
    theirs = torch.nn.MultiheadAttention(20, 4, batch_first=True)
    flat = [torch.from_numpy(w.reshape(20, 20)) for w in (old.q, old.k, old.v)]
    biases = [torch.from_numpy(b.reshape(20)) for b in (old.q_bias, old.k_bias, old.v_bias)]
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat(flat)), theirs.in_proj_bias.copy_(torch.cat(biases))
        theirs.out_proj.weight.copy_(torch.from_numpy(old.o.reshape(20, 20)))
        theirs.out_proj.bias.copy_(torch.from_numpy(old.o_bias))
        mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
        truth = theirs(x, x, x, key_padding_mask=~mask)[0]
        ahead = torch.ones(6, 6, dtype=torch.bool).triu(1)
        causal = theirs(x, x, x, attn_mask=ahead)[0]
    assert relative(runner(old).output(x, mask), truth) < 1e-6
    assert relative(runner(old, causal=True).output(x, every(x)), causal) < 1e-6


def test_children_differ_in_their_gradients() -> None:
    new = split_heads.exact(attention(2, 8, 20), stage(4, 8, 20), 1.0)
    assert np.array_equal(new.q[0], new.q[1]) and not (new.o[:, 0] * new.o[:, 1]).any()


# -- at equal parameters --------------------------------------------------------------------------


def divided(old: Attention, inputs, masks, after: Stage, *, causal=False, targets_BTW=None, ridge=0.1):
    """A calibrated split in a library that takes the scale of scores from head_dim."""
    scales = {"score_scale": old.head_dim**-0.5, "gain": (after.head_dim / old.head_dim) ** 0.5}
    return split_heads.activation_aware(
        old, inputs, masks, after, causal=causal, targets_BTW=targets_BTW, ridge=ridge, **scales
    )


def blind(old: Attention, after: Stage) -> Attention:
    """The same without data."""
    return split_heads.weights_only(old, after, (after.head_dim / old.head_dim) ** 0.5)


@pytest.mark.parametrize("children, causal, bias", [(2, False, True), (4, True, False)], ids=str)
def test_a_form_of_small_rank_is_found_exactly(children: int, causal: bool, bias: bool) -> None:
    """Score forms of rank head_dim / children can be split without loss, whatever the data."""
    rank = 16 // children
    old = attention(3, 16, 40, rank=rank, bias=bias)
    after = stage(3 * children, rank, 40)
    x = coloured(5, 4, 12, 40)
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[1, 9:] = False
    new, numbers = divided(old, x, [mask] * 5, after, causal=causal)
    assert new.q.shape == (3 * children, rank, 40) and (new.q_bias is not None) is bias
    fresh = coloured(1, 4, 12, 40, seed=9)[0]
    found, truth = (runner(a, causal=causal).output(fresh, mask) for a in (new, old))
    assert relative(found, truth) < 1e-4
    assert numbers.kept == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_few_batches_guard_on_other_samples_than_they_fit(batches: int, monkeypatch) -> None:
    old, x = attention(2, 16, 40), coloured(batches, 6, 12, 40)
    mask = torch.ones(6, 12, dtype=torch.bool)
    mask[1, 9:] = False
    seen = {}
    for name, inputs, chosen in (("refit_output", 2, 5), ("error", 1, 4)):
        real = getattr(split_factors, name)

        def spied(*given, name=name, real=real, inputs=inputs, chosen=chosen):
            seen[name] = [given[inputs][i] for i in given[chosen]]
            return real(*given)

        monkeypatch.setattr(split_factors, name, spied)
    divided(old, x, [mask] * batches, stage(4, 8, 40))
    fit, guard = (torch.cat(seen[name]).flatten(1) for name in ("refit_output", "error"))
    assert len(fit) + len(guard) == 6 * batches
    assert not (fit[:, None] == guard).all(-1).any()


def test_data_helps() -> None:
    """On inputs that are not white: calibrated < weights alone, all below the config edit."""
    old, after = attention(4, 16, 64, seed=3), stage(8, 8, 64)
    x = coloured(10, 4, 16, 64)
    held = coloured(12, 4, 16, 64)[10:]
    truth = [runner(old).output(b, every(b)) for b in held]

    def error(new: Attention) -> float:
        return relative(torch.cat([runner(new).output(b, every(b)) for b in held]), torch.cat(truth))

    parts = [np.ascontiguousarray(w.reshape(8, 8, 64)) for w in (old.q, old.k, old.v)]
    biases = {n: getattr(old, n).reshape(8, 8) for n in ("q_bias", "k_bias", "v_bias")}
    naive = Attention(*parts, o=old.o.reshape(64, 8, 8), **biases, o_bias=old.o_bias)
    plain, numbers = divided(old, x, [None] * 10, after, ridge=None)
    full, healed = divided(old, x, [None] * 10, after)
    errors = [error(a) for a in (plain, blind(old, after), naive)]
    assert errors == sorted(errors) and errors[0] < 0.7 * errors[1], errors
    assert numbers.error_refit is None and numbers.refitted is None
    assert healed.refitted is (healed.error_refit < healed.error_split)
    assert error(full) <= error(plain)


@pytest.mark.parametrize("children", [2, 3])
def test_children_of_weights_alone_mean_the_parent(children: int) -> None:
    """Up to the parts that rank leaves out, the mean of the children's score forms is the parent's."""
    rank = 12 // children
    old = attention(2, 12, 30, rank=rank // 2 + children * (rank // 2), bias=False)
    new = blind(old, stage(2 * children, rank, 30))
    truth = np.einsum("hda,hdb->hab", old.q, old.k) / np.sqrt(12)
    forms = np.einsum("hda,hdb->hab", new.q, new.k) / np.sqrt(rank)
    assert np.allclose(forms.reshape(2, children, 30, 30).mean(1), truth, atol=1e-5)
    assert np.linalg.matrix_rank(forms[0] - forms[1], tol=1e-4) == 2 * (rank // 2)


def test_key_moment_is_the_first_order_output_error() -> None:
    """`tr(dM^T Ck dM q q^T)` against the output's change for a small change of the form, by finite differences."""
    old, x = attention(1, 6, 12, seed=5), coloured(1, 1, 5, 12)
    _, c_key = score_moments(runner(old), x, [every(x[0])], 1)
    change = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    step = 1e-3
    moved = replace(old, k=old.k + step * (change @ old.k[0])[None], k_bias=old.k_bias + step * old.k_bias @ change.T)
    delta = (
        (runner(moved).output(x[0], every(x[0])) - runner(old).output(x[0], every(x[0]))).double() / step * np.sqrt(6)
    )
    run = runner(old)
    q, k, v = run.project(x[0])
    a = run.weights(q, k, every(x[0]))
    total = 0.0
    for i in range(5):
        u = sum(
            float(a[0, 0, i, j]) * torch.outer(run.o[0].T @ (v[0, 0, j] - (a @ v)[0, 0, i]), k[0, 0, j])
            for j in range(5)
        )
        row = u.numpy() @ change.T @ q[0, 0, i].numpy()
        assert np.allclose(row, delta[0, i].numpy(), rtol=0.02, atol=0.02 * np.abs(row).max())
        total = total + (u.T @ u).double().numpy()
    centred = k[0, 0] - k[0, 0].mean(0)
    plain = (centred.T @ centred).double().numpy()
    wanted = total / np.trace(total) + 1e-3 * plain / np.trace(plain)
    assert np.allclose(c_key[0, 0], wanted, atol=1e-5)


def test_refit_is_ridge_regression() -> None:
    """Against scikit-learn's Ridge on what is missing."""
    from sklearn.linear_model import Ridge

    old = attention(2, 4, 10)
    run, x = runner(old), coloured(3, 4, 9, 10)
    targets = [torch.randn(4, 9, 10, generator=torch.Generator().manual_seed(b)) for b in range(3)]
    new = refit_output(old, run, x, targets.__getitem__, [every(b) for b in x], [0, 1, 2], 0.1)
    context = torch.cat([run.context(b, every(b)).flatten(0, 1) for b in x]).double().numpy()
    missing = (
        torch.cat([(t - run.output(b, every(b))).flatten(0, 1) for t, b in zip(targets, x, strict=True)])
        .double()
        .numpy()
    )
    # Ours leaves the bias unpenalised, as theirs does by centring.
    theirs = Ridge(alpha=0.1 * np.square(context).sum(0).mean()).fit(context, missing)
    assert np.allclose((new.o - old.o).reshape(10, -1), theirs.coef_, atol=1e-4)
    assert np.allclose(new.o_bias - old.o_bias, theirs.intercept_, atol=1e-4)


def test_uneven_children_hold_all_values() -> None:
    """Head_dim 10 among 3 children of 4: slices of 4, 3 and 3 values."""
    old = attention(2, 10, 30, rank=4)
    x = coloured(5, 4, 12, 30)
    new, _ = divided(old, x, [None] * 5, stage(6, 4, 30))
    assert new.v.shape == (6, 4, 30)
    assert relative(runner(new).output(x[0], every(x[0])), runner(old).output(x[0], every(x[0]))) < 1e-4


def test_a_refit_that_does_not_help_is_kept_out() -> None:
    """Targets of the fitted batches have nothing to do with those of the guard."""
    old = attention(2, 8, 20, rank=4)
    x = coloured(5, 4, 6, 20)
    true = [runner(old).output(b, every(b)) for b in x]
    targets = [-t for t in true[:4]] + true[4:]
    new, numbers = divided(old, x, [None] * 5, stage(4, 4, 20), targets_BTW=targets)
    assert numbers.refitted is False and numbers.error_refit > numbers.error_split
    assert np.array_equal(np.sort(new.o.ravel()), np.sort(old.o.ravel()))


def test_moments_do_not_see_what_all_keys_share() -> None:
    """A constant on all keys moves every score of a query alike, which its softmax does not see."""
    old, x = attention(2, 8, 20), coloured(3, 4, 6, 20)
    moved = replace(old, k_bias=old.k_bias + 3.0)
    of_keys = [score_moments(runner(a), x, [every(b) for b in x], 2)[1] for a in (old, moved)]
    assert np.allclose(*of_keys, rtol=0, atol=1e-4 * float(np.abs(of_keys[0]).max()))


def test_pieces_hold_as_much_as_memory_allows_and_a_few_batches_stand_for_many(monkeypatch) -> None:
    x = coloured(6, 4, 5, 20)
    masks = [every(b) for b in x]
    monkeypatch.setattr(split_factors, "MEMORY", 2 * (2 * 5 * 5))
    pieces = list(parts(x[:1], masks[:1], heads=2))
    assert [len(part) for part, _ in pieces] == [2, 2] and torch.equal(torch.cat([p for p, _ in pieces]), x[0])
    monkeypatch.setattr(split_factors, "MEMORY", 1)
    assert len(list(parts(x[:1], masks[:1], heads=2))) == 4  # a row at a time where even one is too much
    assert len(some(x, [None] * 6)[0]) == 6
    monkeypatch.setattr(split_factors, "ENOUGH", 2 * 4 * 5)
    few, masks = some(x, [None] * 6)
    assert [torch.equal(a, b) for a, b in zip(few, (x[0], x[3]), strict=True)] == [True, True] and masks == [None] * 2
    monkeypatch.setattr(split_factors, "ENOUGH", 1)
    assert len(some(x, [None] * 6)[0]) == 1
