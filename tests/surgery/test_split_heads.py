"""More heads from those that are there: exact forms against the libraries' own modules, near ones against theory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.shape import Stage
from leansurgeon.surgery import split_factors, split_heads
from leansurgeon.surgery.canonical import Attention
from leansurgeon.surgery.split_factors import Torch, parts, refit_output, score_moments, some


def attention(
    heads: int,
    head_dim: int,
    width: int,
    kv_heads: int | None = None,
    seed: int = 0,
    *,
    bias: bool = True,
    rank: int = 0,
) -> Attention:
    """Random; with `rank` every head's score form has that rank."""
    draw, kv = np.random.default_rng(seed), kv_heads or heads

    def normal(*shape: int) -> np.ndarray:
        return (draw.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    q, k = 2 * normal(heads, head_dim, width), 2 * normal(kv, head_dim, width)
    q_bias = normal(heads, head_dim) if bias else None
    if rank:
        mix = normal(heads, head_dim, rank) @ normal(heads, rank, head_dim)
        q = mix @ q
        q_bias = None if q_bias is None else (mix @ q_bias[..., None])[..., 0]
    return Attention(
        q=q,
        k=k,
        v=normal(kv, head_dim, width),
        o=normal(width, heads, head_dim),
        q_bias=q_bias,
        k_bias=normal(kv, head_dim) if bias else None,
        v_bias=normal(kv, head_dim) if bias else None,
        o_bias=normal(width) if bias else None,
    )


def stage(heads: int, head_dim: int, width: int, kv_heads: int | None = None) -> Stage:
    return Stage(1, heads, head_dim, kv_heads or heads, 8, width)


def coloured(count: int, batch: int, tokens: int, width: int, seed: int = 0) -> list[torch.Tensor]:
    """Batches of tokens whose covariance is far from white, with a mean."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) * torch.logspace(0, -1.5, width)
    return [torch.randn(batch, tokens, width, generator=generator) @ mix.T / 2 + mix[:, 0] / 2 for _ in range(count)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# -- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads, kv, after",
    [
        (4, 4, (8, 8, 8)),
        (4, 4, (12, 8, 12)),
        (4, 4, (6, 8, 6)),  # two heads have two children, two have one
        (4, 2, (8, 8, 2)),
        (4, 2, (8, 8, 4)),
        (4, 1, (6, 8, 1)),
        (4, 4, (8, 8, 4)),  # plain attention becomes grouped
        (4, 4, (8, 12, 8)),  # head_dim grows
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_exact_split_is_the_parent(heads: int, kv: int, after: tuple[int, int, int], causal: bool) -> None:
    old = attention(heads, 8, 20, kv)
    new = split_heads.exact(old, stage(after[0], after[1], 20, after[2]))
    assert new.q.shape == (after[0], after[1], 20) and new.k.shape == (after[2], after[1], 20)
    x, mask = coloured(1, 3, 7, 20)[0], torch.ones(3, 7, dtype=torch.bool)
    mask[0, 5:] = False
    truth = Torch.of(old, causal=causal).output(x, mask)
    assert relative(Torch.of(new, causal=causal).output(x, mask), truth) < 1e-6
    owners = (new.o != 0).any(0).sum()  # every column of the output projection has one owner
    assert owners == heads * 8


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
    assert relative(Torch.of(old).output(x, mask), truth) < 1e-6
    assert relative(Torch.of(old, causal=True).output(x), causal) < 1e-6


def test_exact_split_in_llama_with_rotary_positions() -> None:
    """Grouped queries in transformers' own Llama: 4 query heads on 2 become 8 on 2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_key_value_heads=2)
    torch.manual_seed(0)
    small = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, head_dim=8, initializer_range=0.3)).eval()
    large = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, head_dim=8)).eval()
    a = small.model.layers[0].self_attn
    q, k, v = (m.weight.detach().numpy().reshape(-1, 8, 32) for m in (a.q_proj, a.k_proj, a.v_proj))
    new = split_heads.exact(
        Attention(q, k, v, a.o_proj.weight.detach().numpy().reshape(32, 4, 8)), stage(8, 8, 32, 2), rotary=True
    )
    state = small.state_dict()
    for name, x in (("q", new.q), ("k", new.k), ("v", new.v)):
        state[f"model.layers.0.self_attn.{name}_proj.weight"] = torch.from_numpy(x.reshape(-1, 32).copy())
    state["model.layers.0.self_attn.o_proj.weight"] = torch.from_numpy(new.o.reshape(32, -1))
    large.load_state_dict(state)
    ids = torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(large(ids).logits, small(ids).logits) < 1e-6


def test_children_differ_in_their_gradients() -> None:
    new = split_heads.exact(attention(2, 8, 20), stage(4, 8, 20))
    assert np.array_equal(new.q[0], new.q[1]) and not (new.o[:, 0] * new.o[:, 1]).any()
    assert np.array_equal(new.o, split_heads.exact(attention(2, 8, 20), stage(4, 8, 20)).o)


@pytest.mark.parametrize(
    "after, rotary, error, says",
    [
        ((2, 8, 2), False, UsageError, "4 heads to 2"),
        ((8, 4, 8), False, UnsupportedModel, "at least 8, and 4"),
        ((8, 16, 8), True, UnsupportedModel, "head_dim 8; 16"),
        ((8, 8, 2), False, UsageError, "8 heads on 2"),
    ],
    ids=str,
)
def test_exact_refusals(after: tuple, rotary: bool, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        split_heads.exact(attention(4, 8, 20), stage(after[0], after[1], 20, after[2]), rotary=rotary)


# -- at equal parameters --------------------------------------------------------------------------


@pytest.mark.parametrize("children, causal, bias", [(2, False, True), (4, True, False)], ids=str)
def test_a_form_of_small_rank_is_found_exactly(children: int, causal: bool, bias: bool) -> None:
    """Score forms of rank head_dim / children can be split without loss, whatever the data."""
    rank = 16 // children
    old = attention(3, 16, 40, rank=rank, bias=bias)
    after = stage(3 * children, rank, 40)
    x = coloured(5, 4, 12, 40)
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[1, 9:] = False
    new, numbers = split_heads.activation_aware(old, x, [mask] * 5, after, causal=causal)
    assert new.q.shape == (3 * children, rank, 40) and (new.q_bias is not None) is bias
    fresh = coloured(1, 4, 12, 40, seed=9)[0]
    found, truth = (Torch.of(a, causal=causal).output(fresh, mask) for a in (new, old))
    assert relative(found, truth) < 1e-4
    assert numbers["kept"] == pytest.approx(1.0, abs=1e-6)


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
    split_heads.activation_aware(old, x, [mask] * batches, stage(4, 8, 40))
    fit, guard = (torch.cat(seen[name]).flatten(1) for name in ("refit_output", "error"))
    assert len(fit) + len(guard) == 6 * batches
    assert not (fit[:, None] == guard).all(-1).any()


def test_data_helps() -> None:
    """On inputs that are not white: calibrated < weights alone, all below the config edit."""
    old, after = attention(4, 16, 64, seed=3), stage(8, 8, 64)
    x = coloured(10, 4, 16, 64)
    held = coloured(12, 4, 16, 64)[10:]
    truth = [Torch.of(old).output(b) for b in held]

    def error(new: Attention) -> float:
        return relative(torch.cat([Torch.of(new).output(b) for b in held]), torch.cat(truth))

    parts = [np.ascontiguousarray(w.reshape(8, 8, 64)) for w in (old.q, old.k, old.v)]
    biases = {n: getattr(old, n).reshape(8, 8) for n in ("q_bias", "k_bias", "v_bias")}
    naive = Attention(*parts, o=old.o.reshape(64, 8, 8), **biases, o_bias=old.o_bias)
    plain, numbers = split_heads.activation_aware(old, x, [None] * 10, after, ridge=None)
    full, healed = split_heads.activation_aware(old, x, [None] * 10, after)
    errors = [error(a) for a in (plain, split_heads.weights_only(old, after), naive)]
    assert errors == sorted(errors) and errors[0] < 0.7 * errors[1], errors
    assert set(numbers) == {"kept", "error_split"}
    assert healed["refitted"] is (healed["error_refit"] < healed["error_split"])
    assert error(full) <= error(plain)


@pytest.mark.parametrize("children", [2, 3])
def test_children_of_weights_alone_mean_the_parent(children: int) -> None:
    """Up to the parts that rank leaves out, the mean of the children's score forms is the parent's."""
    rank = 12 // children
    old = attention(2, 12, 30, rank=rank // 2 + children * (rank // 2), bias=False)
    new = split_heads.weights_only(old, stage(2 * children, rank, 30))
    truth = np.einsum("hda,hdb->hab", old.q, old.k) / np.sqrt(12)
    forms = np.einsum("hda,hdb->hab", new.q, new.k) / np.sqrt(rank)
    assert np.allclose(forms.reshape(2, children, 30, 30).mean(1), truth, atol=1e-5)
    assert np.linalg.matrix_rank(forms[0] - forms[1], tol=1e-4) == 2 * (rank // 2)


def test_key_moment_is_the_first_order_output_error() -> None:
    """`tr(dM^T Ck dM q q^T)` against the output's change for a small change of the form, by finite differences."""
    old, x = attention(1, 6, 12, seed=5), coloured(1, 1, 5, 12)
    _, c_key = score_moments(Torch.of(old), x, [None], 1)
    change = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    step = 1e-3
    moved = replace(old, k=old.k + step * (change @ old.k[0])[None], k_bias=old.k_bias + step * old.k_bias @ change.T)
    delta = (Torch.of(moved).output(x[0]) - Torch.of(old).output(x[0])).double() / step * np.sqrt(6)
    runner = Torch.of(old)
    q, k, v = runner.project(x[0])
    a = runner.weights(q, k, None)
    total = 0.0
    for i in range(5):
        u = sum(
            float(a[0, 0, i, j]) * torch.outer(runner.o[0].T @ (v[0, 0, j] - (a @ v)[0, 0, i]), k[0, 0, j])
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
    runner, x = Torch.of(old), coloured(3, 4, 9, 10)
    targets = [torch.randn(4, 9, 10, generator=torch.Generator().manual_seed(b)) for b in range(3)]
    new = refit_output(old, runner, x, targets.__getitem__, [None] * 3, [0, 1, 2], 0.1)
    context = torch.cat([runner.context(b, None).flatten(0, 1) for b in x]).double().numpy()
    missing = (
        torch.cat([(t - runner.output(b)).flatten(0, 1) for t, b in zip(targets, x, strict=True)]).double().numpy()
    )
    # Ours leaves the bias unpenalised, as theirs does by centring.
    theirs = Ridge(alpha=0.1 * np.square(context).sum(0).mean()).fit(context, missing)
    assert np.allclose((new.o - old.o).reshape(10, -1), theirs.coef_, atol=1e-4)
    assert np.allclose(new.o_bias - old.o_bias, theirs.intercept_, atol=1e-4)


def test_uneven_children_hold_all_values() -> None:
    """Head_dim 10 among 3 children of 4: slices of 4, 3 and 3 values."""
    old = attention(2, 10, 30, rank=4)
    x = coloured(5, 4, 12, 30)
    new, _ = split_heads.activation_aware(old, x, [None] * 5, stage(6, 4, 30))
    assert new.v.shape == (6, 4, 30)
    assert relative(Torch.of(new).output(x[0]), Torch.of(old).output(x[0])) < 1e-4


def test_a_refit_that_does_not_help_is_kept_out() -> None:
    """Targets of the fitted batches have nothing to do with those of the guard."""
    old = attention(2, 8, 20, rank=4)
    x = coloured(5, 4, 6, 20)
    true = [Torch.of(old).output(b) for b in x]
    targets = [-t for t in true[:4]] + true[4:]
    new, numbers = split_heads.activation_aware(old, x, [None] * 5, stage(4, 4, 20), targets_BTW=targets)
    assert numbers["refitted"] is False and numbers["error_refit"] > numbers["error_split"]
    assert np.array_equal(np.sort(new.o.ravel()), np.sort(old.o.ravel()))


@pytest.mark.parametrize(
    "kv, after, rotary, error, says",
    [
        (4, (8, 4, 8), True, UnsupportedModel, "--head-dim 8"),
        (2, (8, 4, 2), False, UnsupportedModel, "share 2 key/value heads"),
        (4, (6, 4, 6), False, UsageError, "nearest: 4, 8"),
        (4, (8, 3, 8), False, UsageError, "the least is 4"),
    ],
    ids=str,
)
def test_refusals(kv: int, after: tuple, rotary: bool, error: type, says: str) -> None:
    old, new = attention(4, 8, 20, kv), stage(after[0], after[1], 20, after[2])
    calls = [lambda: split_heads.weights_only(old, new, rotary=rotary)]
    if not rotary:  # refused by the plan
        calls.append(lambda: split_heads.activation_aware(old, coloured(1, 1, 2, 20), [None], new))
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        assert says in str(caught.value)


def test_moments_do_not_see_what_all_keys_share() -> None:
    """A constant on all keys moves every score of a query alike, which its softmax does not see."""
    old, x = attention(2, 8, 20), coloured(3, 4, 6, 20)
    moved = replace(old, k_bias=old.k_bias + 3.0)
    of_keys = [score_moments(Torch.of(a), x, [None] * 3, 2)[1] for a in (old, moved)]
    assert np.allclose(*of_keys, rtol=0, atol=1e-4 * float(np.abs(of_keys[0]).max()))


def test_pieces_hold_as_much_as_memory_allows_and_a_few_batches_stand_for_many(monkeypatch) -> None:
    x = coloured(6, 4, 5, 20)
    pieces = list(parts(x[:1], [None], heads=2, limit=2 * (2 * 5 * 5)))
    assert [len(part) for part, _ in pieces] == [2, 2] and torch.equal(torch.cat([p for p, _ in pieces]), x[0])
    assert len(list(parts(x[:1], [None], heads=2, limit=1))) == 4  # a row at a time where even one is too much
    assert len(some(x, [None] * 6)[0]) == 6
    monkeypatch.setattr(split_factors, "ENOUGH", 2 * 4 * 5)
    few, masks = some(x, [None] * 6)
    assert [torch.equal(a, b) for a, b in zip(few, (x[0], x[3]), strict=True)] == [True, True] and masks == [None] * 2
    monkeypatch.setattr(split_factors, "ENOUGH", 1)
    assert len(some(x, [None] * 6)[0]) == 1
