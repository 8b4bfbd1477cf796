"""The state of one training: what it uses (`Run`), what it has recorded (`History`), both as a checkpoint, and its
speed.

What is not here follows from (recipe, seed, step): data order, augmentation, masks, mixing, dropout, learning rate.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leansurgeon.checkpoints.kind import LANGUAGE
from leansurgeon.errors import RunFolderReplaced, UsageError
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.tasks import Task
from leansurgeon.training import data_loader, distributed
from leansurgeon.training.distributed import Tensors
from leansurgeon.training.objective import Objective
from leansurgeon.training.observe import PeakMemory, Progress, Trackers, Window
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.processes.agree import ProcessGroup
from leansurgeon.training.processes.signals import StopSignals
from leansurgeon.training.recipe.schema import Train, TrainingRecipe
from leansurgeon.training.runs import checkpoint
from leansurgeon.training.runs import folder as runfolder
from leansurgeon.training.runs.summary import Scores
from leansurgeon.training.schedule import Plan


@dataclass
class History:
    """All counts and measurements of a training, as plain values that survive JSON without loss."""

    done: int = 0  # optimizer steps
    evaluate: bool = False  # an evaluation is due and not finished yet
    before: Scores | None = None
    best: Scores | None = None
    stale: bool = False  # model/ does not hold `best`: it was saved after the checkpoint that was restored
    last: Scores | None = None
    eval_losses: list[float] = field(default_factory=list)
    eval_seconds: list[float] = field(default_factory=list)
    windows: list[list[float]] = field(default_factory=list)  # steps and seconds between two log points
    pending: list[list[float]] = field(default_factory=list)  # steps since the last log point: loss sum, count, norm
    waited: float = 0.0  # seconds spent waiting for data
    worse: int = 0  # evaluations in a row without improvement
    early: bool = False  # ended by early stopping
    given_up: list[int] = field(default_factory=list)  # steps skipped because of non-finite values
    rollbacks: int = 0
    resumed: list[int] = field(default_factory=list)  # steps at which the training was resumed
    seconds: float = 0.0
    peak: int = 0  # bytes
    started: str = ""
    eval_samples: int | None = None  # evaluation samples of a timed training, once decided
    expected_steps: int | None = None  # steps that a timed training was expected to take when it began

    @classmethod
    def from_dict(cls, data: JsonObject) -> History:
        scores = {key: Scores.from_dict(data[key]) for key in ("before", "best", "last") if data.get(key)}
        return cls(**data | scores)

    def as_dict(self) -> JsonObject:
        return {key: value.as_dict() if isinstance(value, Scores) else value for key, value in vars(self).items()}


@dataclass
class Run:
    """What one training uses.

    `judged` is what is evaluated and exported: the model, or its moving average. `whole_model` is the unsharded model
    where processes share the weights (see `distributed`).
    """

    recipe: TrainingRecipe
    folder: Path
    task: Task
    loaded: Any
    judged: Objective
    trainer: Trainer
    group: ProcessGroup
    stops: StopSignals
    progress: Progress
    memory: PeakMemory
    log: runfolder.MetricsLog
    history: History
    origin: dict[str, str]
    trackers: Trackers | None = None  # set once the folder is taken
    clock: float = field(default_factory=time.perf_counter)
    saved_at: float = field(default_factory=time.perf_counter)
    evaluated_at: float = field(default_factory=time.perf_counter)
    tokens_per_sample: int = 1
    whole_model: Any = None
    lock: Any = None
    window: Window = field(default_factory=Window)
    place: tuple[int, int] | None = None  # device and inode of the folder

    @property
    def say(self) -> Say:
        return self.progress.say

    @property
    def train(self) -> Train:
        return self.recipe.train

    @property
    def plan(self) -> Plan:
        return self.trainer.pace.plan

    @property
    def device(self) -> torch.device:
        return self.trainer.accelerator.device

    @property
    def main(self) -> bool:
        return self.group.rank == 0

    def check_folder(self) -> None:
        """Raise `RunFolderReplaced` if the run folder is not the one from the start. For the main process."""
        if runfolder.place_of(self.folder) != self.place:
            raise RunFolderReplaced(
                f"The run folder {self.folder} was deleted or replaced while it was being trained, by step "
                f"{self.history.done}.",
                "Nothing more is written there. Start the training again, in a folder of its own.",
            )

    def note(self, **row: Any) -> None:
        """Append a row to metrics.jsonl, on the main process only."""
        if self.main:
            self.check_folder()
            self.log.write(**row)

    def seconds_spent(self) -> float:
        """Return the seconds of training so far, evaluations included, summed over all resumed runs."""
        return self.history.seconds + time.perf_counter() - self.clock


def first_batch(run: Run, number: int = 0, parts: int = 1, *, longest: bool = False) -> data_loader.Batch:
    """Return micro batch `number` of the first step as it is trained on, or the first of `parts` equal parts of it.

    With texts batched by length, it is one of typical length, or with `longest` the one with the longest texts.
    """
    train, plan, lengths = run.train, run.plan, run.task.lengths("train")
    if lengths is None or not (longest or train.order == "by-length"):
        indices = data_loader.epoch_order(train.order_seed, 0, run.task.size("train"))[: plan.group]
    else:
        usual = int((lengths > lengths.mean()).sum()) - plan.group // 2
        start = 0 if longest else min(max(0, usual), len(lengths) - plan.group)
        indices = np.argsort(lengths, kind="stable")[::-1][start : start + plan.group]
    rows = data_loader.split_micro_batches(indices, plan.processes, run.group.rank, plan.micro)
    row = rows[number % len(rows)][: plan.micro // parts]
    batch = data_loader.to_device(run.task.batch("train", row, seed=train.seed, epoch=0), run.device)
    return run.trainer.mixing(batch, 0, 0) if run.trainer.mixing else batch


def save(run: Run) -> None:
    """Write a checkpoint. All processes must call this."""
    run.group.on_main(run.check_folder)
    run.log.sync()
    history = run.history.as_dict() | {"pending": run.window.values(), "seconds": run.seconds_spent()}
    history["peak"] = max(run.history.peak, run.memory.bytes)
    optimizer, groups = _optimizer_out(run.trainer.optimizer)
    shared, (own, generators) = {}, _generators_out(run.device)
    for prefix, of_buffers, model in _models(run):
        shared |= {f"{prefix}{name}": tensor for name, tensor in distributed.list_tensors(model).items()}
        own |= {f"{of_buffers}{name}": buffer for name, buffer in model.named_buffers()}
    shared = distributed.gather_all(shared | optimizer, keep=run.main)
    task, scaler = getattr(run.task, "whole", run.task), run.trainer.scaler  # the whole task, not the evaluation subset
    state = {
        "history": history,
        "groups": groups,
        "generators": generators,
        "scaler": scaler and scaler.state_dict(),
        "pace": run.trainer.pace.state(),
        "metrics_bytes": run.log.bytes,
        "micro": run.plan.micro,
        "world_size": run.group.processes,
        "origin": run.origin,
        "data": {split: task.size(split) for split in ("train", "eval")},
        "entry": task.prepared_as,
        "recipe": run.recipe.model_dump(mode="json"),
    }
    keep = run.train.checkpoint.keep_last
    checkpoint.write(run.folder, run.history.done, shared, own, state, run.group, keep=keep)
    run.saved_at = time.perf_counter()


def restore(run: Run, path: Path) -> None:
    """Restore the training from the checkpoint at `path`. All processes must call this.

    If model/ no longer holds the best model that the checkpoint knows, the next evaluation saves its own. Raises
    `UsageError` for a checkpoint of another model, or one that is damaged although it agrees with its manifest.
    """

    def put_back() -> None:
        try:
            _restore(run, path)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise checkpoint.damaged_checkpoint(path, f"{type(error).__name__}: {error}") from error

    run.group.everywhere(put_back)
    best, keeps = run.history.best, run.train.checkpoint.keep_best
    kept = run.group.share(lambda: checkpoint.best_kept(run.folder))
    run.history.stale = keeps and best is not None and kept != best.step


@torch.no_grad()
def _restore(run: Run, path: Path) -> None:
    state = checkpoint.read_state(path)
    shared, own = checkpoint.read_tensors(path, run.group.rank)
    if state["world_size"] != run.group.processes:
        own = {}
    for prefix, of_buffers, model in _models(run):
        here, tensors = distributed.list_tensors(model), _part(shared, prefix)
        differing = sorted(here.keys() ^ tensors.keys()) or [n for n in here if here[n].shape != tensors[n].shape]
        if differing:
            raise UsageError(
                f"{path} is of another model: {differing[0]} differs.",
                "Name the model that this run was started with.",
            )
        for name, tensor in (tensors | _part(own, of_buffers)).items():
            part = distributed.local_part(distributed.split_like(tensor, here[name]))
            distributed.local_part(here[name]).copy_(part)
    _optimizer_in(run.trainer.optimizer, shared, state["groups"])
    if run.trainer.scaler and state["scaler"]:
        run.trainer.scaler.load_state_dict(state["scaler"])
    run.trainer.pace.restore(state["pace"])
    if own:
        _generators_in(own, state["generators"], run.device)
    run.history = History.from_dict(state["history"])
    run.window = Window([torch.tensor(row, device=run.device) for row in run.history.pending])
    run.history.pending = []
    if run.main:
        run.log.truncate(state["metrics_bytes"])
    run.clock = run.saved_at = run.evaluated_at = time.perf_counter()


def export_model(run: Run) -> Any:
    """Return the judged model as plain libraries know it, to be saved or measured.

    All processes must call this. Where they share the weights, only the main process gets the trained weights.
    """
    if run.whole_model is None:
        return run.judged.loaded
    here, trained = distributed.list_tensors(run.whole_model.model), distributed.list_tensors(run.judged.loaded.model)
    with torch.no_grad():
        for name, tensor in distributed.gather_all(trained, keep=run.main).items():
            here[name].copy_(tensor)
    return run.whole_model


def _models(run: Run) -> list[tuple[str, str, torch.nn.Module]]:
    """Return (tensor prefix, buffer prefix, model) in a checkpoint for the model and, if there is one, its average."""
    models = [("model.", "buffer.", run.loaded.model)]
    if run.trainer.average:
        models.append(("average.", "average.", run.trainer.average.loaded.model))
    return models


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _optimizer_out(optimizer: torch.optim.Optimizer) -> tuple[Tensors, list[JsonObject]]:
    """Return the optimizer's tensors by name, and its groups without tensors. LAMB keeps its step count as a tensor in
    the group.
    """
    whole = optimizer.state_dict()
    tensors = {
        f"optimizer.{index}.{key}": value for index, values in whole["state"].items() for key, value in values.items()
    }
    groups = [
        {key: value.item() if torch.is_tensor(value) else value for key, value in group.items() if key != "params"}
        for group in whole["param_groups"]
    ]
    return tensors, groups


def _optimizer_in(optimizer: torch.optim.Optimizer, tensors: Tensors, groups: list[JsonObject]) -> None:
    whole = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, JsonObject] = {}
    for name, tensor in _part(tensors, "optimizer.").items():
        index, key = name.split(".", 1)
        like = parameters[int(index)]
        state.setdefault(int(index), {})[key] = (
            distributed.split_like(tensor, like) if tensor.shape == like.shape else tensor
        )
    for group, saved in zip(whole["param_groups"], groups, strict=True):
        # The device decides on the fused kernel, and it may be another device now.
        group.update(saved | ({"fused": group["fused"]} if "fused" in group else {}))
    optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore all random generators of this process on exit, whatever a library draws in between."""
    kept = _generators_out(device)
    try:
        yield
    finally:
        _generators_in(*kept, device)


def _generators_out(device: torch.device) -> tuple[Tensors, JsonObject]:
    """Return the state of this process's random generators: torch's on the CPU and the device, numpy's and Python's."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "generator.torch": torch.get_rng_state(),
        "generator.python": torch.tensor(internal, dtype=torch.int64),
        "generator.numpy": torch.from_numpy(keys.astype(np.int64)),
    }
    if device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(device)
    return tensors, {"python": [version, gauss], "numpy": [str(kind), int(position), int(has_gauss), float(cached)]}


def _generators_in(tensors: Tensors, rest: JsonObject, device: torch.device) -> None:
    torch.set_rng_state(tensors["generator.torch"])
    if device.type == "cuda" and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"], device)
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["generator.python"].tolist()), gauss))
    kind, position, has_gauss, cached = rest["numpy"]
    np.random.set_state((kind, tensors["generator.numpy"].numpy().astype(np.uint32), position, has_gauss, cached))


def get_rate(run: Run, steps: int, seconds: float) -> tuple[float, str]:
    """Return samples or tokens per second over the last `steps` steps, which took `seconds`, and the unit."""
    unit = "tokens/s" if run.task.head in LANGUAGE else "samples/s"
    done = run.history.done
    samples = run.plan.position(done) - run.plan.position(done - steps)
    return samples * run.tokens_per_sample / max(seconds, 1e-9), unit


def median_step(windows: Sequence[tuple[float, float]]) -> float:
    """Return the median seconds per step over all steps, given windows of (steps, seconds)."""
    steps, spent = np.array(windows).T
    return float(np.median(np.repeat(spent / steps, steps.astype(int))))


def get_eta(run: Run) -> float:
    """Estimate the seconds left, evaluations included, from the steps and evaluations so far."""
    done = run.history.done
    if run.plan.timed:
        return (1 - run.trainer.pace.fraction(done)) * run.plan.seconds
    steps, spent = (sum(column) for column in zip(*run.history.windows, strict=True))
    left = (run.plan.steps - done) * spent / steps
    if run.history.eval_seconds:
        left += run.plan.evaluations_left(done) * statistics.fmean(run.history.eval_seconds)
    return left
