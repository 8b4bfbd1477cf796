"""Libraries that draw from the global generators, made to depend on the sample alone.

timm and torchvision transforms draw from Python's, numpy's and torch's global generators. `each` seeds all three for
every sample from (seed, epoch, index) and puts their states back at the end, so that a sample is the same in every
batch and process, and nobody else's draws change. Threads of one process take turns.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator

import numpy as np

from leansurgeon.tasks import chance

_LOCK = threading.Lock()
_STREAM = 11


def each(seed: int, epoch: int, indices_B: np.ndarray) -> Generator[int, None, None]:
    """The places 0 .. B - 1 of a batch; while the caller works on a place, the generators are those of its sample."""
    import torch

    keys_B = chance.integers(seed, epoch, indices_B, 1, 0, 1 << 32, stream=_STREAM)[:, 0].tolist()
    cpu = torch.default_generator
    with _LOCK:
        states = random.getstate(), np.random.get_state(), cpu.get_state()
        try:
            for place, key in enumerate(keys_B):
                random.seed(key)
                np.random.seed(key)
                cpu.manual_seed(key)
                yield place
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            cpu.set_state(states[2])
