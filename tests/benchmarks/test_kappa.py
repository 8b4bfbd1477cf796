"""What kappa costs: against the SVD, and against the forward pass whose blocks it looks at.

Both as ratios of neighbouring measurements, round by round, so that a noisy neighbour slows both; the thread's own CPU
time is taken. Run with `OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_kappa.py`.

On a GPU (marked `gpu`) the same, and whether the eigenvalues are found faster there or on the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from leansurgeon.measure.kappa.blocks import measure_blocks
from leansurgeon.measure.kappa.spectrum import _eigenvalues, _gram, conditioning, spectrum

ROUNDS = 15
SVD_CLAIM, FORWARD_CLAIM = 3.0, 0.10


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seconds(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start
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

    def __init__(self, device: str = "cpu") -> None:
        import timm

        torch.manual_seed(0)
        self.model = timm.create_model("vit_base_patch16_224").eval().to(device)
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


@pytest.mark.gpu
@pytest.mark.benchmark
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "shape", [(64, 197, 768), (256, 197, 768), (64, 128, 768), (64, 197, 64), (64, 17, 192)], ids=str
)
def test_spectra_on_the_gpu_or_on_the_host(shape) -> None:
    """Of blocks that a forward pass leaves on the GPU: as `conditioning` does it there, with the eigenvalues on the
    host (what comes back are the Gram matrices), and with everything there (blocks come back).
    """
    torch.manual_seed(0)
    block = torch.randn(shape, device="cuda")

    def eigenvalues(place: str) -> None:
        _eigenvalues(_gram(block, None).to(place), block, None, centred=False)

    alone = ratios(lambda: eigenvalues("cpu"), lambda: eigenvalues("cuda"), rounds=5)
    for name, centred in (("raw", False), ("raw and centred", True)):
        found = ratios(
            lambda c=centred: conditioning(block.cpu(), centred=c),
            lambda c=centred: conditioning(block, centred=c),
            rounds=5,
        )
        spent = 1000 * seconds(lambda c=centred: conditioning(block, centred=c))
        print(f"\n{shape} {name}: {spent:.1f} ms on the GPU; host (one thread) / GPU: {statistics.median(found):.2f}")
    print(f"{shape} raw, eigenvalues alone on the host / on the GPU: {statistics.median(alone):.2f}")


@pytest.mark.gpu
@pytest.mark.benchmark
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kappa_against_the_forward_pass_on_the_gpu() -> None:
    loaded, batch = Model("cuda"), {"pixel_values": torch.randn(64, 3, 224, 224, device="cuda")}
    found = ratios(lambda: measure_blocks(loaded, [batch], lambda _: None, 64), lambda: loaded.forward(batch), rounds=5)
    print(f"forward with A and A W_o of every layer / forward of ViT-B, 64 images: {statistics.median(found):.3f}")
