"""Run one job on several processes (`worker`), and report a failure as one sentence; also, handle environment variables
that would override the recipe.

torch's own launcher (`torch.distributed.run --standalone`) runs inside this process, so that Ctrl-C and SIGTERM reach
the workers and its 60-line report on a failed worker can be replaced by what the worker reported. A process that is
itself a worker (`RANK` is set: torchrun, `accelerate launch`) never starts others.

`accelerate launch`, schedulers and shell profiles set variables of two kinds:

    removed       Accelerate, and for some of them transformers, read them while a training is set up. They are removed
                  from this process's environment, so they have no effect.
    reported      torch and the libraries below it read them when they are loaded, so they cannot be undone.

Variables that only choose a device or change the speed (`CUDA_VISIBLE_DEVICES`, `OMP_NUM_THREADS`, the allocator's
settings) are left alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from leansurgeon import errors, rank
from leansurgeon.errors import LeanSurgeonError, Terminated, UsageError
from leansurgeon.training.processes.agree import LostProcesses
from leansurgeon.training.processes.signals import HEARD, handle_signals
from leansurgeon.training.recipe.schema import Train
from leansurgeon.training.runs import folder as runfolder

_ASIDE = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
# Set by `accelerate launch --cpu` or to choose one device: they change where, not what is computed.
_HARMLESS = ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_LOG_LEVEL")
_OFF = ("", "no", "false", "0", "none", "strict")  # the last is oneDNN's word for full precision
# Values that `accelerate launch` always sets, though nobody asked for them.
_DEFAULTS = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_DYNAMO_MODE": "default"}

# Variables that reduce the precision of fp32 products, by kind of device: "cuda" is NVIDIA's and AMD's, and oneDNN
# works on CPUs and on Intel's GPUs.
_ONEDNN = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
_FEWER_DIGITS = {
    "cuda": ("NVIDIA_TF32_OVERRIDE", "HIPBLASLT_ALLOW_TF32"),
    "cpu": _ONEDNN,
    "xpu": _ONEDNN,
}
_ANY_WORD = "TORCHDYNAMO_SUPPRESS_ERRORS"  # even 0: torch/_dynamo/config.py takes any text for true
_OTHER_COMPILE = (
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
    _ANY_WORD,
    "TORCH_COMPILE_OVERRIDE_BACKENDS",
)


def group_size() -> int:
    """Return how many processes train together according to the environment. Raises `UsageError` if it contradicts
    itself.
    """
    if trouble := rank.contradiction():
        raise UsageError(
            trouble, f"For one process: unset {' '.join(rank.group_variables())}. For several: --gpus, or torchrun."
        )
    return rank.processes()


def set_aside() -> list[str]:
    """Remove the variables that Accelerate would obey from this process's environment; return the names of those that
    had an effect.

    They are not restored once Accelerate has started: `ACCELERATE_USE_FSDP` with `FSDP_CPU_RAM_EFFICIENT_LOADING`,
    which `accelerate launch --use_fsdp` sets, lets transformers leave a fresh head without memory on all processes but
    one.
    """
    taken = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith(_ASIDE) and key not in _HARMLESS}
    return sorted(key for key, value in taken.items() if value.lower() not in _OFF and _DEFAULTS.get(key) != value)


def list_overrides(train: Train, device: str) -> list[str]:
    """Return `NAME=value (train.key)` for each variable that still overrides this recipe on this kind of device
    ("cuda", "cpu").
    """
    digits = _FEWER_DIGITS.get(device, ()) if train.precision == "fp32" else ()
    watched = dict.fromkeys(digits, "train.precision")
    watched |= {name: "train.compile" for name in _OTHER_COMPILE} if train.compile else {}
    values = ((name, key, os.environ.get(name, "")) for name, key in watched.items())
    said = ((name, key, value) for name, key, value in values if name == _ANY_WORD or value.lower() not in _OFF)
    return [f"{name}={value} ({key})" for name, key, value in said if value]


JOB, ANSWER = "job.json", "answer.json"
_SIGNALS = "--signals-to-handle=SIGHUP,SIGQUIT"  # handled by torch's launcher; see `passing_on`


def check_gpus(wanted: int) -> None:
    """Raise `UsageError` if this machine has fewer GPUs than `wanted`."""
    import torch

    present = torch.cuda.device_count()
    if present < wanted:
        raise UsageError(
            f"{wanted} GPU{'s were' if wanted > 1 else ' was'} asked for and this machine shows {present}.",
            f"Use --gpus {present}." if present else "Leave --gpus out to train on the CPU.",
        )


class SilentExit(LeanSurgeonError):
    """A worker that ended and left no message."""


@contextmanager
def passing_on(folder: Path) -> Iterator[list[int]]:
    """Forward SIGTERM, SIGUSR1 and Ctrl-C to the workers, whose process ids are in `folder`, and let them decide;
    torch's launcher would give them 30 seconds. Yields the signals received.
    """
    received: list[int] = []

    def heard(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for file in folder.glob("pid-*"):
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), number)

    with handle_signals(HEARD, heard):
        yield received


def run_workers(processes: int, command: list[str]) -> bool:
    """Run `python COMMAND` in `processes` processes of one group; return whether all of them succeeded.

    Raises `Terminated` on SIGHUP and SIGQUIT, once the workers have ended; `passing_on` handles the other signals.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Give a worker on a CPU its share of the cores; torchrun would give it one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch's launcher logs what is said here in one sentence
    try:
        run(parse_args(["--standalone", f"--nproc_per_node={processes}", _SIGNALS, *command]))
    except ChildFailedError:
        return False
    except SignalException:
        raise Terminated from None
    finally:
        logging.disable(disabled)
    return True


def read_verdict(folder: Path, run_dir: Path) -> LeanSurgeonError:
    """Return the error that the first failing worker left in `folder`."""
    left = sorted(folder.glob("rank*.json"), key=lambda path: path.stat().st_mtime_ns)
    told = ((path.stem, json.loads(path.read_text())) for path in left)
    who, said = next((one for one in told if LostProcesses.__name__ not in one[1]["kinds"]), (None, None))
    if not said:
        return SilentExit(
            "A worker process ended without a message; it may have been killed for lack of memory.",
            "The same command with --resume auto continues a training from its last checkpoint.",
        )
    for kind in said["kinds"]:
        if hasattr(errors, kind):
            return getattr(errors, kind)(said["message"], said["hint"])
    trace = run_dir.parent / f"{run_dir.name}.{who}.log"
    trace.parent.mkdir(parents=True, exist_ok=True)
    runfolder.write_text(trace, said["trace"])
    return LeanSurgeonError(f"{who} failed with {said['message']}.", f"Its full trace is in {trace}.")
