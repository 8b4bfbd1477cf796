"""Which model a healed one learns from, and what of it: the model that it was cut from, where that is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from leansurgeon.checkpoints import whereabouts
from leansurgeon.checkpoints.record import Origin
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.tasks import hub

_KEY = "train.distill.teacher="


@dataclass(frozen=True)
class Teacher:
    """`name` as `train.distill.teacher` takes it; None where nobody teaches, and `why`. `own` says that it is the model
    that this one was cut from, so that its layers are known.
    """

    name: str | None
    why: str
    own: bool = False

    def settings(self, kind: str) -> JsonObject:
        """The recipe's `train.distill`."""
        if kind != "features":
            return {"teacher": self.name, "logits": 1.0}
        hidden = {"hidden": 1.0, "relative": True} if self.own else {"hidden": 0.0}
        return {"teacher": self.name, "logits": 0.0} | hidden

    def sentence(self, kind: str) -> str:
        """What is learned from, for a person."""
        if self.name is None:
            return f"It learns from the data alone: {self.why}."
        what = "hidden states and embeddings" if kind == "features" else "the answers and the logits"
        return f"It learns {what} of {self.why}."


def find(source: Source, model_dir: Path, kind: str, sets: Sequence[str], *, new_tokenizer: bool) -> Teacher:
    """The teacher of the model in `model_dir`."""
    named = next((text.removeprefix(_KEY) for text in reversed(sets) if text.startswith(_KEY)), None)
    if named not in (None, "source"):
        return Teacher(named, named)
    if source.record is None:
        return Teacher(None, "it was not cut from another model")
    origin = source.record.source
    name = origin.name
    if origin.kind == "preset":
        return Teacher(None, f"{name} is a preset, which has learned nothing")
    if new_tokenizer:
        return Teacher(None, f"{name} has another tokenizer")
    with ExitStack() as keep:
        try:
            place = at_hand(origin, model_dir)
            if place is None:
                return Teacher(None, f"{name}, from which it was cut, is not on this machine")
            opened = open_source(str(whereabouts.find(origin) or place), keep=keep)
        except LeanSurgeonError as error:
            return Teacher(None, f"{name}, from which it was cut, cannot be opened ({error.message.rstrip('.')})")
        if not opened.learned:
            return Teacher(None, f"{name}, from which it was cut, has learned nothing")
        if kind != "features" and answers(opened) != answers(source):
            return Teacher(None, f"{name}, from which it was cut, answers something else")
    return Teacher("source" if place == name else place, f"{name}, from which it was cut", own=True)


def at_hand(origin: Origin, model_dir: Path) -> str | None:
    """The source as it can be named now: by its own name where it is found by its digests, else as seen from the
    folders above the model. A model of the hub is at hand where it is cached or the hub can be reached.
    """
    name = origin.name
    if origin.kind in ("hub", "timm"):
        return name if cached(name) or hub.reachable() else None
    if whereabouts.find(origin) is not None:
        return name
    path = Path(name).expanduser()
    if path.is_absolute():
        return name if path.is_dir() else None
    above = [folder / path for folder in model_dir.resolve().parents if (folder / path).is_dir()]
    if origin.sha256:
        above = [called for folder in above if (called := whereabouts.holding(folder, origin))]
    return str(above[0]) if above else None


def cached(name: str) -> bool:
    """Whether a model's files are in the hub's cache on this machine."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name.removeprefix("timm/") if name.count("/") > 1 else name, local_files_only=True)
        return True
    except Exception:  # a class of its own for every reason
        return False


def answers(source: Source) -> tuple[str, int | None]:
    """The head and the number of its outputs: whether two models' logits mean the same."""
    return source.head, source.outputs or source.architecture.flat(source.config).get("vocab_size")


def untouched(source: Source) -> int:
    """How many of the first blocks are as the teacher has them, so that they need no healing: those before the one that
    stands for dropped ones behind it. At most half of all, and none where more than the depth was changed.
    """
    record = source.record
    if record is None or record.plan.before is None or record.plan.after is None or len(record.plan.after.stages) != 1:
        return 0
    (stage,), (was, *rest) = record.plan.after.stages, record.plan.before.stages
    kept = record.plan.layers
    if rest or replace(stage, depth=was.depth) != was or len(kept) != stage.depth:
        return 0
    own = sum(1 for number, layer in enumerate(kept) if layer == number)  # the first ones alone keep their number
    return min(max(0, own - 1), stage.depth // 2)
