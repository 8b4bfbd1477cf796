"""Start one training or evaluation on several processes, and bring back one summary or one sentence.

`train_on` and `evaluate_on` run torch's own launcher (`torch.distributed.run --standalone`) inside this process, so
that Ctrl-C and SIGTERM reach the workers and its 60 lines of report on a failed worker can be replaced by what the
worker said. A process that is itself a worker (`RANK` is set: torchrun, `accelerate launch`) never starts others.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from leansurgeon import errors
from leansurgeon.checkpoints.publish.leftovers import scratch
from leansurgeon.errors import LeanSurgeonError, Terminated, UsageError
from leansurgeon.training.processes.agree import LostOthers
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs import summary
from leansurgeon.training.runs.summary import Part, Summary

JOB, ANSWER = "job.json", "answer.json"
_SIGNALS = "--signals-to-handle=SIGHUP,SIGQUIT"  # what is left to torch's launcher; see `passing_on`


def is_worker() -> bool:
    """Whether somebody has started this process as one of several already."""
    return "RANK" in os.environ


def rank() -> int:
    """This process's number in its group; 0 where there is none."""
    return int(os.environ.get("RANK", "0"))


def check_gpus(wanted: int) -> None:
    """Raises `UsageError` when this machine shows fewer GPUs than are wanted."""
    if wanted < 1:
        raise UsageError(f"--gpus must be at least 1, and {wanted} was given.")
    import torch

    present = torch.cuda.device_count()
    if present < wanted:
        raise UsageError(
            f"{wanted} GPU{'s were' if wanted > 1 else ' was'} asked for and this machine shows {present}.",
            f"Use --gpus {present}." if present else "Leave --gpus out to train on the CPU.",
        )


def train_on(
    processes: int,
    recipe: TrainingRecipe,
    model_dir: Path,
    run_dir: Path,
    *,
    seed: int | None = None,
    experiment: Part | None = None,
    say: Callable[[str], None] | None = None,
    cpu: bool = False,
    **options: Any,
) -> Summary:
    """`loop.train` on `processes` processes: GPUs with NCCL, or CPU processes with gloo where `cpu` is set. `options`
    are those of `train` that say how to resume and how much to do.

    With one process, or inside a worker, this is `loop.train` itself. The data is prepared here, before a process group
    exists whose patience it could exceed. Raises what a worker raised.
    """
    from leansurgeon.training.train import prepared_task, train

    if processes == 1 or is_worker():
        return train(recipe, model_dir, run_dir, seed=seed, experiment=experiment, say=say, cpu=cpu, **options)
    if not cpu:
        check_gpus(processes)
    if options.get("resume", "never") == "never":
        runfolder.check_free(run_dir, replace=options.get("replace", False))  # before anything is started
    prepared_task(recipe, model_dir, say or _talk)
    options |= {"run_dir": str(Path(run_dir).resolve()), "seed": seed}
    options |= {"experiment": experiment and experiment.as_dict()}
    with scratch() as folder:
        _carry_out("train", processes, recipe, model_dir, options | {"cpu": cpu}, Path(folder), Path(run_dir))
    return summary.read(Path(run_dir))


def evaluate_on(
    processes: int,
    recipe: TrainingRecipe,
    model_dir: Path,
    *,
    cpu: bool = False,
    limit_batches: int | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """`preview.evaluate_model` on `processes` processes, as `train_on` has it."""
    from leansurgeon.training.preview import evaluate_model
    from leansurgeon.training.train import prepared_task

    options = {"cpu": cpu, "limit_batches": limit_batches}
    if processes == 1 or is_worker():
        return evaluate_model(recipe, model_dir, say=say or _talk, **options)
    if not cpu:
        check_gpus(processes)
    prepared_task(recipe, model_dir, say or _talk)
    with scratch() as folder:
        trace = Path(tempfile.gettempdir()) / "leansurgeon-evaluation"
        _carry_out("evaluate", processes, recipe, model_dir, options, Path(folder), trace)
        return json.loads((Path(folder) / ANSWER).read_text(encoding="utf-8"))


def _carry_out(
    work: str, processes: int, recipe: TrainingRecipe, model_dir: Path, options: dict, folder: Path, trace: Path
) -> None:
    """Let `worker` do this in every process. Raises what the first worker that failed said."""
    job = {"work": work, "recipe": recipe.model_dump(mode="json"), "options": options}
    (folder / JOB).write_text(json.dumps(job | {"model_dir": str(Path(model_dir).resolve())}))
    with passing_on(folder) as received:
        well = run_workers(processes, ["-m", "leansurgeon.training.processes.worker", str(folder)])
    if well:
        return
    error = verdict(folder, trace)
    if received and isinstance(error, _WithoutAWord):  # it came before there was anything to save
        raise Terminated if received[0] != signal.SIGINT else KeyboardInterrupt
    raise error


class _WithoutAWord(LeanSurgeonError):
    """A worker that ended and left nothing."""


@contextmanager
def passing_on(folder: Path) -> Iterator[list[int]]:
    """Hand SIGTERM, SIGUSR1 and Ctrl-C on to the workers, whose numbers stand in `folder`, and let them decide; torch's
    launcher would give them 30 seconds. Yields the signals that came.
    """
    received: list[int] = []

    def heard(number: int, frame: object) -> None:
        received.append(number)
        for file in folder.glob("pid-*"):
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), number)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, heard)
    except ValueError:  # not in the main thread, where no signal arrives
        pass
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)


def run_workers(processes: int, command: list[str]) -> bool:
    """Run `python COMMAND` in `processes` processes of one group; whether all of them ended well.

    Raises `Terminated` on SIGHUP and SIGQUIT, when the workers have ended; the other signals are for `passing_on`.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # A worker on a CPU gets its share of the cores, and not (as torchrun has it) one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", f"--nproc_per_node={processes}", _SIGNALS, *command]))
    except ChildFailedError:
        return False
    except SignalException:
        raise Terminated from None
    return True


def verdict(folder: Path, run_dir: Path) -> LeanSurgeonError:
    """What the first failing worker left in `folder`, as the error that it raised."""
    left = sorted(folder.glob("rank*.json"), key=lambda path: path.stat().st_mtime_ns)
    left = [path for path in left if json.loads(path.read_text())["kind"] != LostOthers.__name__]
    if not left:
        return _WithoutAWord(
            "A worker process ended without a word; it may have been killed for its memory.",
            "A training goes on from its last checkpoint with the same command and --resume auto.",
        )
    said = json.loads(left[0].read_text())
    kind = getattr(errors, said["kind"], None)
    if kind is not None:
        return kind(said["message"], said["hint"])
    trace = run_dir.parent / f"{run_dir.name}.{left[0].stem}.log"
    trace.parent.mkdir(parents=True, exist_ok=True)
    runfolder.write_text(trace, said["trace"])
    return LeanSurgeonError(f"{left[0].stem} failed with {said['message']}.", f"Its full trace is in {trace}.")


def agree(text: str, *, cpu: bool = False) -> str:
    """The text of rank 0, on every rank: for what differs between processes, such as a name with the time in it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return text
    from accelerate.utils import broadcast_object_list

    from leansurgeon.training.processes import engine

    engine.start(cpu=cpu, say=_talk)
    return broadcast_object_list([text])[0]


def _talk(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
