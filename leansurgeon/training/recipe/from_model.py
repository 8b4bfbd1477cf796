"""Make a recipe for the user's own model and data: `retrain MODEL --data PATH`.

The task follows from the model's class and head; tokenizer, image processor, lengths and classes are the checkpoint's
own. A model that surgery made learns from the model that it was cut from, if that is available: from its logits or,
without a head, from its hidden states and embeddings. Batch, learning rate and length are chosen conservatively:
healing must not forget. Batches follow from the total memory and nominal speed of this machine, not from its current
load, so that repeating a command gives the same recipe.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leansurgeon import tasks
from leansurgeon.checkpoints.kind import LANGUAGE
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.choose_task import (
    check_classes,
    choose_classes,
    choose_task,
    has_two_stacks,
    name_classes,
)
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject, value_at
from leansurgeon.tasks import Task
from leansurgeon.tasks.classes import ClassMap
from leansurgeon.tasks.user_data import UserData
from leansurgeon.training.recipe import reading, teacher
from leansurgeon.training.recipe.durations import parse_duration
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import folder as runfolder


@dataclass(frozen=True)
class RecipeInputs:
    """The arguments that determine the recipe of a training: data or recipe name, and overrides."""

    data: str | None = None
    time: str | None = None
    columns: str | None = None
    new_tokenizer: bool = False
    recipe: str | None = None
    sets: tuple[str, ...] = ()
    resume: str = "never"
    lora: int | None = None
    # for an experiment's arms: with labels all fine-tune, without them all learn from the source
    compares: bool = False


STEP = {"cpu": 1e12, "gpu": 5e13}  # operations that an optimizer step should take
SPEED = {"cpu": 1e11, "gpu": 2e13}  # operations per second, of a small machine
STEPS = 40  # that a timed training should have at least
PATCHES = 197  # tokens of an image, nearly always
TOKENS = {"cpu": (512, 4_096), "gpu": (4_096, 65_536)}  # least and most per step
SENTENCES = {"cpu": 64, "gpu": 256}
CLASSIFIED = {"cpu": 32, "gpu": 64}
SHARE = 0.5  # of the memory that one step may take


@dataclass(frozen=True)
class Machine:
    """`memory` is the total memory of the GPU, or of the machine, in bytes."""

    gpu: bool
    memory: int
    bf16: bool

    @property
    def word(self) -> str:
        return "gpu" if self.gpu else "cpu"


def choose_precision(source: Source, here: Machine) -> str:
    """Choose bf16 where the hardware multiplies in it, on a CPU only if matrices are large enough to gain from it; else
    fp32.
    """
    from leansurgeon.measure.costs.precision import NARROW

    wide = max(stage.width for stage in source.shape.stages) >= NARROW
    return "bf16" if here.bf16 and (here.gpu or wide) else "fp32"


def choose_batch(
    kind: str, matrices: int, tokens: int | None, here: Machine, samples: int, seconds: float | None = None
) -> int:
    """Return the samples of an optimizer step, a power of two: as many as fill a step of `STEP` operations, but few
    enough for 8 steps per epoch and some `STEPS` in `seconds`.

    `matrices` parameters are multiplied with every token, forward, backward and once more by the teacher.
    """
    a_token = 8 * max(1, matrices)
    worth = STEP[here.word] if seconds is None else min(STEP[here.word], seconds * SPEED[here.word] / STEPS)
    if kind in ("causal-lm", "masked-lm"):
        least, most = TOKENS[here.word]
        least = least if worth == STEP[here.word] else 1
        wanted = min(most, max(least, worth / a_token)) / (tokens or 1)
    elif kind == "features" and tokens:
        wanted = SENTENCES[here.word]
    else:
        wanted = CLASSIFIED[here.word] * (1 if tokens else 2)
    if seconds is not None:
        wanted = min(wanted, seconds * SPEED[here.word] / STEPS / (a_token * (tokens or PATCHES)))
    return power_of_two(min(wanted, max(1, samples // 8)))


def choose_micro_batch(source: Source, kind: str, tokens: int | None, here: Machine, *, taught: bool) -> int:
    """Return how many samples go through the model at once, a power of two: those that fit beside weights, gradients,
    moments and the teacher.
    """
    weights = source.parameters.total * (16 + 4 * taught)
    room = max(0.0, SHARE * here.memory - weights)
    flat, count = source.flat_config, tokens
    if not count:  # the patches of an image, plus a class token
        size, patch = flat.get("image_size", flat.get("img_size", 224)), flat.get("patch_size", 16)
        side, step = (value[0] if isinstance(value, list | tuple) else value for value in (size, patch))
        count = (int(side) // max(1, int(step))) ** 2 + 1
    # The activations of a sample: for a token in a layer, some 20 numbers per width and 4 per MLP unit; attention
    # weights, as if no fused kernel saved them; and logits in several fp32 copies.
    layers = sum(stage.depth * (20 * stage.width + 4 * stage.mlp_dim) for stage in source.shape.stages)
    scores = sum(stage.depth * stage.heads for stage in source.shape.stages) * count
    words = flat.get("vocab_size") if kind in ("causal-lm", "masked-lm") else 0
    logits = (words or 0) * (8 if taught else 4)
    return power_of_two(max(1.0, min(1_024.0, room / (4 * count * (layers + scores + logits)))))


def power_of_two(value: float) -> int:
    """Return the largest power of two that is not above `value`, at least 1."""
    return 1 << max(0, int(value).bit_length() - 1)


WINDOW = 256  # tokens of a sample of running text
AUGMENTED = {"augment": True, "crop_scale": [0.6, 1.0], "color_jitter": 0.0, "hflip": 0.0}
LOOKED_AT = 1_024  # sentences whose embeddings choose the best step
LOOKS = 3  # evaluations of a timed training, without the one at the start
RATE = 2e-4  # learning rate at width 384, for transferred weights with a teacher; falls with the root of width
EMBEDDED = 6e-4  # the same for text embeddings: MiniLM heals best at 4e-4 in 126 steps, at 8e-4 in 350 and 1,400
FRESH = 5.0  # times that, for untrained weights
ALONE = 0.5  # times that, without a teacher
FULL = {"features": 480}  # steps from which the full rate is right: fewer steps heal best with less, by the square root
FEW = 24  # for the others this few are enough
ADAPTED = 5.0  # times that, for low-rank adapters
LENGTHS = {"image-classification": "3ep", "sequence-classification": "3ep"}  # without --time; others: one epoch


def make_recipe(model_dir: Path, data: UserData, asked: RecipeInputs, cache: Path, say: Say) -> TrainingRecipe:
    """Return the recipe, with `asked.sets` applied. Prepares the data, since its size determines the batch, and reports
    what was chosen and why.

    Raises `UsageError` if model and data do not fit together.
    """
    source = open_source(str(model_dir))
    if has_two_stacks(source):
        raise UsageError(
            f"{source.slug} has an encoder and a decoder, and no training task feeds both.",
            "`leansurgeon shrink --calibrate` refits it on pairs; train it further with transformers.",
        )
    kind, said = source.head, reading.with_sets({}, asked.sets)
    taught = isinstance(value_at(said, "train", "distill"), dict)
    how = {"new_tokenizer": asked.new_tokenizer, "taught": taught, "labels": asked.compares}
    chosen = choose_task(source, data, asked.columns, tokens=WINDOW, **how)
    options = dict(chosen.options) | (AUGMENTED if chosen.name == "folder" else {})
    if chosen.name == "sentences" and not asked.compares and "tokenizer" not in options:
        from leansurgeon.measure.data import own

        options |= {"prose": True} if value_at(said, "task", "prose") is not False and own.prose(source) else {}
    notes = (*source.pad_note, *(source.head_note if kind == "features" else ()))  # others get a new head
    for sentence in (*chosen.says, *(f"{source.slug}: {note}." for note in notes)):
        say(sentence)
    task = tasks.make(chosen.name, options)
    task.prepare(cache, model_dir, workers=1, say=say)  # the training will find the data there
    for sentence in filter(None, (task.was_read, task.held_out)):
        say(sentence)
    kind = task.head
    classes = choose_classes(task, source)
    new_head = classes is not None and classes.new_head
    if classes:
        what = ", ".join(classes.names[:6]) or "scores"
        say(f"{classes.says}: it gets a new head for {what}." if new_head else classes.says)
        options |= {"class_names": list(classes.names)} if classes.names else {}
    taught_by = find_teacher(source, task, asked, classes)
    if kind == "features" and taught_by.name is None:
        raise UsageError(
            f"{source.slug} has no head, and a model that it could learn from is not at hand: {taught_by.why}.",
            "Name one: --set train.distill.teacher=FOLDER.",
        )
    if classes and not new_head:
        judged = open_source(taught_by.place) if taught_by.place else source
        check_classes(judged, name_classes(task, classes, cache, model_dir), classes, chance=judged.record is None)
    tokens = getattr(task.options, "seq_len", None)  # of a sample; None: images
    if (lengths := task.lengths("train")) is not None and task.options.pad == "longest":
        tokens = int(lengths.max())
    train = settings(source, kind, task.size("train"), tokens, taught_by, asked, new_head=new_head)
    raw = {
        "version": 1,
        "name": f"{name_of(model_dir)}-{data.slug}",
        "kind": "training",
        "task": {"name": chosen.name} | options,
        "train": train,
        "measure": None,
    }
    say(taught_by.sentence(kind))
    sets = [text for text in asked.sets if taught_by.name is not None or not text.startswith("train.distill")]
    return reading.check_recipe(raw, sets, f"--data {data.spec}")


def find_teacher(source: Source, task: Task, asked: RecipeInputs, classes: ClassMap | None) -> teacher.Teacher:
    """Choose the teacher, if any: the one that --set names, else the model that this one was cut from."""
    said = value_at(reading.with_sets({}, asked.sets), "train")
    said = said if isinstance(said, dict) else {}
    if said.get("distill", "") is None:
        return teacher.Teacher(None, "train.distill is null")
    if asked.compares:
        taught = task.head in (*LANGUAGE, "features")
        return teacher.Teacher(
            "source" if taught else None, f"{source.slug}" if taught else "labels decide", own=taught
        )
    distill = said.get("distill") or {}
    named = distill.get("teacher") if distill.get("teacher") != "source" else None
    if classes is not None and classes.new_head and named is None:
        return teacher.Teacher(None, "its head is new")
    logits = task.head != "features" and distill.get("logits", 1) != 0
    names = classes.names if classes else ()
    return teacher.find(source, task, names, named, logits=logits, new_tokenizer=asked.new_tokenizer)


def settings(
    source: Source,
    kind: str,
    samples: int,
    tokens: int | None,
    taught_by: teacher.Teacher,
    asked: RecipeInputs,
    *,
    new_head: bool = False,
) -> JsonObject:
    """Return the `train` block for `samples` training samples of `tokens` each (None: images). `new_head`: the head is
    replaced.
    """
    import torch

    from leansurgeon.measure.costs.precision import has_bf16

    width = source.shape.stages[-1].width
    here = Machine(False, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), has_bf16("cpu"))
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        here = Machine(True, memory, torch.cuda.is_bf16_supported())
    matrices = source.parameters.total - source.parameters.embeddings
    seconds = parse_duration(asked.time).seconds if asked.time else None
    batch = choose_batch(kind, matrices, tokens, here, samples, seconds)
    micro = choose_micro_batch(source, kind, tokens, here, taught=taught_by.name is not None)
    factor = (1.0 if source.learned else FRESH) * (ALONE if source.learned and taught_by.name is None else 1.0)
    rate = EMBEDDED if kind == "features" and tokens and source.learned and not asked.lora else RATE
    lr = rate * (384 / width) ** 0.5 * factor * (ADAPTED if asked.lora else 1.0)
    duration = asked.time or LENGTHS.get(kind, "1ep")
    length = parse_duration(duration)
    every = "1ep" if length.unit == "ep" and length.value > 1 else "0.25ep"
    if length.seconds is not None:
        every = f"{max(1.0, length.seconds / LOOKS):.0f}s"
    train: dict[str, Any] = {
        "duration": duration,
        "batch": batch,
        **({"micro_batch": micro} if micro < batch else {}),
        "precision": choose_precision(source, here),
        "optim": {"name": "adamw", "lr": float(f"{lr:.2g}"), "betas": [0.9, 0.98 if tokens else 0.999]},
        "schedule": {"name": "cosine", "warmup": 0.05, "min_lr": 0.0},
        "eval": {"every": every, "batch": min(micro, 64)},
        "log_every": 10 if here.gpu else 2,
        **({"order": "by-length"} if kind in ("features", "sequence-classification") else {}),
    }
    if kind == "features" and not asked.time:  # a part shows the best step; a timed training evaluates as many as fit
        train["eval"]["samples"] = LOOKED_AT
    if source.learned and not new_head and not any(text.startswith("train.optim.lr=") for text in asked.sets):
        train["optim"]["full_steps"] = FULL.get(kind, FEW)
    train["optim"]["weight_decay"] = 0.0 if kind == "features" else 0.01
    if taught_by.name is not None:
        train["distill"] = taught_by.settings(kind)
        healed = taught_by.own and not (new_head or asked.lora or asked.compares)
        if healed and (count := teacher.count_untouched(source)) is not None:
            train |= {"frozen_embeddings": True} | ({"frozen_blocks": count} if count else {})
        # the teacher has no dropout: dropout in the student would only add noise to the difference
        train["dropout"] = 0.0
    train |= {"new_tokenizer": True} if asked.new_tokenizer else {}
    train |= {"new_head": True} if new_head else {}
    if source.learned and not (new_head or asked.new_tokenizer):
        train["checkpoint"] = {"keep_start": True}
    if asked.lora:
        train["lora"] = {"rank": asked.lora}
    return train


def name_of(model_dir: Path) -> str:
    """Return the name that a user calls the model: its folder, or for a run's `model/` the run's folder."""
    name = runfolder.display_name(model_dir)
    cleaned = "".join(c if c.isalnum() or c in "_.-" else "-" for c in name).strip("-.")
    return cleaned or "model"
