"""What a change of basis cannot move, against exact Jacobians, numpy's condition numbers, and a change of basis."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.measure.kappa.jacobian import jacobian
from leansurgeon.measure.kappa.study import measure_invariants
from leansurgeon.measure.kappa.weights import find_attentions, of_matrix, over_heads, weights
from tests import conftest
from tests.measure.test_importance import loaded_of

F64 = torch.float64


@pytest.fixture
def tiny(tmp_path):
    """A family's tiny model in fp64, loaded from a folder as every command does, and one batch for it."""

    def make(family: str, **changes):
        conftest.build(family, **changes).save_pretrained(tmp_path / family)
        found = load(tmp_path / family)
        found.model.double()
        batch = conftest.example(found.model)
        return found, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}

    return make


def mask_of(batch: dict) -> torch.Tensor | None:
    return batch["attention_mask"].bool() if "attention_mask" in batch else None


def exact_jacobian(loaded, batch: dict, layer: int, real: torch.Tensor | None = None) -> torch.Tensor:
    """d output / d input of one attention on the first sample, by autograd, row by row."""
    part = find_attentions(loaded)[layer]
    one = {k: v[:1] for k, v in batch.items()}
    readers = [loaded.model.get_submodule(name) for name in part.readers]
    seen = {}
    handle = readers[0].register_forward_pre_hook(lambda _m, args: seen.update(x=args[0].detach()))
    loaded.forward(one)
    handle.remove()

    def block(x: torch.Tensor) -> torch.Tensor:
        hooks = [r.register_forward_pre_hook(lambda _m, args: (x, *args[1:])) for r in readers]
        hooks.append(
            loaded.model.get_submodule(part.projection).register_forward_hook(lambda _m, _a, out: seen.update(y=out))
        )
        try:
            loaded.forward(one)
        finally:
            for hook in hooks:
                hook.remove()
        return seen["y"]

    whole = torch.autograd.functional.jacobian(block, seen["x"])[0, :, :, 0]  # (N, D, N, D)
    if real is not None:
        whole = whole[real][:, :, real]
    rows = whole.shape[0] * whole.shape[1]
    return whole.reshape(rows, rows)


SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_jacobian_is_exact_with_all_probes_and_a_lower_bound_with_fewer(family, tiny) -> None:
    loaded, batch = tiny(family, **SMALL, **({"image_size": 4, "head_dim": 4} if family == "vit" else {}))
    real = None
    if family == "bert":  # two of twelve tokens are padding: neither turned nor looked at
        batch["attention_mask"][0, 5:] = 0
        real = torch.arange(5)
    parts = find_attentions(loaded)
    truth = [np.linalg.cond(exact_jacobian(loaded, batch, layer, real).numpy()) for layer in range(2)]
    columns = 5 * 8
    found = jacobian(loaded, parts, [batch], mask_of, samples=1, probes=1_000)
    for row, true in zip(found, truth, strict=True):
        assert row["exact"] and row["probes"] == row["columns"] == columns
        assert row["at_least"] == pytest.approx(true, rel=1e-6)
    each = [
        [row["at_least"] for row in jacobian(loaded, parts, [one], mask_of, samples=1, probes=8)]
        for one in ({k: v[i : i + 1] for k, v in batch.items()} for i in range(3))
    ]
    for samples in (2, 3):
        rows = jacobian(loaded, parts, [batch], mask_of, samples=samples, probes=8)
        assert [row["samples"] for row in rows] == [samples, samples]
        assert [row["columns"] for row in rows] == [columns, columns]  # of the shortest sample
        assert [row["at_least"] for row in rows] == pytest.approx(list(np.median(each[:samples], 0)), rel=1e-4)
    before = [0.0, 0.0]
    for probes in (4, 8, 16):
        rows = jacobian(loaded, parts, [batch], mask_of, samples=1, probes=probes)
        now = [row["at_least"] for row in rows]
        assert not any(row["exact"] for row in rows)
        assert all(a < b <= true * (1 + 1e-9) for a, b, true in zip(before, now, truth, strict=True))
        before = now


def test_a_jacobian_without_full_rank_has_a_bound_that_json_can_hold(tiny) -> None:
    """With the values of one of two heads gone, at most half of the 40 directions can be told apart behind W_o."""
    loaded, batch = tiny("vit", **SMALL, image_size=4, head_dim=4)
    parts = find_attentions(loaded)
    for part in parts:
        loaded.model.get_submodule(part.projection).weight.data[:, 4:] = 0
    for row in jacobian(loaded, parts, [batch], mask_of, samples=1, probes=40):
        assert not row["exact"] and 1e6 < row["at_least"] < 1e20
        json.dumps(row, allow_nan=False)


def test_it_is_exact_where_all_samples_are_and_every_layer_has_its_mask(tiny) -> None:
    """40 probes are all directions of five tokens and not of twelve."""
    loaded, batch = tiny("bert", **SMALL)
    batch["attention_mask"][0, 5:] = 0
    parts = find_attentions(loaded)
    for samples in (1, 2):
        rows = jacobian(loaded, parts, [batch], mask_of, samples=samples, probes=40)
        assert [row["exact"] for row in rows] == [samples == 1] * 2
    rows = jacobian(loaded, parts, [batch], lambda one: [mask_of(one), None], samples=1, probes=2)
    assert [row["columns"] for row in rows] == [5 * 8, 12 * 8]


def test_few_samples_of_all_batches_are_probed_and_every_layer_has_its_own_weights(tiny) -> None:
    """Of 9 samples in batches of 2, 4 and 3 the middles of two halves: the third and the seventh."""
    loaded, _ = tiny("vit", **SMALL, image_size=4, head_dim=4)
    images = torch.randn(9, 1, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(3))
    batches = [{"pixel_values": part} for part in images.split([2, 4, 3])]
    found = measure_invariants(loaded, batches, mask_of, 9, probes=8)["layers"]
    middles = [{"pixel_values": images[[2, 6]]}]
    assert [layer["jacobian"] for layer in found] == jacobian(
        loaded, find_attentions(loaded), middles, mask_of, probes=8
    )
    for layer, name in zip(found, loaded.projections, strict=True):
        weight = loaded.model.get_submodule(name).weight.detach().numpy()
        assert layer["weights"]["o"]["value"] == pytest.approx(np.linalg.cond(weight), rel=1e-5)


def test_directions_are_found_that_chance_would_miss(tiny) -> None:
    """8 random directions of 40 see less of the exact Jacobian than those of the estimator, in each of 100 draws."""
    loaded, batch = tiny("vit", **SMALL, image_size=4, head_dim=4)
    rows = jacobian(loaded, find_attentions(loaded), [batch], mask_of, samples=1, probes=8)
    rng = np.random.default_rng(0)
    for layer, row in enumerate(rows):
        exact = exact_jacobian(loaded, batch, layer).numpy()
        chance = [np.linalg.cond(exact @ np.linalg.qr(rng.normal(size=(40, 8)))[0]) for _ in range(100)]
        assert row["at_least"] > max(chance)


def test_jacobian_in_fp32_is_that_in_fp64(tiny) -> None:
    loaded, batch = tiny("vit", **SMALL, image_size=4, head_dim=4)
    wide = jacobian(loaded, find_attentions(loaded), [batch], mask_of, samples=2, probes=40)
    loaded.model.float()
    narrow = jacobian(
        loaded, find_attentions(loaded), [{k: v.float() for k, v in batch.items()}], mask_of, samples=2, probes=40
    )
    for a, b in zip(wide, narrow, strict=True):
        assert a["at_least"] == pytest.approx(b["at_least"], rel=1e-2)


def another_basis(loaded, worst: float) -> None:
    """W_v -> R W_v, W_o -> W_o R^-1 and W_q -> S W_q, W_k -> S^-T W_k in every head; kappa(R) = kappa(S) = worst."""
    generator = torch.Generator().manual_seed(1)

    def random_basis(d: int) -> torch.Tensor:
        u, v = (torch.linalg.qr(torch.randn(d, d, dtype=F64, generator=generator))[0] for _ in range(2))
        return u * torch.logspace(0, np.log10(worst), d, dtype=F64) @ v

    for part in find_attentions(loaded):
        modules = {s.role: loaded.model.get_submodule(n.rpartition(".")[0]) for n, s in part.tensors.items()}
        d, heads = part.stage.head_dim, part.stage.heads
        r = torch.block_diag(*(random_basis(d) for _ in range(heads)))
        s = torch.block_diag(*(random_basis(d) for _ in range(heads)))
        for role, turn in (("v", r), ("q", s), ("k", torch.linalg.inv(s).T)):
            modules[role].weight.data.copy_(turn @ modules[role].weight.data)
            modules[role].bias.data.copy_(turn @ modules[role].bias.data)
        modules["o"].weight.data.copy_(modules["o"].weight.data @ torch.linalg.inv(r))


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_a_change_of_basis_moves_raw_kappa_and_nothing_that_is_called_invariant(family, tiny) -> None:
    loaded, batch = tiny(family)
    with torch.no_grad():
        told = loaded.forward(batch)
    before = measure_invariants(loaded, [batch], mask_of, 3, probes=8)
    another_basis(loaded, 30.0)
    after = measure_invariants(loaded, [batch], mask_of, 3, probes=8)
    with torch.no_grad():
        torch.testing.assert_close(loaded.forward(batch), told, rtol=1e-8, atol=1e-8)  # the model is what it was
    for one, other in zip(before["layers"], after["layers"], strict=True):
        assert abs(np.log(other["median"] / one["median"])) > np.log(1.2)
        for letter in "qkvo":
            assert other["weights"][letter]["value"] != pytest.approx(one["weights"][letter]["value"], rel=0.05)
        assert other["output"]["median"] == pytest.approx(one["output"]["median"], rel=1e-6)
        assert other["jacobian"]["at_least"] == pytest.approx(one["jacobian"]["at_least"], rel=1e-6)
        for product in ("vo", "qk"):
            for key in ("value", "worst"):
                assert other["weights"][product][key] == pytest.approx(one["weights"][product][key], rel=1e-6)
    json.dumps([before, after], allow_nan=False)


def numpy_kappa(matrix: np.ndarray, k: int | None = None) -> float:
    sigma = np.linalg.svd(matrix, compute_uv=False)
    return sigma[0] / sigma[(k or len(sigma)) - 1]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gpt_neox"])
def test_weights_against_numpy(family, tiny) -> None:
    """Linear, GPT-2's transposed and stacked Conv1D, grouped values, and GPT-NeoX's q, k and v head by head."""
    loaded, _ = tiny(family)
    state = {k: v.numpy() for k, v in loaded.model.state_dict().items()}
    heads, groups = (4, 2) if family == "llama" else (4, 4)

    def one(ending: str) -> np.ndarray:
        return next(v for k, v in state.items() if k.endswith(ending) and (".0." in k))

    if family == "bert":
        q, k, v = (one(f"attention.self.{x}.weight") for x in ("query", "key", "value"))
        o = one("attention.output.dense.weight")
    elif family == "gpt2":
        q, k, v = np.split(one("attn.c_attn.weight").T, 3)
        o = one("attn.c_proj.weight").T
    elif family == "llama":
        q, k, v, o = (one(f"self_attn.{x}_proj.weight") for x in "qkvo")
    else:
        stacked = one("attention.query_key_value.weight").reshape(4, 3, 8, 32)
        q, k, v = (stacked[:, i].reshape(32, 32) for i in range(3))
        o = one("attention.dense.weight")
    d = q.shape[0] // heads
    found = weights(loaded, find_attentions(loaded))[0]
    for name, matrix in (("q", q), ("k", k), ("v", v), ("o", o)):
        assert found[name]["value"] == pytest.approx(numpy_kappa(matrix), rel=1e-6), name
    q, k, v = (x.reshape(-1, d, x.shape[1]) for x in (q, k, v))
    shared = heads // groups
    vo = [numpy_kappa(o[:, h * d : (h + 1) * d] @ v[h // shared], d) for h in range(heads)]
    qk = [numpy_kappa(q[h].T @ k[h // shared], d) for h in range(heads)]
    for name, values in (("vo", vo), ("qk", qk)):
        assert found[name]["value"] == pytest.approx(np.median(values), rel=1e-6)
        assert found[name]["worst"] == pytest.approx(max(values), rel=1e-6)


def test_stages_of_other_sizes_have_weights_of_their_own() -> None:
    """A Swin, whose four stages have heads of 8, 16, 16 and 32; the fused q, k and v taken apart by hand."""
    loaded, _ = loaded_of("timm swin")
    found = weights(loaded, find_attentions(loaded))
    for name, layer in zip(loaded.projections, found, strict=True):
        attention = loaded.model.get_submodule(name.rpartition(".")[0])
        heads = attention.num_heads
        _, _, v = attention.qkv.weight.detach().numpy().reshape(3, heads, -1, attention.qkv.in_features)
        out = attention.proj.weight.detach().numpy().reshape(attention.proj.out_features, heads, -1)
        sigmas = [np.linalg.svd(out[:, h] @ v[h], compute_uv=False) for h in range(heads)]
        kappas = [s[0] / s[min(v.shape[1], len(s)) - 1] for s in sigmas]
        assert layer["vo"]["value"] == pytest.approx(np.median(kappas), rel=1e-6)
        assert layer["o"]["value"] == pytest.approx(np.linalg.cond(attention.proj.weight.detach().numpy()), rel=1e-6)


def test_an_encoder_without_its_head_has_weights_under_shorter_names(tmp_path) -> None:
    model = conftest.build("bert")
    model.bert.save_pretrained(tmp_path / "bare")
    loaded = load(tmp_path / "bare")
    for row, layer in zip(weights(loaded, find_attentions(loaded)), model.bert.encoder.layer, strict=True):
        assert row["q"]["value"] == pytest.approx(np.linalg.cond(layer.attention.self.query.weight.detach().double()))


def test_what_storing_weights_in_fp32_hides_is_no_figure() -> None:
    """Singular values from 1 to 1e-10, stored in fp32: what is read for the last is rounding, and so is its kappa."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(64, 64)))[0] for _ in range(2))
    values = np.logspace(0, -10, 64)
    stored = ((u * values) @ v).astype(np.float32).astype(np.float64)
    value, bound = of_matrix(stored)
    assert 1e7 < np.linalg.cond(stored) < value == np.inf and 1e5 < bound < 1e8
    found = over_heads((u * values)[None, :, ::4], v[None, ::4])  # one head of 16 values
    assert found["value"] is None and found["deficient"] == 1 and 1e5 < found["lower_bound"] < 1e9


def test_a_silent_head_is_counted_and_no_number(tiny) -> None:
    loaded, _ = tiny("bert")
    part = find_attentions(loaded)[0]
    loaded.model.get_submodule(part.projection).weight.data[:, :8] = 0
    found = weights(loaded, find_attentions(loaded))[0]
    assert (found["vo"]["deficient"], found["vo"]["worst"]) == (1, None) and found["vo"]["value"] > 1
    assert found["o"]["value"] is None and found["o"]["lower_bound"] > 1e5
    values = loaded.model.get_submodule(part.readers[-1]).weight.data  # head 3 says one thing twice, but for rounding
    values[17] = values[16] * (1 + 1e-9)
    assert weights(loaded, find_attentions(loaded))[0]["vo"]["deficient"] == 2
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("inner", [32, 8], ids=["as wide as the model", "8 of 32, fewer than tokens"])
def test_output_is_the_block_behind_the_projection_without_its_bias(inner, tiny) -> None:
    loaded, batch = tiny("vit", head_dim=inner // 4)
    seen = []
    module = loaded.model.get_submodule(loaded.projections[1])
    handle = module.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
    measured = measure_invariants(loaded, [batch], mask_of, 3, probes=0)
    handle.remove()
    assert measured["tokens"] == 3 * 17
    found = measured["layers"][1]
    blocks = [a @ module.weight.detach().T for a in seen[0]]
    k = min(17, inner)  # more values than the inner width has cannot differ from zero
    sigmas = [np.linalg.svd(b.numpy(), compute_uv=False) for b in blocks]
    assert found["output"]["k"] == found["output"]["rank"] == k
    assert found["output"]["median"] == pytest.approx(np.median([s[0] / s[k - 1] for s in sigmas]), rel=1e-6)
    assert found["jacobian"] is None


def test_cross_attention_and_windows_have_no_jacobian_of_one_input(tiny) -> None:
    loaded, batch = tiny("t5")
    found = jacobian(loaded, find_attentions(loaded), [batch], lambda b: None, samples=1, probes=4)
    alone = ["EncDecAttention" not in name for name in loaded.projections]
    assert [row is not None for row in found] == alone and not all(alone)
