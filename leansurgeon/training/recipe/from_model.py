"""A recipe for somebody's own model and data: `retrain MODEL --data PATH`.

The task follows from the model's class and head; tokenizer, image processor, lengths and classes are the checkpoint's
own. A model that surgery made learns from the model that it was cut from, where that is at hand: from its logits, or
where there is no head from its hidden states and embeddings. What is left is batch, learning rate and length, which are
gentle: healing shall not forget.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leansurgeon import tasks
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.check_classes import check_classes
from leansurgeon.measure.data.choose_task import choose_classes, choose_task, has_two_stacks, name_classes
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject, value_at
from leansurgeon.tasks import Task
from leansurgeon.tasks.classes import ClassMap
from leansurgeon.tasks.user_data import UserData
from leansurgeon.training.recipe import machine, reading, teacher
from leansurgeon.training.recipe.asked import Asked
from leansurgeon.training.recipe.durations import parse_duration
from leansurgeon.training.recipe.schema import TrainingRecipe
from leansurgeon.training.runs import folder as runfolder

WINDOW = 256  # tokens of a sample of running text
AUGMENTED = {"augment": True, "crop_scale": [0.6, 1.0], "color_jitter": 0.0, "hflip": 0.0}
LOOKS = 3  # evaluations of a timed training, the one at the start not counted
RATE = 2e-4  # learning rate at width 384, for transferred weights that a teacher guides; falls with the root of width
FRESH = 5.0  # times that, for weights that have learned nothing
ALONE = 0.5  # times that, without a teacher
FULL = {"features": 480}  # steps from which the rate is right; embeddings, which a refit has brought close, heal in
FEW = 24  # 40 steps best at 0.3 of it and in 120 at 0.5, so that it goes with the root; others heal in as few as this
ADAPTED = 5.0  # times that, for low-rank adapters
LENGTHS = {"image-classification": "3ep", "sequence-classification": "3ep"}  # without --time; others: one epoch


def make(model_dir: Path, data: UserData, asked: Asked, cache: Path, say: Say) -> TrainingRecipe:
    """The recipe, with `asked.sets` laid over it. Prepares the data, since its size decides the batch, and says what
    was chosen and why. Raises `UsageError` where model and data do not go together.
    """
    source = open_source(str(model_dir))
    if has_two_stacks(source):
        raise UsageError(
            f"{source.slug} has an encoder and a decoder, and no training task feeds both.",
            "`leansurgeon shrink --calibrate` refits it on pairs; train it further with transformers.",
        )
    kind = source.head
    said = value_at(reading.with_sets({}, asked.sets), "train", "distill")
    how = {"new_tokenizer": asked.new_tokenizer, "taught": isinstance(said, dict)}
    chosen = choose_task(source, data, asked.columns, tokens=WINDOW, **how)
    options = dict(chosen.options) | (AUGMENTED if chosen.name == "folder" else {})
    notes = (*source.pad_note, *(source.head_note if kind == "features" else ()))  # others get a new head
    for sentence in (*chosen.says, *(f"{source.slug}: {note}." for note in notes)):
        say(sentence)
    task = tasks.make(chosen.name, options)
    task.prepare(cache, model_dir, workers=1, say=say)  # whoever trains finds its data there
    for sentence in filter(None, (task.was_read, task.held_out)):
        say(sentence)
    kind = task.head
    classes = choose_classes(task, source)
    new_head = classes is not None and classes.new_head
    if classes:
        what = ", ".join(classes.names[:6]) or "scores"
        say(f"{classes.says}: it gets a new head for {what}." if new_head else classes.says)
        options |= {"class_names": list(classes.names)} if classes.names else {}
    taught_by = find_teacher(source, model_dir, task, asked, classes)
    if kind == "features" and taught_by.name is None:
        raise UsageError(
            f"{source.slug} has no head, and a model that it could learn from is not at hand: {taught_by.why}.",
            "Name one: --set train.distill.teacher=FOLDER.",
        )
    if classes and not new_head:
        judged = open_source(taught_by.place) if taught_by.place else source
        check_classes(judged, name_classes(task, classes, cache, model_dir), classes, chance=judged.record is None)
    tokens = getattr(task.options, "seq_len", None)  # of a sample; None: images
    if tokens and hasattr(task, "lengths") and task.options.pad == "longest":
        tokens = int(task.lengths("train").max())
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
    return reading.checked(raw, sets, f"--data {data.spec}")


def find_teacher(
    source: Source, model_dir: Path, task: Task, asked: Asked, classes: ClassMap | None
) -> teacher.Teacher:
    """Whom the model learns from, if anybody: as --set says it, else the model that it was cut from."""
    said = value_at(reading.with_sets({}, asked.sets), "train")
    said = said if isinstance(said, dict) else {}
    if said.get("distill", "") is None:
        return teacher.Teacher(None, "train.distill is null")
    distill = said.get("distill") or {}
    named = distill.get("teacher") if distill.get("teacher") != "source" else None
    if classes is not None and classes.new_head and named is None:
        return teacher.Teacher(None, "its head is new")
    logits = task.head != "features" and distill.get("logits", 1) != 0
    names = classes.names if classes else ()
    return teacher.find(source, model_dir, task, names, named, logits=logits, new_tokenizer=asked.new_tokenizer)


def settings(
    source: Source,
    kind: str,
    samples: int,
    tokens: int | None,
    taught_by: teacher.Teacher,
    asked: Asked,
    *,
    new_head: bool = False,
) -> JsonObject:
    """The `train` block. `samples` to train on, of `tokens` each (None: images); `new_head` where the model's is not
    kept.
    """
    width = source.shape.stages[-1].width
    here = machine.look()
    matrices = source.parameters.total - source.parameters.embeddings
    seconds = parse_duration(asked.time).seconds if asked.time else None
    batch = machine.batch(kind, matrices, tokens, here, samples, seconds)
    micro = machine.micro(source, kind, tokens, here, taught=taught_by.name is not None)
    factor = (1.0 if source.learned else FRESH) * (ALONE if source.learned and taught_by.name is None else 1.0)
    lr = RATE * (384 / width) ** 0.5 * factor * (ADAPTED if asked.lora else 1.0)
    duration = asked.time or LENGTHS.get(kind, "1ep")
    train: dict[str, Any] = {
        "duration": duration,
        "batch": batch,
        **({"micro_batch": micro} if micro < batch else {}),
        "precision": machine.precision(source, here),
        "optim": {"name": "adamw", "lr": float(f"{lr:.2g}"), "betas": [0.9, 0.98 if tokens else 0.999]},
        "schedule": {"name": "cosine", "warmup": 0.05, "min_lr": 0.0},
        "eval": {"every": evaluated_every(duration), "batch": min(micro, 64)},
        "log_every": 10 if here.gpu else 2,
    }
    if source.learned and not new_head and not any(text.startswith("train.optim.lr=") for text in asked.sets):
        train["optim"]["full_steps"] = FULL.get(kind, FEW)
    train["optim"]["weight_decay"] = 0.0 if kind == "features" else 0.01
    if taught_by.name is not None:
        train["distill"] = taught_by.settings(kind)
        if taught_by.own and not (new_head or asked.lora) and (count := teacher.untouched(source)):
            train["frozen_blocks"] = count
        train["dropout"] = 0.0  # the teacher drops nothing: what the student drops is noise between the two
    train |= {"new_tokenizer": True} if asked.new_tokenizer else {}
    train |= {"new_head": True} if new_head else {}
    if source.learned and not (new_head or asked.new_tokenizer):
        train["checkpoint"] = {"keep_start": True}
    if asked.lora:
        train["lora"] = {"rank": asked.lora}
    return train


def evaluated_every(duration: str) -> str:
    """A third of a training by the clock, an epoch of a longer one, a quarter of an epoch otherwise."""
    length = parse_duration(duration)
    if length.seconds is not None:
        return f"{max(1.0, length.seconds / LOOKS):.0f}s"
    return "1ep" if length.unit == "ep" and length.value > 1 else "0.25ep"


def name_of(model_dir: Path) -> str:
    """What a person calls the model: its folder, or of a run's `model/` the run's folder."""
    name = runfolder.called(model_dir)
    cleaned = "".join(c if c.isalnum() or c in "_.-" else "-" for c in name).strip("-.")
    return cleaned or "model"
