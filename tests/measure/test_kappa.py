"""Kappa against closed forms, numpy's SVD and attention computed by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leansurgeon.errors import Diverged, LeanSurgeonError
from leansurgeon.measure.kappa.blocks import measure_blocks
from leansurgeon.measure.kappa.figures import summarise
from leansurgeon.measure.kappa.spectrum import _by_torch, _eigenvalues, _gram, conditioning, noise_floor, spectrum

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
@pytest.mark.parametrize("true", [10.0, 1e3, 1e5, 9e5, 1e7, 1e9])
def test_prescribed_spectrum(n: int, m: int, true: float) -> None:
    """Below 1e6 by the Gram matrix, above by the SVD; near 1e6 the Gram loses far less than fp32 storage does."""
    sigma = torch.logspace(0, -math.log10(true), min(n, m), dtype=F64)
    block = prescribed(sigma, n, m)
    exact = 1e-5 if 1e5 < true < 1e6 else 1e-6
    assert kappa(block) == pytest.approx(true, rel=exact)
    torch.testing.assert_close(spectrum(block[None])[0], sigma, rtol=exact, atol=0)


def test_gaussian_block_follows_theorem_3_2() -> None:
    """(sqrt(768) + sqrt(197)) / (sqrt(768) - sqrt(197)) = 3.05; measured 2.99 elsewhere."""
    torch.manual_seed(0)
    found = conditioning(torch.randn(4, 197, 768))
    assert np.mean([c.kappa for c in found]) == pytest.approx(3.0, abs=0.2)
    assert found[0].k == found[0].rank == 197
    assert found[0].aspect == pytest.approx(768 / 197)


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


def test_all_statistics_against_numpy() -> None:
    torch.manual_seed(3)
    block = torch.randn(30, 20, dtype=F64) + 2.0
    a = block.numpy()
    sigma = np.linalg.svd(a, compute_uv=False)
    centred = np.linalg.svd(a - a.mean(0), compute_uv=False)
    share = sigma / sigma.sum()
    found = conditioning(block[None])[0]
    assert found.kappa == pytest.approx(np.linalg.cond(a))
    assert found.centred == pytest.approx(centred[0] / centred[19])
    assert found.stable_rank == pytest.approx(np.linalg.norm(a) ** 2 / sigma[0] ** 2)
    assert found.effective_rank == pytest.approx(np.exp(-(share * np.log(share)).sum()))


@pytest.mark.parametrize(("n", "m"), [(30, 20), (20, 30), (20, 20), (2, 5), (5, 1)])
@pytest.mark.parametrize("mean", [0.0, 1.0, 300.0], ids=["no mean", "some mean", "nearly all mean"])
def test_both_ways_to_the_spectrum_without_the_mean_against_numpy(n: int, m: int, mean: float) -> None:
    """One reduction for both spectra on the host and two on a GPU, with a pad row in one of the samples."""
    torch.manual_seed(7)
    block = torch.randn(2, n, m, dtype=F64)
    block[0] -= block[0].mean(0)  # its centred matrix is itself
    block += mean
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, 0] = n == 2
    gram = _gram(block, mask)
    with pytest.MonkeyPatch.context() as patch:
        host = _eigenvalues(gram, block, mask, centred=True)
        patch.setattr("leansurgeon.measure.kappa.spectrum._by_lapack", _by_torch)
        gpu = _eigenvalues(gram, block, mask, centred=True)
    for i, rows in enumerate(block):
        real = rows[mask[i]].numpy()
        for which, matrix in enumerate((real, real - real.mean(0))):
            sigma = np.linalg.svd(matrix, compute_uv=False)
            expected = np.zeros(min(n, m))
            expected[: len(sigma)] = sigma**2
            for found in (host, gpu):
                size = np.linalg.norm(real) ** 2
                np.testing.assert_allclose(found[which][i].numpy(), expected, rtol=0, atol=1e-13 * size)


def test_one_thread_holds_for_every_blas() -> None:
    """numpy and scipy bring a BLAS each, and that of scipy is loaded only when it is asked for."""
    code = """if True:
        import torch, threadpoolctl
        from leansurgeon.measure.kappa.spectrum import _blas, conditioning
        conditioning(torch.randn(1, 6, 4))
        libraries = {found["filepath"] for found in threadpoolctl.threadpool_info() if found["user_api"] == "blas"}
        assert libraries == {library.filepath for library in _blas().lib_controllers}, libraries"""
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_noise_floor_predicts_where_half_precision_saturates() -> None:
    """Stored in bf16 or fp16, a kappa of 1e6 reads about 5290 or 3.8e4: sigma_1 over the smallest value of the noise.

    For an i.i.d. 197x768 matrix that is (sqrt(768) - sqrt(197)) / (sqrt(768) + sqrt(197)) of its largest, the floor.
    """
    block = prescribed(torch.logspace(0, -6, 197, dtype=F64), 197, 768)
    smallest = (math.sqrt(768) - math.sqrt(197)) / (math.sqrt(768) + math.sqrt(197))
    for dtype, elsewhere in ((torch.bfloat16, 5290), (torch.float16, 3.8e4)):
        sigma = spectrum(block.to(dtype)[None])[0]
        read = float(sigma[0] / sigma[-1])
        floor = noise_floor(sigma, 197, 768, torch.finfo(dtype).eps)
        assert read == pytest.approx(elsewhere, rel=0.2)
        assert read == pytest.approx(float(sigma[0]) / (floor * smallest), rel=0.3)
        assert conditioning(block.to(dtype)[None])[0].kappa == math.inf  # not the 5290


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


def tiny_vit() -> tuple:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(5)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=8,
        patch_size=2,
        num_channels=1,
        initializer_range=0.2,
    )
    model = ViTForImageClassification(config)
    names = [n for n, _ in model.named_modules() if n.endswith(("attention.o_proj", "attention.output.dense"))]
    batches = [{"pixel_values": torch.randn(3, 1, 8, 8), "labels": torch.zeros(3)} for _ in range(2)]
    return model, names, batches


def tiny_bert() -> tuple:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(6)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    model = BertForSequenceClassification(config)
    names = [n for n, _ in model.named_modules() if n.endswith("attention.output.dense")]
    batch = {"input_ids": torch.randint(1, 50, (3, 12)), "attention_mask": torch.ones(3, 12, dtype=torch.long)}
    batch["attention_mask"][1, 5:] = 0
    return model, names, [batch]


def loaded(model: torch.nn.Module, names: list[str]) -> SimpleNamespace:
    def forward(batch: dict) -> torch.Tensor:
        return model(**{k: v for k, v in batch.items() if k != "labels"}).logits

    return SimpleNamespace(model=model, projections=names, forward=forward)


def mask_of(batch: dict) -> torch.Tensor | None:
    return batch["attention_mask"].bool() if "attention_mask" in batch else None


def by_hand(model: torch.nn.Module, projection: str, batch: dict) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v of one layer in numpy, from the layer's own input: (batch, tokens, inner)."""
    modules = dict(model.named_modules())
    block = projection.rsplit("attention.o", 1)[0]

    def linear(*names: str) -> torch.nn.Module:
        return next(modules[block + name] for name in names if block + name in modules)

    query = linear("attention.q_proj", "attention.self.query")
    seen = {}
    handle = query.register_forward_pre_hook(lambda _m, args: seen.update(x=args[0]))
    with torch.no_grad():
        model(**{k: v for k, v in batch.items() if k != "labels"})
    handle.remove()

    def heads(module: torch.nn.Module) -> np.ndarray:
        out = (
            seen["x"].double().numpy() @ module.weight.detach().double().numpy().T
            + module.bias.detach().double().numpy()
        )
        return out.reshape(*out.shape[:2], 4, 8).transpose(0, 2, 1, 3)

    q, k = heads(query), heads(linear("attention.k_proj", "attention.self.key"))
    v = heads(linear("attention.v_proj", "attention.self.value"))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(8)
    if "attention_mask" in batch:
        scores = np.where(batch["attention_mask"].bool().numpy()[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ v
    return out.transpose(0, 2, 1, 3).reshape(*out.shape[:1], -1, 32)


@pytest.mark.parametrize("make", [tiny_vit, tiny_bert], ids=["vit", "bert"])
def test_measure_equals_attention_by_hand(make) -> None:
    model, names, batches = make()
    assert len(names) == 2
    model.eval()
    found = measure_blocks(loaded(model, names), batches, mask_of, samples=len(batches) * 3)
    for layer, name in zip(found["layers"], names, strict=True):
        values = []
        for batch in batches:
            for i, block in enumerate(by_hand(model, name, batch)):
                real = batch["attention_mask"][i].bool().numpy() if "attention_mask" in batch else slice(None)
                sigma = np.linalg.svd(block[real], compute_uv=False)
                values.append(sigma[0] / sigma[-1])
        assert layer["median"] == pytest.approx(np.median(values), rel=1e-3)
        assert layer["mean"] == pytest.approx(np.mean(values), rel=1e-3)
        assert layer["geometric_mean"] == pytest.approx(np.exp(np.log(values).mean()), rel=1e-3)
        assert layer["worst"] == pytest.approx(max(values), rel=1e-3)
    assert found["model"]["worst"] == max(layer["median"] for layer in found["layers"])
    assert found["forward_dtype"] == "float32"
    json.dumps(found, allow_nan=False)


def test_padding_stays_out_of_what_a_block_adds_and_every_projection_has_its_mask() -> None:
    model, names, [batch] = tiny_bert()
    model.eval()
    with torch.no_grad():
        for name in names:
            model.get_submodule(name).bias.normal_()
    other = torch.ones(3, 12, dtype=torch.bool)
    other[:, 9:] = False
    masks = [mask_of(batch), other]  # as an encoder and a decoder have
    found = measure_blocks(loaded(model, names), [batch], lambda _: masks, samples=3)
    assert found["tokens"] == int(masks[0].sum()) == 29
    for layer, name, mask in zip(found["layers"], names, masks, strict=True):
        weight = model.get_submodule(name).weight.detach().double().numpy()
        blocks = [a[m.numpy()] for a, m in zip(by_hand(model, name, batch), mask, strict=True)]
        assert layer["median"] == pytest.approx(np.median([np.linalg.cond(a) for a in blocks]), rel=1e-3)
        added = [np.linalg.cond(a @ weight.T) for a in blocks]
        assert layer["output"]["median"] == pytest.approx(np.median(added), rel=1e-3)


def test_measure_leaves_the_model_as_it_was() -> None:
    model, names, batches = tiny_vit()
    model.train()
    model.vit.embeddings.eval()  # a part that somebody froze
    before = {n: m.training for n, m in model.named_modules()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure_blocks(loaded(model, names), batches, mask_of, samples=4)
    assert {n: m.training for n, m in model.named_modules()} == before
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert (found["samples"], found["tokens"], found["forward_dtype"]) == (4, 4 * 17, "float32")
    assert found["layers"][0]["layer"] == 1


def test_measure_cleans_up_after_an_error() -> None:
    model, names, batches = tiny_vit()
    model.train()
    wrong = loaded(model, names)
    with pytest.raises(LeanSurgeonError, match=r"\[3, 16\].*\[3, 17\]"):
        measure_blocks(wrong, batches, lambda b: torch.ones(3, 16, dtype=torch.bool), samples=3)
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(LeanSurgeonError, match=r"\bKappa\b.*\bone sample\b"):
        measure_blocks(wrong, [], mask_of, samples=3)


def test_two_inputs_count_once_and_padding_stays_out() -> None:
    """A dual-input model runs each projection twice; the mask is that of the first input."""
    from leansurgeon.models.nystromformer_lra import NystromformerLraConfig, NystromformerLraForSequenceClassification

    torch.manual_seed(7)
    config = NystromformerLraConfig(dual_input=True, num_landmarks=8, initializer_range=0.3)
    model = NystromformerLraForSequenceClassification(config)
    names = [f"encoder.layers.{i}.attention.output" for i in range(2)]
    first = {"input_ids": torch.randint(1, 32, (2, 40)), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    first["attention_mask"][:, 30:] = 0
    found = [
        measure_blocks(
            loaded(model, names), [first | {f"{k}_2": v.flip(0).roll(shift, 1) for k, v in first.items()}], mask_of, 2
        )
        for shift in (0, 3)
    ]
    assert found[0] == found[1]
    assert (found[0]["samples"], found[0]["tokens"], found[0]["layers"][0]["k"]) == (2, 60, 30)


def test_centring_needs_no_svd(monkeypatch) -> None:
    """The dimension that centring takes away is expected; it must not send every sample through the slow way."""
    monkeypatch.setattr(torch.linalg, "svdvals", lambda _: pytest.fail("the SVD was used"))
    assert conditioning(torch.randn(3, 20, 48))[0].centred > 1
    assert conditioning(torch.randn(3, 48, 20))[0].centred > 1
