"""The condition number of attention, layer by layer, for any model that leansurgeon knows.

Run: python examples/kappa_of_a_model.py          a ViT on handwritten digits, untrained; the paper's Definition 3.1
"""

import tempfile
from pathlib import Path

import numpy as np

from leansurgeon import tasks
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.kappa import blocks as kappa
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out


def main() -> None:
    work = Path(tempfile.mkdtemp())
    digits = tasks.make("digits", {})
    digits.prepare(work / "cache", None, workers=1, say=print)
    batch = digits.batch("eval", np.arange(32), seed=0, epoch=0)
    preset = open_source("digits-vit")
    for heads in ("2", "4", "8", "16"):
        folder = work / f"heads-{heads}"
        carry_out(DecidedCut(plan(preset, RequestedShape(heads=heads))), folder, check=False)
        found = kappa.measure_blocks(load(folder), [batch], digits.token_mask, samples=32)
        medians = "  ".join(f"{layer['median']:8.1f}" for layer in found["layers"])
        print(f"{heads:>2} heads of 16: kappa of layers 1 to 6 (median of 32 images)  {medians}")


if __name__ == "__main__":
    main()
