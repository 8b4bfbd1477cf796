"""What this machine can carry: how many trainings side by side, and how their processes start."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from leansurgeon.rank import cores

# Imported once by the server process that forks the trainings (CPU only; a process that has touched CUDA must not
# fork).
PRELOAD = [
    "leansurgeon.training.train",
    "leansurgeon.checkpoints.model",
    "leansurgeon.measure.kappa.blocks",
    "accelerate",
]
TRANSFORMERS = ["transformers.modeling_utils", "transformers.modeling_layers", "transformers.models.auto.modeling_auto"]


def fresh_processes(parallel: int, library: str) -> multiprocessing.context.BaseContext:
    """How processes start: each from a clean state, so memory is measured from there. `library`
    (`Architecture.library`) is loaded before they fork.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // parallel)))
    forks = not has_gpu() and "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(PRELOAD + (["timm"] if library == "timm" else TRANSFORMERS))
    return context


def default_parallel() -> int:
    return 1 if has_gpu() else cores()


def has_gpu() -> bool:
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd"))
