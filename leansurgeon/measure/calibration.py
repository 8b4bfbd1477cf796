"""Calibration: sample data that surgery may look at, and held-out data that judges what it did.

`--calibrate` names it: text files (or `austen`) for a language model, a folder of images, or any task with its options
(`task:digits`, `task:imagenet,data=/images`). The samples fall into three parts without a sample in common: `fit`, from
which statistics are taken; `guard`, which decides whether a step is kept; `heldout`, which only the proof sees. Where
the data has a split of its own for evaluation, `heldout` comes from there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from leansurgeon.tasks import Task

Batch = dict[str, Any]

TOKENS = {"fit": 32_768, "guard": 8_192, "heldout": 16_384}  # of text, where windows are cut from it
WINDOW = 512
LINES = {"fit": 2_048, "guard": 512, "heldout": 512}  # sentences, for encoders that embed them one by one
LINE_TOKENS = 128
IMAGES = {"fit": 2_048, "guard": 512, "heldout": 2_048}
LANGUAGE = ("causal-lm", "masked-lm")


@dataclass(frozen=True)
class Calibration:
    """Batches of model inputs on the CPU, with "labels" where the data has them.

    `digest` is the SHA-256 of every sample that is used; `task` scores logits where the model's head fits the data.
    """

    name: str
    says: str
    digest: str
    fit: list[Batch]
    guard: list[Batch]
    heldout: list[Batch]
    task: Task | None = field(default=None, repr=False, compare=False)

    def mask(self, batch: Batch) -> Tensor | None:
        """(batch, tokens) bool, True at real tokens; None where all are."""
        mask = batch.get("attention_mask")
        return None if mask is None or mask.dim() != 2 else mask.bool()

    def score(self, logits: Tensor, batch: Batch) -> tuple[float, float] | None:
        """Loss sum and count of a batch; None where the data has no labels for this head."""
        if self.task is None or "labels" not in batch:
            return None
        if self.task.head not in LANGUAGE and logits.shape[-1] <= int(batch["labels"].max()):
            return None  # the model's head is for other classes
        score = self.task.score(logits, batch)
        return float(score.loss_sum), float(score.loss_count)

    def as_dict(self) -> dict[str, Any]:
        samples = {part: sum(_rows(b) for b in getattr(self, part)) for part in ("fit", "guard", "heldout")}
        return {"name": self.name, "says": self.says, "sha256": self.digest, "samples": samples}


def open_calibration(
    spec: str,
    source: Source,
    *,
    cache: Path,
    samples: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """The data that `--calibrate SPEC` names, for this model. `samples` is the number of samples to fit on.

    Raises `UsageError` where there is no such data, too little of it, or of another kind than the model takes.
    """
    head = head_of(source)
    if spec.startswith("task:"):
        name, options = parse_task(spec.removeprefix("task:"))
        return from_task(name, options, source, cache=cache, samples=samples, seed=seed, say=say)
    names = [word for word in spec.split(",") if word]
    if not names:
        raise UsageError("--calibrate names no data.", "Give text files, a folder of images or task:NAME.")
    if head == "image-classification":
        if len(names) > 1 or not Path(names[0]).is_dir():
            raise UsageError(f"{source.name} takes images, and --calibrate {spec} is no folder.", "Or give task:NAME.")
        options = {"data": names[0]}
        return from_task("imagenet", options, source, cache=cache, samples=samples, seed=seed, say=say)
    if head in LANGUAGE:
        options = {"data": names, "seq_len": window(source)}
        return from_task(head, options, source, cache=cache, samples=samples, seed=seed, say=say)
    return from_lines(names, source, samples, seed)


def head_of(source: Source) -> str | None:
    """What the source predicts: a head as tasks name it; None for an encoder without one."""
    name = (source.config.get("architectures") or [""])[0]
    if source.architecture.library == "timm" or name.endswith("ForImageClassification"):
        return "image-classification"
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal-lm"
    if name.endswith("ForMaskedLM"):
        return "masked-lm"
    takes_images = any(key in source.config for key in ("patch_size", "num_channels"))
    return "image-classification" if takes_images else None


def parse_task(text: str) -> tuple[str, dict[str, Any]]:
    """`imagenet,data=/images,crop_pct=0.9` as a task's name and its options."""
    import yaml

    name, *pairs = text.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--calibrate task:{text}: '{pair}' is no option; write key=value.")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            options[key] = value
    return name, options


def window(source: Source) -> int:
    """Tokens in one window of text: 512, or as many as the model has positions for."""
    flat = source.architecture.flat(source.config)
    keys = ("max_position_embeddings", "n_positions", "block_size")
    room = [flat[k] for k in keys if isinstance(flat.get(k), int)]
    return min([WINDOW, *room])


# -- from a task ----------------------------------------------------------------------------------


def from_task(
    name: str,
    options: dict[str, Any],
    source: Source,
    *,
    cache: Path,
    samples: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Calibration from a task's training data, held-out samples from its evaluation data."""
    from leansurgeon import tasks

    task = tasks.make(name, options)
    task.prepare(cache, source.folder, workers=1, say=say)
    check_kind(task, source)
    probe = task.batch("train", np.arange(1), seed=seed, epoch=0)
    tokens = probe["input_ids"].shape[-1] if "input_ids" in probe else None
    wanted = {part: max(4, count // tokens) for part, count in TOKENS.items()} if tokens else dict(IMAGES)
    if samples:
        wanted |= {"fit": samples, "guard": max(1, samples // 4)}
    rows = choose(task.size("train"), task.size("eval"), wanted, seed, f"task {name}")
    size = max(1, 2_048 // tokens) if tokens else 64
    parts = {}
    for part, chosen in rows.items():
        split = "eval" if part == "heldout" else "train"
        batches = (task.batch(split, c, seed=seed, epoch=0) for c in chunks(chosen, size))
        # Keys with "_" are a task's own book-keeping for its metric.
        parts[part] = [{k: v for k, v in batch.items() if not k.startswith("_")} for batch in batches]
    counts = ", ".join(f"{len(rows[part])} to {word}" for part, word in WORDS.items())
    source_of = task.describe().get("source", name)
    says = f"{source_of}: {counts} ({'windows of ' + str(tokens) + ' tokens' if tokens else 'samples'})"
    return Calibration(name, says, digest(parts), **parts, task=task)


WORDS = {"fit": "fit", "guard": "guard", "heldout": "judge"}


def check_kind(task: Task, source: Source) -> None:
    """Refuse data that the model cannot read."""
    head = head_of(source)
    images = task.head == "image-classification"
    if images != (head == "image-classification"):
        takes, has = ("images", "text") if not images else ("text", "images")
        raise UsageError(f"{source.name} takes {takes}, and the task {task.name} has {has}.")
    flat = source.architecture.flat(source.config)
    for key, other in (("image_size", "img_size"), ("num_channels", "in_chans")):
        asked, have = task.model_overrides().get(key), flat.get(key, flat.get(other))
        if asked and isinstance(have, int) and asked != have:
            raise UsageError(f"The images of task {task.name} have {key} {asked}, and {source.name} takes {have}.")
    vocabulary, have = task.model_overrides().get("vocab_size"), flat.get("vocab_size")
    if vocabulary and have and vocabulary > have:
        raise UsageError(f"Task {task.name} has {vocabulary:,} tokens, and {source.name} knows {have:,}.")


def choose(train: int, held: int, wanted: dict[str, int], seed: int, what: str) -> dict[str, np.ndarray]:
    """Sample numbers of every part: fit and guard from the training split, heldout from the evaluation split."""
    if train < 2 or held < 1:
        raise UsageError(
            f"The {what} has {train} training and {held} evaluation samples; calibration needs at least 2 and 1.",
            "Give more data.",
        )
    guard = min(wanted["guard"], max(1, train // 5))
    fit = min(wanted["fit"], train - guard)
    order = np.random.default_rng([seed, 1]).permutation(train)
    judge = np.random.default_rng([seed, 2]).permutation(held)[: wanted["heldout"]]
    return {"fit": np.sort(order[:fit]), "guard": np.sort(order[fit : fit + guard]), "heldout": np.sort(judge)}


def chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# -- from lines of text ---------------------------------------------------------------------------


def from_lines(names: list[str], source: Source, samples: int | None, seed: int) -> Calibration:
    """Sentences one by one, as an encoder without a language-modelling head sees them: padded, with special tokens."""
    from leansurgeon.tasks import text_files, vocab

    files = text_files.find(names)
    vocab.key_of("model", None, source.folder)  # refuses a folder without a tokenizer
    lines = sentences("\n".join(text_files.read(file) for file in files))
    wanted = LINES | ({"fit": samples, "guard": max(1, samples // 4)} if samples else {})
    held = min(wanted["heldout"], len(lines) // 5)
    order = np.random.default_rng([seed, 3]).permutation(len(lines))
    rows = choose(len(lines) - held, held, wanted, seed, "text")
    inner, outer = order[held:], order[:held]
    tokenizer = vocab.load(source.folder)
    parts = {}
    for part, chosen in rows.items():
        texts = [lines[i] for i in (outer if part == "heldout" else inner)[chosen]]
        parts[part] = tokenised(texts, tokenizer, min(LINE_TOKENS, window(source)))
    counts = ", ".join(f"{len(rows[part])} to {word}" for part, word in WORDS.items())
    return Calibration("lines", f"{', '.join(f.name for f in files)}: {counts} (sentences)", digest(parts), **parts)


def sentences(text: str) -> list[str]:
    """The different sentences of a text in their order: its lines, long ones cut behind full stops."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        pieces = re.split(r"(?<=[.!?])\s+", line.strip()) if len(line) > 300 else [line.strip()]
        found.update((piece, None) for piece in pieces if len(piece) > 20)
    return list(found)


def tokenised(texts: list[str], tokenizer: Any, longest: int) -> list[Batch]:
    """Padded batches of sentences of about the same length."""
    texts = sorted(texts, key=len)
    batches = []
    for start in range(0, len(texts), 32):
        rows = texts[start : start + 32]
        batches.append(dict(tokenizer(rows, padding=True, truncation=True, max_length=longest, return_tensors="pt")))
    return batches


# -- what was used --------------------------------------------------------------------------------


def digest(parts: dict[str, list[Batch]]) -> str:
    """SHA-256 of every tensor of every batch, in order."""
    found = hashlib.sha256()
    for part, batches in parts.items():
        found.update(part.encode())
        for batch in batches:
            for key, value in batch.items():
                found.update(f"{key}{tuple(value.shape)}".encode())
                found.update(np.ascontiguousarray(value.numpy()).tobytes())
    return found.hexdigest()


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))
