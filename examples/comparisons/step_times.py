"""Processor seconds of one training step: leansurgeon without a teacher, or a plain `transformers.Trainer`.

    python examples/comparisons/step_times.py ours SMOLLM2 brown.txt
    python examples/comparisons/step_times.py plain SMOLLM2 brown.txt

Both train all weights of a language model on 4 windows of 256 tokens a step, with products in bf16, in one thread. The
first two steps are not counted. Run the two in turns, more than once: other programs on the machine change the figures.
"""

from __future__ import annotations

import itertools
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

STEPS, BATCH = 12, 4
KEYS = {  # everything trains, nothing is evaluated on the way
    "train.duration": f"{STEPS}st",
    "train.batch": BATCH,
    "train.distill": None,
    "train.frozen_embeddings": False,
    "train.frozen_blocks": 0,
    "train.eval.at_start": False,
    "train.eval.every": "1000st",
    "train.eval.samples": BATCH,
    "train.eval.test": False,
    "train.checkpoint.keep_best": False,
    "train.checkpoint.keep_start": False,
}


def noting(step, marks: list[float]):
    """The function, which also notes the processor time at which it is called."""

    def noted(*inputs, **more):
        marks.append(time.process_time())
        return step(*inputs, **more)

    return noted


def main() -> None:
    kind, model, text = sys.argv[1:]
    torch.set_num_threads(1)
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        if kind == "ours":
            import leansurgeon
            from leansurgeon.training.optimizer import Trainer

            Trainer.step = noting(Trainer.step, marks)
            leansurgeon.retrain(model, data=text, out=f"{folder}/run", progress=False, set=KEYS)
        else:
            from transformers.trainer_callback import CallbackHandler

            CallbackHandler.on_step_begin = noting(CallbackHandler.on_step_begin, marks)
            sizes = ["--steps", str(STEPS), "--bf16", "--tokens", "256", "--batch", str(BATCH)]
            sys.argv = ["plain_trainer.py", model, text, "-o", f"{folder}/run", *sizes]
            runpy.run_path(str(Path(__file__).parents[1] / "healing" / "plain_trainer.py"), run_name="__main__")
    steps = [after - before for before, after in itertools.pairwise(marks)][2:]
    low, middle, high = min(steps), statistics.median(steps), max(steps)
    print(f"{kind}: median {middle:.2f} s of {len(steps)} steps, {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
