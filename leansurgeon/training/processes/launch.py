"""Let several processes do one piece of work (`worker`), and bring back one sentence where it fails; and what of the
environment would have a training do something else than its recipe says, and is easily forgotten.

torch's own launcher (`torch.distributed.run --standalone`) runs inside this process, so that Ctrl-C and SIGTERM reach
the workers and its 60 lines of report on a failed worker can be replaced by what the worker said. A process that is
itself a worker (`RANK` is set: torchrun, `accelerate launch`) never starts others.

`accelerate launch` and schedulers set some variables, a shell's profile others:

    set aside   Accelerate reads them, and transformers some of them, while a training is set up. They are taken out of
                this process's environment, so they do nothing.
    in force    torch and the libraries below it read them when they are loaded, so nobody can take them back.

What only says where or how fast (`CUDA_VISIBLE_DEVICES`, `OMP_NUM_THREADS`, the allocator's settings) is left alone.
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
# Set by `accelerate launch --cpu` and by a wish for one device: they choose where, not what is computed.
_HARMLESS = ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_LOG_LEVEL")
_OFF = ("", "no", "false", "0", "none", "strict")  # the last is oneDNN's word for all digits
# What `accelerate launch` always sets, and nobody has wished for.
_DEFAULTS = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_DYNAMO_MODE": "default"}

# fp32 products with fewer digits than fp32 has, by the kind of device that obeys: "cuda" is NVIDIA's and AMD's, and
# oneDNN works on CPUs and on Intel's GPUs.
_ONEDNN = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
_FEWER_DIGITS = {
    "cuda": ("NVIDIA_TF32_OVERRIDE", "HIPBLASLT_ALLOW_TF32"),
    "cpu": _ONEDNN,
    "xpu": _ONEDNN,
}
_ANY_WORD = "TORCHDYNAMO_SUPPRESS_ERRORS"  # even 0: torch/_dynamo/config.py takes any text for yes
_OTHER_COMPILE = (
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
    _ANY_WORD,
    "TORCH_COMPILE_OVERRIDE_BACKENDS",
)


def group_size() -> int:
    """How many processes train together, as the environment says. Raises `UsageError` for what cannot be."""
    if trouble := rank.contradiction():
        raise UsageError(
            trouble, f"For one process: unset {' '.join(rank.group_variables())}. For several: --gpus, or torchrun."
        )
    return rank.processes()


def set_aside() -> list[str]:
    """Take what Accelerate would obey out of the environment of this process, for good; names of those that said
    something. Not only while Accelerate starts: `ACCELERATE_USE_FSDP` with `FSDP_CPU_RAM_EFFICIENT_LOADING`, which
    `accelerate launch --use_fsdp` sets, lets transformers leave a fresh head without memory on all processes but one.
    """
    taken = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith(_ASIDE) and key not in _HARMLESS}
    return sorted(key for key, value in taken.items() if value.lower() not in _OFF and _DEFAULTS.get(key) != value)


def list_overrides(train: Train, device: str) -> list[str]:
    """`NAME=value (train.key)` of what overrides this recipe all the same on this kind of device ("cuda", "cpu")."""
    digits = _FEWER_DIGITS.get(device, ()) if train.precision == "fp32" else ()
    watched = dict.fromkeys(digits, "train.precision")
    watched |= {name: "train.compile" for name in _OTHER_COMPILE} if train.compile else {}
    values = ((name, key, os.environ.get(name, "")) for name, key in watched.items())
    said = ((name, key, value) for name, key, value in values if name == _ANY_WORD or value.lower() not in _OFF)
    return [f"{name}={value} ({key})" for name, key, value in said if value]


JOB, ANSWER = "job.json", "answer.json"
_SIGNALS = "--signals-to-handle=SIGHUP,SIGQUIT"  # what is left to torch's launcher; see `passing_on`


def check_gpus(wanted: int) -> None:
    """Raises `UsageError` when this machine shows fewer GPUs than are wanted."""
    import torch

    present = torch.cuda.device_count()
    if present < wanted:
        raise UsageError(
            f"{wanted} GPU{'s were' if wanted > 1 else ' was'} asked for and this machine shows {present}.",
            f"Use --gpus {present}." if present else "Leave --gpus out to train on the CPU.",
        )


class SilentExit(LeanSurgeonError):
    """A worker that ended and left nothing."""


@contextmanager
def passing_on(folder: Path) -> Iterator[list[int]]:
    """Hand SIGTERM, SIGUSR1 and Ctrl-C on to the workers, whose numbers stand in `folder`, and let them decide; torch's
    launcher would give them 30 seconds. Yields the signals that came.
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
    """Run `python COMMAND` in `processes` processes of one group; whether all of them ended well.

    Raises `Terminated` on SIGHUP and SIGQUIT, when the workers have ended; the other signals are for `passing_on`.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # A worker on a CPU gets its share of the cores, and not (as torchrun has it) one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", f"--nproc_per_node={processes}", _SIGNALS, *command]))
    except ChildFailedError:
        return False
    except SignalException:
        raise Terminated from None
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
    return True


def read_verdict(folder: Path, run_dir: Path) -> LeanSurgeonError:
    """What the first failing worker left in `folder`, as the error that it raised."""
    left = sorted(folder.glob("rank*.json"), key=lambda path: path.stat().st_mtime_ns)
    told = ((path.stem, json.loads(path.read_text())) for path in left)
    who, said = next((one for one in told if LostProcesses.__name__ not in one[1]["kinds"]), (None, None))
    if not said:
        return SilentExit(
            "A worker process ended without a word; it may have been killed for its memory.",
            "A training goes on from its last checkpoint with the same command and --resume auto.",
        )
    for kind in said["kinds"]:
        if hasattr(errors, kind):
            return getattr(errors, kind)(said["message"], said["hint"])
    trace = run_dir.parent / f"{run_dir.name}.{who}.log"
    trace.parent.mkdir(parents=True, exist_ok=True)
    runfolder.write_text(trace, said["trace"])
    return LeanSurgeonError(f"{who} failed with {said['message']}.", f"Its full trace is in {trace}.")
