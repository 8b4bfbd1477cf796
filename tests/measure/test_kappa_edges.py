"""Kappa where few look: rows and pieces of a batch, samples without full rank; against numpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from leansurgeon.measure.kappa import spectrum
from leansurgeon.measure.kappa.blocks import measure_blocks
from leansurgeon.models.nystromformer_lra import NystromformerLraConfig, NystromformerLraForSequenceClassification


class Crops(nn.Module):
    """Runs its projection on the batch and, in the same call, on other rows behind it, as models with crops do."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(inner, width)
        self.precisions: list[str] = []

    def forward(self, x):
        self.precisions.append(torch.get_float32_matmul_precision())
        return self.projection(torch.cat([x, x.flip(1) ** 3]))[: len(x)]


def test_rows_of_the_batch_in_full_precision_and_tokens_that_are_more_than_columns():
    torch.manual_seed(0)
    model = Crops(4, 6)
    loaded = SimpleNamespace(model=model, projections=["projection"], forward=lambda batch: model(batch["x"]))
    batches = [{"x": torch.randn(3, 10, 4)}, {"x": torch.randn(2, 10, 4)}]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # TF32 on a GPU
    try:
        found = measure_blocks(loaded, batches, lambda _: None, samples=100)
        assert torch.get_float32_matmul_precision() == "medium" and set(model.precisions) == {"highest"}
    finally:
        torch.set_float32_matmul_precision(before)
    blocks = [x.double().numpy() for batch in batches for x in batch["x"]]
    layer = found["layers"][0]
    assert (found["samples"], found["tokens"], layer["k"], layer["output"]["k"]) == (5, 50, 4, 4)
    assert layer["median"] == pytest.approx(np.median([np.linalg.cond(x) for x in blocks]), rel=1e-4)


def test_a_grid_is_as_many_tokens_as_it_has_places():
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(5, 5)), torch.randn(2, 3, 4, 5)
    loaded = SimpleNamespace(model=model, projections=["0"], forward=lambda batch: model(batch["x"]))
    mask = torch.arange(12) < torch.tensor([12, 7])[:, None]  # row by row of the grid
    found = measure_blocks(loaded, [{"x": x}], lambda _: mask, samples=2)
    kappas = [np.linalg.cond(one.reshape(12, 5)[:n].double().numpy()) for one, n in zip(x, (12, 7), strict=True)]
    assert found["tokens"] == 19 and found["layers"][0]["median"] == pytest.approx(np.median(kappas), rel=1e-4)


def test_large_batches_are_worked_on_in_pieces_and_each_keeps_its_mask(monkeypatch):
    torch.manual_seed(1)
    block, mask = torch.randn(5, 12, 6), torch.arange(12) < torch.tensor([12, 9, 4, 7, 11])[:, None]
    monkeypatch.setattr(spectrum, "CHUNK", 2 * 12 * 6)  # two samples
    found = spectrum.conditioning(block, mask)
    real = [one[keep].double().numpy() for one, keep in zip(block, mask, strict=True)]
    assert [c.tokens for c in found] == [12, 9, 4, 7, 11]
    assert [c.kappa for c in found] == pytest.approx([np.linalg.cond(x) for x in real], rel=1e-5)
    sigmas = [np.linalg.svd(x - x.mean(0), compute_uv=False)[: min(len(x) - 1, 6)] for x in real]
    assert [c.centred for c in found] == pytest.approx([s[0] / s[-1] for s in sigmas], rel=1e-5)


def test_the_size_of_the_mean_token_sends_its_rest_through_the_svd():
    """The Gram matrix holds a mean token of 1e6 and a rest of 1 to four digits; the rest has to be right to more."""
    block = torch.randn(1, 20, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    block += 1e6 * torch.randn(48, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    rest = np.linalg.svd((block[0] - block[0].mean(0)).numpy(), compute_uv=False)
    assert spectrum.conditioning(block)[0].centred == pytest.approx(rest[0] / rest[18], rel=1e-6)


def test_two_inputs_count_once_and_padding_stays_out() -> None:
    """A dual-input model runs each projection twice; the mask is that of the first input."""
    torch.manual_seed(7)
    model = NystromformerLraForSequenceClassification(
        NystromformerLraConfig(dual_input=True, num_landmarks=8, initializer_range=0.3)
    )
    names = [f"encoder.layers.{i}.attention.output" for i in range(2)]
    loaded = SimpleNamespace(model=model, projections=names, forward=lambda batch: model(**batch).logits)
    first = {"input_ids": torch.randint(1, 32, (2, 40)), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    first["attention_mask"][:, 30:] = 0
    one, other = (
        measure_blocks(
            loaded,
            [first | {f"{key}_2": values.flip(0).roll(shift, 1) for key, values in first.items()}],
            lambda batch: batch["attention_mask"].bool(),
            2,
        )
        for shift in (0, 3)
    )
    assert one == other and (one["samples"], one["tokens"], one["layers"][0]["k"]) == (2, 60, 30)
