"""What kappa costs: against the SVD, and against the forward pass whose blocks it looks at.

Both as ratios of neighbouring measurements, round by round, so that a noisy neighbour slows both; the thread's own CPU
time is taken. Run with `OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_kappa.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from leansurgeon.measure.kappa.blocks import measure_blocks
from leansurgeon.measure.kappa.spectrum import conditioning, spectrum

ROUNDS = 15
SVD_CLAIM, FORWARD_CLAIM = 3.0, 0.10


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def ratios(one: Callable[[], object], other: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Seconds of `one` over seconds of `other`, in turns."""
    one(), other()
    return [seconds(one) / seconds(other) for _ in range(rounds)]


@pytest.mark.benchmark
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_spectrum_against_svdvals(dtype) -> None:
    torch.manual_seed(0)
    block = torch.randn(8, 197, 768, dtype=dtype)
    found = ratios(lambda: torch.linalg.svdvals(block), lambda: spectrum(block))
    print(f"\nsvdvals {dtype} / ours, 197 x 768: {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")
    assert statistics.median(found) >= SVD_CLAIM


class Model:
    """ViT-B/16 with the interface of a loaded model."""

    def __init__(self) -> None:
        import timm

        torch.manual_seed(0)
        self.model = timm.create_model("vit_base_patch16_224").eval()
        self.projections = [f"blocks.{i}.attn.proj" for i in range(12)]

    @torch.no_grad()
    def forward(self, batch: dict) -> torch.Tensor:
        return self.model(batch["pixel_values"])


@pytest.mark.benchmark
def test_kappa_against_the_forward_pass() -> None:
    """Raw and centred kappa with all ranks of every layer, against the forward pass of ViT-B on the same images."""
    loaded, batch = Model(), {"pixel_values": torch.randn(2, 3, 224, 224)}
    blocks: list[torch.Tensor] = []
    hooks = [
        loaded.model.get_submodule(name).register_forward_pre_hook(lambda _m, args: blocks.append(args[0]))
        for name in loaded.projections
    ]
    loaded.forward(batch)
    for hook in hooks:
        hook.remove()

    def raw() -> None:
        for block in blocks:
            conditioning(block, centred=False)

    def both() -> None:
        for block in blocks:
            conditioning(block)

    def everything() -> None:
        measure_blocks(loaded, [batch], lambda _: None, 2)

    for name, work in (("kappa and ranks", raw), ("with centred kappa", both)):
        found = ratios(work, lambda: loaded.forward(batch), rounds=7)
        print(f"\n{name} / forward of ViT-B: {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        assert statistics.median(found) <= FORWARD_CLAIM
    found = ratios(everything, lambda: loaded.forward(batch), rounds=5)
    print(f"\nforward with A and A W_o of every layer / forward: {statistics.median(found):.3f}")
