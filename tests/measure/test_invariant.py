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
    projection, seen = loaded.model.get_submodule(part.projection), {}

    def block(x: torch.Tensor | None) -> torch.Tensor:
        """What the attention puts out where its readers are given `x`, or what they would read."""

        def read(_, args):
            seen.setdefault("x", args[0].detach())
            return (args[0] if x is None else x, *args[1:])

        hooks = [reader.register_forward_pre_hook(read) for reader in readers]
        hooks.append(projection.register_forward_hook(lambda _m, _a, out: seen.update(y=out)))
        loaded.forward(one)
        for hook in hooks:
            hook.remove()
        return seen["y"]

    block(None)
    whole = torch.autograd.functional.jacobian(block, seen["x"])[0, :, :, 0]  # (N, D, N, D)
    if real is not None:
        whole = whole[real][:, :, real]
    return whole.flatten(2).flatten(0, 1)


SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_jacobian_is_exact_with_all_probes_and_a_lower_bound_with_fewer(family, tiny) -> None:
    loaded, batch = tiny(family, **SMALL, **({"image_size": 4, "head_dim": 4} if family == "vit" else {}))
    real = None
    if family == "bert":  # seven of twelve tokens are padding: neither turned nor looked at
        batch["attention_mask"][0, 5:] = 0
        real = torch.arange(5)
    parts = find_attentions(loaded)
    truth = [np.linalg.cond(exact_jacobian(loaded, batch, layer, real).numpy()) for layer in range(2)]

    def bounds(batch: dict, samples: int, probes: int) -> list[float]:
        rows = jacobian(loaded, parts, [batch], mask_of, samples=samples, probes=probes)
        assert [row["columns"] for row in rows] == [40, 40]  # 5 x 8, of the shortest sample
        assert {row["exact"] for row in rows} == {probes >= 40}
        return [row["at_least"] for row in rows]

    assert bounds(batch, 1, 1_000) == pytest.approx(truth, rel=1e-6)
    before = [0.0, 0.0]
    for probes in (4, 8, 16):
        now = bounds(batch, 1, probes)
        assert all(a < b <= true * (1 + 1e-9) for a, b, true in zip(before, now, truth, strict=True))
        before = now
    if family == "vit":
        each = [bounds({"pixel_values": image[None]}, 1, 8) for image in batch["pixel_values"]]
        assert bounds(batch, 3, 8) == pytest.approx(list(np.median(each, 0)), rel=1e-4)


def test_a_jacobian_without_full_rank_has_a_bound_that_json_can_hold(tiny) -> None:
    """With the values of one of two heads gone, at most half of the 40 directions can be told apart behind W_o."""
    loaded, batch = tiny("vit", **SMALL, image_size=4, head_dim=4)
    parts = find_attentions(loaded)
    for part in parts:
        loaded.model.get_submodule(part.projection).weight.data[:, 4:] = 0
    for row in jacobian(loaded, parts, [batch], mask_of, samples=1, probes=40):
        assert not row["exact"] and 1e6 < row["at_least"] < 1e20
        json.dumps(row, allow_nan=False)


def test_few_samples_of_all_batches_are_probed(tiny) -> None:
    """Of 9 samples in batches of 2, 4 and 3 the middles of two halves: the third and the seventh."""
    loaded, _ = tiny("vit", **SMALL, image_size=4, head_dim=4)
    images = torch.randn(9, 1, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(3))
    batches = [{"pixel_values": part} for part in images.split([2, 4, 3])]
    found = measure_invariants(loaded, batches, mask_of, 9, probes=8)["layers"]
    middles = [{"pixel_values": images[[2, 6]]}]
    assert [layer["jacobian"] for layer in found] == jacobian(
        loaded, find_attentions(loaded), middles, mask_of, probes=8
    )


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


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gpt_neox"])
def test_weights_against_numpy(family, tiny) -> None:
    """Linear, GPT-2's transposed and stacked Conv1D, grouped values, and GPT-NeoX's q, k and v head by head."""
    loaded, _ = tiny(family)
    state = {k: v.numpy() for k, v in loaded.model.state_dict().items() if ".0." in k}
    groups = 2 if family == "llama" else 4

    def one(ending: str) -> np.ndarray:
        return next(v for k, v in state.items() if k.endswith(ending))

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
    found = weights(loaded, find_attentions(loaded))[0]
    for name, matrix in (("q", q), ("k", k), ("v", v), ("o", o)):
        assert found[name]["value"] == pytest.approx(np.linalg.cond(matrix), rel=1e-6), name
    d = len(q) // 4
    q, k, v = (x.reshape(-1, d, x.shape[1]) for x in (q, k, v))
    of_head = np.arange(4) // (4 // groups)
    products = {
        "vo": [o[:, h * d : (h + 1) * d] @ v[of_head[h]] for h in range(4)],
        "qk": [q[h].T @ k[of_head[h]] for h in range(4)],
    }
    for name, matrices in products.items():
        kappas = [s[0] / s[d - 1] for s in np.linalg.svd(matrices, compute_uv=False)]
        assert found[name]["value"] == pytest.approx(np.median(kappas), rel=1e-6)
        assert found[name]["worst"] == pytest.approx(max(kappas), rel=1e-6)


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


def test_cross_attention_and_windows_have_no_jacobian_of_one_input(tiny) -> None:
    loaded, batch = tiny("t5")
    found = jacobian(loaded, find_attentions(loaded), [batch], lambda b: None, samples=1, probes=4)
    alone = ["EncDecAttention" not in name for name in loaded.projections]
    assert [row is not None for row in found] == alone and not all(alone)


def test_output_has_no_more_values_than_the_inner_width(tiny) -> None:
    """8 of 32, fewer than the 17 tokens; more values cannot differ from zero."""
    loaded, batch = tiny("vit", head_dim=2)
    seen = []
    module = loaded.model.get_submodule(loaded.projections[1])
    handle = module.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
    found = measure_invariants(loaded, [batch], mask_of, 3, probes=0)["layers"][1]
    handle.remove()
    sigmas = np.linalg.svd((seen[0] @ module.weight.detach().T).numpy(), compute_uv=False)
    assert found["output"]["k"] == found["output"]["rank"] == 8 and found["jacobian"] is None
    assert found["output"]["median"] == pytest.approx(np.median(sigmas[:, 0] / sigmas[:, 7]), rel=1e-6)
