"""Kappa against closed forms, numpy's SVD and attention computed by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.model import Loaded, load
from leansurgeon.errors import Diverged, LeanSurgeonError
from leansurgeon.measure.kappa.blocks import measure_blocks
from leansurgeon.measure.kappa.figures import summarise
from leansurgeon.measure.kappa.spectrum import _by_lapack, _by_torch, conditioning, spectrum
from tests import conftest

F64 = torch.float64


def prescribed(sigma: torch.Tensor, n: int, m: int, seed: int = 0) -> torch.Tensor:
    """An (n, m) matrix with exactly these singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = min(n, m)
    u = torch.linalg.qr(torch.randn(n, k, dtype=F64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(m, k, dtype=F64, generator=generator))[0]
    return u * sigma @ v.T


def kappa(block: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    return conditioning(block[None], None if mask is None else mask[None])[0].kappa


@pytest.mark.parametrize(("n", "m"), [(128, 96), (96, 128), (64, 64)])
@pytest.mark.parametrize("true", [10.0, 1e5, 9e5, 1e9])
def test_prescribed_spectrum(n: int, m: int, true: float) -> None:
    """Below 1e6 by the Gram matrix, above by the SVD; near 1e6 the Gram loses far less than fp32 storage does."""
    sigma = torch.logspace(0, -math.log10(true), min(n, m), dtype=F64)
    block = prescribed(sigma, n, m)
    exact = 1e-5 if 1e5 < true < 1e6 else 1e-6
    assert kappa(block) == pytest.approx(true, rel=exact)
    torch.testing.assert_close(spectrum(block[None])[0], sigma, rtol=exact, atol=0)


@pytest.mark.parametrize("m", [24, 96], ids=["more tokens than columns", "more columns than tokens"])
def test_pad_rows_change_nothing(m: int) -> None:
    """Whatever stands in pad rows, NaN too, and wherever they stand."""
    torch.manual_seed(2)
    lengths = (40, 7, 23)
    block = torch.randn(3, 40, m, dtype=F64)
    block[1, 1] = block[1, 0]  # without full rank: how much noise there is depends on the real tokens
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    block[~mask] = math.nan
    shuffled = torch.randperm(40)
    for padded, real in ((block, mask), (block[:, shuffled], mask[:, shuffled])):
        for found, row, n in zip(conditioning(padded, real), block, lengths, strict=True):
            cropped = conditioning(row[None, :n])[0]
            for key, value in vars(cropped).items():
                assert getattr(found, key) == pytest.approx(value, rel=1e-9), key


@pytest.mark.parametrize("way", [_by_lapack, _by_torch])
@pytest.mark.parametrize("shape", [(30, 20), (20, 30)], ids=["more tokens than columns", "more columns than tokens"])
def test_all_statistics_against_numpy(shape, way, monkeypatch) -> None:
    """One reduction for both spectra on the host, and two on a GPU."""
    monkeypatch.setattr("leansurgeon.measure.kappa.spectrum._by_lapack", way)
    torch.manual_seed(3)
    block = torch.randn(*shape, dtype=F64) + 2.0
    a = block.numpy()
    sigma = np.linalg.svd(a, compute_uv=False)
    centred = np.linalg.svd(a - a.mean(0), compute_uv=False)
    share = sigma / sigma.sum()
    found = conditioning(block[None])[0]
    assert found.kappa == pytest.approx(np.linalg.cond(a))
    assert found.centred == pytest.approx(centred[0] / centred[min(shape[0] - 1, shape[1]) - 1])
    assert found.stable_rank == pytest.approx(np.linalg.norm(a) ** 2 / sigma[0] ** 2)
    assert found.effective_rank == pytest.approx(np.exp(-(share * np.log(share)).sum()))


def test_duplicated_token_is_a_missing_rank() -> None:
    torch.manual_seed(4)
    block = torch.randn(1, 197, 768)
    block[:, 100] = block[:, 3]
    found = conditioning(block)[0]
    assert (found.rank, found.k, found.kappa) == (196, 197, math.inf)
    assert 1e6 < found.bound < 1e9  # what fp32 can tell, not the 1e16 of rounding
    assert found.centred == math.inf and 1e6 < found.centred_bound < 1e9
    wide = 1 + 1e-3 * block.double()  # nearly one direction: rounding of the spectrum is all that fp64 has of noise
    assert [conditioning(x)[0].rank for x in (wide, wide.mT)] == [196, 196]
    layer = summarise([found, *conditioning(torch.randn(2, 197, 768))], 1)
    assert (layer["rank"], layer["k"], layer["deficient"], layer["worst"]) == (196, 197, 1, None)
    assert layer["lower_bound"] == found.bound
    assert layer["mean"] == pytest.approx(3.0, abs=0.2)  # of the two others
    assert layer["median"] == pytest.approx(3.0, abs=0.2) and layer["median_lower_bound"] is None


def test_single_token_zero_block_and_empty_sample() -> None:
    assert kappa(torch.ones(1, 8)) == pytest.approx(1)
    assert math.isnan(conditioning(torch.ones(1, 1, 8))[0].centred)
    dead = conditioning(torch.zeros(1, 4, 8))[0]
    assert (dead.rank, dead.kappa) == (0, math.inf)
    assert len(conditioning(torch.ones(2, 4, 8), torch.tensor([[True] * 4, [False] * 4]))) == 1


def test_not_finite_is_said() -> None:
    with pytest.raises(Diverged, match="NaN"):
        spectrum(torch.full((1, 3, 4), math.nan))


# -- models ---------------------------------------------------------------------------------------


def mask_of(batch: dict) -> torch.Tensor | None:
    return batch["attention_mask"].bool() if "attention_mask" in batch else None


def by_hand(loaded: Loaded, projection: str, batch: dict) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v of one layer in numpy, from the layer's own input: (batch, tokens, inner)."""
    modules = dict(loaded.model.named_modules())
    block = projection.rsplit("attention.o", 1)[0]
    names = ("q_proj", "k_proj", "v_proj") if f"{block}attention.q_proj" in modules else ("query", "key", "value")
    linears = [next(m for n, m in modules.items() if n.startswith(block) and n.endswith(f".{name}")) for name in names]
    seen = {}
    handle = linears[0].register_forward_pre_hook(lambda _m, args: seen.update(x=args[0]))
    with torch.no_grad():
        loaded.forward(batch)
        handle.remove()
        q, k, v = (linear.double()(seen["x"].double()).unflatten(-1, (4, 8)).transpose(1, 2) for linear in linears)
        for linear in linears:
            linear.float()
    scores = q @ k.mT / np.sqrt(8)
    if "attention_mask" in batch:
        scores = scores.masked_fill(batch["attention_mask"][:, None, None] == 0, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).numpy()


def test_measure_leaves_the_model_as_it_was(tiny) -> None:
    loaded, batch = tiny("vit")
    loaded.model.train()
    loaded.model.vit.embeddings.eval()  # a part that somebody froze
    before = {n: m.training for n, m in loaded.model.named_modules()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure_blocks(loaded, [batch, batch], mask_of, samples=4)
    assert (found["samples"], found["tokens"], found["forward_dtype"]) == (4, 4 * 17, "float32")
    with pytest.raises(LeanSurgeonError, match=r"\[3, 16\].*\[3, 17\]"):
        measure_blocks(loaded, [batch], lambda b: torch.ones(3, 16, dtype=torch.bool), samples=3)
    with pytest.raises(LeanSurgeonError, match=r"\bKappa\b.*\bone sample\b"):
        measure_blocks(loaded, [], mask_of, samples=3)
    assert {n: m.training for n, m in loaded.model.named_modules()} == before
    assert not any(m._forward_pre_hooks for m in loaded.model.modules())


@pytest.fixture
def tiny(tmp_path):
    """A family's tiny model of two layers, loaded from a folder as every command does, and one batch for it."""

    def make(family: str) -> tuple[Loaded, dict]:
        conftest.build(family, num_hidden_layers=2).save_pretrained(tmp_path)
        loaded = load(tmp_path)
        batch = conftest.example(loaded.model)
        if family == "bert":
            batch["attention_mask"][1, 5:] = 0
        return loaded, batch

    return make


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_blocks_and_what_they_add_are_those_by_hand(family, tiny) -> None:
    loaded, batch = tiny(family)
    found = measure_blocks(loaded, [batch], mask_of, samples=3)
    mask = batch["attention_mask"].bool().numpy() if family == "bert" else np.ones((3, 17), bool)
    assert found["tokens"] == mask.sum() and found["forward_dtype"] == "float32"
    for layer, name in zip(found["layers"], loaded.projections, strict=True):
        weight = loaded.model.get_submodule(name).weight.detach().double().numpy()
        blocks = [block[real] for block, real in zip(by_hand(loaded, name, batch), mask, strict=True)]
        values = [np.linalg.cond(block) for block in blocks]
        assert layer["median"] == pytest.approx(np.median(values), rel=1e-3)
        assert layer["mean"] == pytest.approx(np.mean(values), rel=1e-3)
        assert layer["geometric_mean"] == pytest.approx(np.exp(np.log(values).mean()), rel=1e-3)
        assert layer["worst"] == pytest.approx(max(values), rel=1e-3)
        # No bias: what a block adds without it.
        added = [np.linalg.svd(block @ weight.T, compute_uv=False)[: min(block.shape)] for block in blocks]
        assert layer["output"]["median"] == pytest.approx(np.median([s[0] / s[-1] for s in added]), rel=1e-3)
    assert found["model"]["worst"] == max(layer["median"] for layer in found["layers"])
    json.dumps(found, allow_nan=False)


def test_every_projection_has_its_own_mask(tiny) -> None:
    """As an encoder and a decoder have."""
    loaded, batch = tiny("bert")
    other = torch.arange(12).expand(3, 12) < 9
    masks = [mask_of(batch), other]
    found = measure_blocks(loaded, [batch], lambda _: masks, samples=3)
    for layer, name, mask in zip(found["layers"], loaded.projections, masks, strict=True):
        blocks = [a[m.numpy()] for a, m in zip(by_hand(loaded, name, batch), mask, strict=True)]
        assert layer["median"] == pytest.approx(np.median([np.linalg.cond(a) for a in blocks]), rel=1e-3)
