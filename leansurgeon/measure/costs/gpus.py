"""GPUs to compare a plan with: memory as stated in the makers' data sheets.

A gigabyte is read as 10^9 bytes. torch sees 5 to 7 % more on the cards; that margin is left for the CUDA context (about
0.5 GiB), for libraries and for what the allocator cannot use.
"""

from __future__ import annotations

from dataclasses import dataclass

from leansurgeon.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Gpu:
    """`memory` in bytes; `blas` is a key of `memory.WORKSPACE`; `source` cites the figure."""

    name: str
    title: str
    memory: int
    blas: str
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", "A100 40 GB", 40 * 10**9, "older", "NVIDIA A100 Tensor Core GPU data sheet: 40 GB HBM2"),
        Gpu("a100-80", "A100 80 GB", 80 * 10**9, "older", "NVIDIA A100 80 GB data sheet: 80 GB HBM2e"),
        Gpu("h100", "H100 80 GB", 80 * 10**9, "hopper", "NVIDIA H100 data sheet, SXM: 80 GB HBM3"),
        Gpu("h200", "H200 141 GB", 141 * 10**9, "hopper", "NVIDIA H200 data sheet: 141 GB HBM3e"),
        Gpu("a6000", "RTX A6000 48 GB", 48 * 10**9, "older", "NVIDIA RTX A6000 data sheet: 48 GB GDDR6"),
    )
}


def find(name: str) -> Gpu:
    """Return the GPU of this name. Raises `UsageError` with the known ones."""
    if name.lower() not in GPUS:
        begun = " or ".join(known for known in GPUS if name and known.startswith(name.lower()))
        said = f" (did you mean {begun}?)" if begun else did_you_mean(name, GPUS)
        raise UsageError(f"--gpu {name}{said}: known are {', '.join(GPUS)}.")
    return GPUS[name.lower()]
