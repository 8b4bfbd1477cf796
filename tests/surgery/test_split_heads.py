"""More heads from those that are there: exact forms against the libraries' own modules, near ones against theory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from leansurgeon.shape import Stage
from leansurgeon.surgery import split_heads
from leansurgeon.surgery.canonical import Attention
from leansurgeon.surgery.split_factors import Torch, refit_output, score_moments


def attention(heads: int, head_dim: int, width: int, *, bias: bool = True, rank: int = 0) -> Attention:
    """Random; with `rank` every head's score form has that rank."""
    draws = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (draws.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    q, k, v = (normal(heads, head_dim, width) for _ in range(3))
    biases = [normal(heads, head_dim) for _ in range(3)] if bias else [None] * 3
    if rank:
        mix = normal(heads, head_dim, rank) @ normal(heads, rank, head_dim)
        q = mix @ q
        biases[0] = (mix @ biases[0][..., None])[..., 0] if bias else None
    return Attention(2 * q, 2 * k, v, normal(width, heads, head_dim), *biases, normal(width) if bias else None)


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


def masked(batch: int, tokens: int) -> torch.Tensor:
    """A mask with some padding in the second row."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[1, tokens - 3 :] = False
    return mask


# -- exact ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_runner_is_torchs_own_attention():
    """What the other tests compare with is itself compared, with `nn.MultiheadAttention`."""
    old, x = attention(4, 5, 20), coloured(1, 2, 6, 20)[0]
    theirs = torch.nn.MultiheadAttention(20, 4, batch_first=True)
    packed = np.concatenate([old.q, old.k, old.v]).reshape(60, 20)
    biases = np.concatenate([old.q_bias, old.k_bias, old.v_bias]).reshape(60)
    state = {"in_proj_weight": packed, "in_proj_bias": biases}
    state |= {"out_proj.weight": old.o.reshape(20, 20), "out_proj.bias": old.o_bias}
    theirs.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()})
    mask = masked(2, 6)
    truth = theirs(x, x, x, key_padding_mask=~mask)[0]
    causal = theirs(x, x, x, attn_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))[0]
    assert relative(runner(old).output(x, mask), truth) < 1e-6
    assert relative(runner(old, causal=True).output(x, every(x)), causal) < 1e-6


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


@pytest.mark.parametrize(
    "head_dim, children, rank, causal, bias",
    [(16, 2, 8, False, True), (16, 4, 4, True, False), (10, 3, 4, False, True)],  # the last: slices of 4, 3 and 3
    ids=str,
)
def test_a_form_of_small_rank_is_found_exactly(head_dim, children, rank, causal, bias):
    """Score forms of the rank that a child has can be split without loss, whatever the data."""
    old = attention(3, head_dim, 40, rank=rank, bias=bias)
    x, mask, after = coloured(5, 4, 12, 40), masked(4, 12), stage(3 * children, rank, 40)
    new, numbers = divided(old, x, [mask] * 5, after, causal=causal)
    assert new.q.shape == (3 * children, rank, 40) and (new.q_bias is not None) is bias
    fresh = coloured(1, 4, 12, 40, seed=9)[0]
    found, truth = (runner(a, causal).output(fresh, mask) for a in (new, old))
    assert relative(found, truth) < 1e-4
    assert numbers.kept == pytest.approx(1.0, abs=1e-6)


def test_data_helps():
    """On inputs that are not white: with a refit <= calibrated < by the weights alone < by the config alone."""
    old, after = attention(4, 16, 64), stage(8, 8, 64)
    x = coloured(12, 8, 16, 64)
    held = torch.cat(x[10:])

    def error(new: Attention) -> float:
        return relative(*(runner(a).output(held, every(held)) for a in (new, old)))

    parts = [np.ascontiguousarray(w.reshape(8, 8, 64)) for w in (old.q, old.k, old.v)]
    biases = [b.reshape(8, 8) for b in (old.q_bias, old.k_bias, old.v_bias)]
    naive = Attention(*parts, old.o.reshape(64, 8, 8), *biases, old.o_bias)
    plain, numbers = divided(old, x[:10], [None] * 10, after, ridge=None)
    full, healed = divided(old, x[:10], [None] * 10, after)
    errors = [error(a) for a in (plain, blind(old, after), naive)]
    assert errors == sorted(errors) and errors[0] < 0.7 * errors[1], errors
    assert numbers.error_refit is None and numbers.refitted is None
    assert healed.refitted and healed.error_refit < healed.error_split
    assert error(full) < error(plain)


@pytest.mark.parametrize("children", [2, 3])
def test_children_of_weights_alone_mean_the_parent(children: int):
    """Up to the parts that rank leaves out, the mean of the children's score forms is the parent's."""
    rank = 12 // children
    old = attention(2, 12, 30, rank=rank // 2 + children * (rank // 2), bias=False)
    new = blind(old, stage(2 * children, rank, 30))
    truth = np.einsum("hda,hdb->hab", old.q, old.k) / np.sqrt(12)
    forms = np.einsum("hda,hdb->hab", new.q, new.k) / np.sqrt(rank)
    assert np.allclose(forms.reshape(2, children, 30, 30).mean(1), truth, atol=1e-5)
    assert np.linalg.matrix_rank(forms[0] - forms[1], tol=1e-4) == 2 * (rank // 2)


def test_key_moment_is_the_first_order_output_error():
    """Its quadratic form is the output's squared change for a small change of the score form, by finite differences."""
    old, x = attention(1, 6, 12), coloured(1, 1, 5, 12)
    run, mask, step = runner(old), every(x[0]), 1e-3
    _, found = score_moments(run, x, [mask], 1)
    q, k, _ = (part[0, 0].double() for part in run.project(x[0]))
    # A change of one row of keys by a row of another is one entry of the form: q_a k_b.
    columns = []
    for b in range(6):
        change = np.zeros((6, 6), np.float32)
        change[:, b] = 1.0  # every q_a meets k_b
        moved = replace(
            old, k=old.k + step * (change @ old.k[0])[None], k_bias=old.k_bias + step * old.k_bias @ change.T
        )
        delta = (runner(moved).output(x[0], mask) - run.output(x[0], mask))[0].double() / step * np.sqrt(6)
        columns.append(delta / q.sum(1, keepdim=True))
    effect = torch.stack(columns)  # (6, tokens, width): what k_b says where its query is one
    total = torch.einsum("atw,btw->ab", effect, effect)
    centred = k - k.mean(0)
    plain = centred.T @ centred
    expected = total / total.trace() + 1e-3 * plain / plain.trace()
    assert np.allclose(found[0, 0], expected.numpy(), atol=0.01)


def test_a_refit_that_does_not_help_is_kept_out():
    """Targets of the fitted batches have nothing to do with those of the guard."""
    old = attention(2, 8, 20, rank=4)
    x = coloured(5, 4, 6, 20)
    true = [runner(old).output(b, every(b)) for b in x]
    targets = [-t for t in true[:4]] + true[4:]
    new, numbers = divided(old, x, [None] * 5, stage(4, 4, 20), targets_BTW=targets)
    assert numbers.refitted is False and numbers.error_refit > numbers.error_split
    assert np.array_equal(np.sort(new.o.ravel()), np.sort(old.o.ravel()))


def test_refit_is_ridge_regression() -> None:
    """Against scikit-learn's Ridge on what is missing."""
    old = attention(2, 4, 10)
    run, x = runner(old), torch.cat(coloured(3, 4, 9, 10))
    target = torch.randn(12, 9, 10, generator=torch.Generator().manual_seed(0))
    new = refit_output(old, run, x.split(4), target.split(4).__getitem__, every(x).split(4), [0, 1, 2], 0.1)
    context = run.context(x, every(x)).flatten(0, 1).double().numpy()
    missing = (target - run.output(x, every(x))).flatten(0, 1).double().numpy()
    # Ours leaves the bias unpenalised, as theirs does by centring.
    theirs = Ridge(alpha=0.1 * np.square(context).sum(0).mean()).fit(context, missing)
    assert np.allclose((new.o - old.o).reshape(10, -1), theirs.coef_, atol=1e-4)
    assert np.allclose(new.o_bias - old.o_bias, theirs.intercept_, atol=1e-4)
