"""Theorem 3.2 of "Leaner Transformers" on Gaussian blocks: kappa of an N x (h * d) matrix against the formula

    (sqrt(max) + sqrt(min)) / (sqrt(max) - sqrt(min)),   max and min of N tokens and h * d columns

which falls with h only beyond its peak at h * d = N. Run: python examples/theorem_3_2.py
"""

import math
from statistics import fmean

import torch

from leansurgeon.measure.kappa.spectrum import conditioning

HEAD_DIM, SAMPLES = 64, 4
HEADS = {197: (1, 2, 3, 4, 6, 8, 12, 16, 18), 128: (1, 2, 4, 8, 12, 18)}


def formula(tokens: int, inner: int) -> float:
    large, small = math.sqrt(max(tokens, inner)), math.sqrt(min(tokens, inner))
    return (large + small) / (large - small) if large > small else math.inf


def main() -> None:
    torch.manual_seed(0)
    print("    N   h   h*d/N    kappa  formula")
    for tokens, heads in HEADS.items():
        measured = {}
        for h in heads:
            inner = h * HEAD_DIM
            blocks = conditioning(torch.randn(SAMPLES, tokens, inner, dtype=torch.float64))
            measured[h] = fmean(block.kappa for block in blocks)
            predicted = formula(tokens, inner)
            print(f"{tokens:5} {h:3} {inner / tokens:7.2f} {measured[h]:8.2f} {predicted:8.2f}")
            if inner / tokens > 1.9:
                assert abs(measured[h] / predicted - 1) < 0.08, "the theorem holds away from its peak"
        peak = max(measured, key=measured.get)
        print(f"      the peak is at h = {peak}; h*d = N at h = {tokens / HEAD_DIM:.2f}\n")
        assert abs(peak - tokens / HEAD_DIM) < 1


if __name__ == "__main__":
    main()
