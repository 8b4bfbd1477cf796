"""Choose the teacher of a model that is healed, the model that it was cut from if that is available, and what to learn
from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from leansurgeon.architectures.base import Config
from leansurgeon.checkpoints import whereabouts
from leansurgeon.checkpoints.kind import LANGUAGE
from leansurgeon.checkpoints.record import Origin
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.measure.data.calibration import check_kind
from leansurgeon.measure.data.choose_task import brings_tokenizer, class_names
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.tasks import Task
from leansurgeon.tasks.classes import match
from leansurgeon.tasks.text import vocab

HINT = "Name a trained model folder: --set train.distill.teacher=FOLDER."


@dataclass(frozen=True)
class Teacher:
    """`name` is the value of `train.distill.teacher`; None without a teacher, with the reason in `why`. `own` says that
    it is the model that this one was cut from, so that its layers are known.
    """

    name: str | None
    why: str
    own: bool = False
    place: str | None = None  # the path or name that opens it, if this model was cut from it

    def settings(self, kind: str) -> JsonObject:
        """Return the recipe's `train.distill`."""
        if kind != "features":
            return {"teacher": self.name, "logits": 1.0}
        hidden = {"hidden": 3.0, "relative": True} if self.own else {"hidden": 0.0}
        return {"teacher": self.name, "logits": 0.0} | hidden

    def sentence(self, kind: str) -> str:
        """Describe what the model learns from."""
        if self.name is None:
            return f"It learns from the data alone: {self.why}."
        labels = "text" if kind in LANGUAGE else "labels"
        what = "the hidden states and embeddings" if kind == "features" else f"the {labels}, and the logits"
        return f"It learns {what} of {self.why}."


def find(
    source: Source,
    task: Task,
    classes: Sequence[str],
    named: str | None,
    *,
    logits: bool,
    new_tokenizer: bool,
) -> Teacher:
    """Find the teacher of a model for this task: the `named` one, else the model that it was cut from.

    Raises `UsageError` if the named one cannot teach it.
    """
    if named is not None:
        check_teacher(open_teacher(named), task, classes, source.config, logits=logits)
        return Teacher(named, named)
    if source.record is None:
        return Teacher(None, "it was not cut from another model")
    origin = source.record.source
    name = origin.name
    if origin.kind == "preset":
        return Teacher(None, f"{name} is a preset, which is untrained")
    if new_tokenizer:
        return Teacher(None, f"{name} has another tokenizer")
    with ExitStack() as keep:
        try:
            found = at_hand(origin)
            if found is None:
                return Teacher(None, f"{name}, from which it was cut, is not on this machine")
            opened = open_source(found, keep=keep)
        except LeanSurgeonError as error:
            return Teacher(None, f"{name}, from which it was cut, cannot be opened ({error.message.rstrip('.')})")
        if not opened.learned:
            return Teacher(None, f"{name}, from which it was cut, is untrained")
        try:
            check_teacher(opened, task, classes, source.config, logits=logits, own=True)
        except UsageError as error:
            return Teacher(None, error.message.rstrip("."))
    return Teacher("source", f"{name}, from which it was cut", own=True, place=found)


def open_teacher(name: str) -> Source:
    """Open a teacher by its name. Raises `UsageError` if it is missing or untrained."""
    opened = open_source(name)
    if not opened.learned or opened.folder is None:
        raise UsageError(f"The teacher {name} is untrained.", HINT)
    return opened


def check_teacher(
    teacher: Source, task: Task, classes: Sequence[str], student: Config, *, logits: bool, own: bool = False
) -> list[int] | None:
    """Return which of the teacher's outputs are the student's, in the student's order; None if they are the same, or
    `logits` is False.

    `student` is the student's config, and `classes` are the data's names of its outputs. `own` says that the student
    was cut from the teacher. Raises `UsageError` if the teacher takes other inputs than the student or predicts other
    things.
    """
    check_kind(task, teacher)
    if (tokenizer := task.tokenizer()) is not None:
        if brings_tokenizer(teacher.folder):
            theirs = vocab.load(teacher.folder)
            if not vocab.same_tokens(theirs, tokenizer):
                raise UsageError(
                    f"The teacher {teacher.name} has another tokenizer ({len(theirs):,} tokens; the model's has "
                    f"{len(tokenizer):,}): the same ids are other words to it.",
                    "Name a teacher with the model's tokenizer, or learn from the data alone: leave train.distill out.",
                )
        elif not own:
            raise UsageError(
                f"The folder of the teacher {teacher.name} holds no tokenizer, so its tokens are not known.", HINT
            )
    if not logits:
        return None
    if teacher.head != task.head or not teacher.has_head:
        raise UsageError(f"The teacher {teacher.name} was not trained for {task.head}: its head would be new.", HINT)
    count = len(classes) or task.model_overrides().get("num_labels")
    if task.head in LANGUAGE or not count:
        return None
    theirs = class_names(teacher.config)
    ours = [names for names in (class_names(student), classes) if len(names) == count]
    for names in ours if theirs else ():
        if len(places := match(names, theirs)) == count:
            return [places[name] for name in names]
    if teacher.outputs == count and not (theirs and ours):
        return None
    has, wants = (f" ({', '.join(names[:6])})" if names else "" for names in (theirs, ours[0] if ours else ()))
    raise UsageError(
        f"The teacher {teacher.name} has {teacher.outputs} classes{has} and the model {count}{wants}, so its "
        "logits do not fit.",
        "Name a teacher of the same classes, or learn from the data alone: leave train.distill out.",
    )


def at_hand(origin: Origin) -> str | None:
    """Return a path or name that opens the source, or None: the folder with its digests, or a hub model if it is
    cached.
    """
    if folder := whereabouts.find(origin):
        return str(folder)
    if origin.kind not in ("hub", "timm"):
        return None
    from huggingface_hub import snapshot_download

    name = origin.name
    try:
        if name.startswith("timm/") and name.count("/") == 1:
            from timm.models import get_pretrained_cfg

            name = get_pretrained_cfg(name.removeprefix("timm/")).hf_hub_id  # with its tag
        snapshot_download(name.removeprefix("timm/") if name.count("/") > 1 else name, local_files_only=True)
    except Exception:  # it has an exception class for every reason
        return None
    return origin.name


def count_untouched(source: Source) -> int | None:
    """Return how many of the first blocks equal the teacher's, so that they need no healing: those before the first
    block that replaces dropped ones behind it.

    At most half of all; 0 if more than the depth was changed, so that only the embeddings are the teacher's; None if
    not even they are.
    """
    record = source.record
    if record is None or record.plan.before is None or record.plan.after is None or record.plan.init != "transfer":
        return None
    widths = [[stage.width for stage in shape.stages] for shape in (record.plan.before, record.plan.after)]
    if widths[0] != widths[1]:
        return None
    if len(record.plan.after.stages) != 1:
        return 0
    (stage,), (was, *rest) = record.plan.after.stages, record.plan.before.stages
    kept = record.plan.layers
    if rest or replace(stage, depth=was.depth) != was or len(kept) != stage.depth:
        return 0
    own = sum(1 for number, layer in enumerate(kept) if layer == number)  # only the first ones keep their index
    return min(max(0, own - 1), stage.depth // 2)
