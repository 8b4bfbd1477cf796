"""One process of `test_training_processes.py`: trains the stand-in and evaluates 13 samples in batches of 4."""

import sys
from pathlib import Path

from leansurgeon.training.loop import train
from tests.support.training_standin import Dots, Words, dot_model, recipe, word_model

if __name__ == "__main__":
    out = Path(sys.argv[1])
    train(recipe(micro_batch=4), out, out / "words", loaded=word_model(), task=Words(), cpu=True, say=print)
    train(recipe(duration="2st"), out, out / "dots", loaded=dot_model(), task=Dots(), cpu=True, say=print)
