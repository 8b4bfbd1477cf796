"""Calibration: sample data that surgery may use, and held-out data to judge the result.

`--calibrate` names it: text files (or `austen`) for a language model, a folder of images, or any task with its options
(`task:digits`, `task:imagenet,data=/images`). The samples form three disjoint parts: `fit`, from which statistics are
taken; `guard`, which decides whether a step is kept; `heldout`, which only the proof sees. They come from the task's
splits "train", "eval" and "test", as in training; without a third split, `guard` comes from "train" and `heldout` from
"eval".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy import ndarray

from leansurgeon import tasks
from leansurgeon.checkpoints.kind import LANGUAGE
from leansurgeon.checkpoints.recorded.decided import SampleData
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data import inputs
from leansurgeon.measure.data.choose_task import (
    LINE,
    PREFIX,
    check_classes,
    choose_classes,
    choose_task,
    has_two_stacks,
    name_classes,
    objective_of,
    only_length,
    parse_task,
    spell_task,
    takes_images,
    text_length,
)
from leansurgeon.progress import Say, silent
from leansurgeon.reading.pooling import default_prompt
from leansurgeon.tasks import Task, splits, user_data
from leansurgeon.tasks.base import IGNORED
from leansurgeon.tasks.text import vocab

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Batch = dict[str, Any]
T = TypeVar("T")
U = TypeVar("U")

WORDS = {"fit": "fit", "guard": "guard", "heldout": "judge"}  # purpose of each part, in words


class Parts(NamedTuple, Generic[T]):
    """One value for each of the three disjoint parts of sample data, such as sample counts, row numbers or batches."""

    fit: T
    guard: T
    heldout: T

    def each(self, make: Callable[[str, T], U]) -> Parts[U]:
        """Apply `make` to the name and the content of every part, in order."""
        return Parts(*map(make, self._fields, self))


Batches = Parts[list[Batch]]


def describe_counts(counts: Parts[int]) -> str:
    """Describe how many samples each part has, such as "512 to fit, 128 to guard, 512 to judge"."""
    return ", ".join(f"{count} to {WORDS[part]}" for part, count in counts._asdict().items())


TOKENS = Parts(fit=65_536, guard=8_192, heldout=16_384)  # of text, cut into windows
LINES = Parts(fit=4_096, guard=512, heldout=512)  # sentences, for encoders that embed them one by one
IMAGES = Parts(fit=2_048, guard=512, heldout=2_048)
SMALL_IMAGES = Parts(fit=4_096, guard=1_024, heldout=2_048)  # at most SMALL pixels per side: a few tokens each
SMALL = 64
UNITS, LEAST_IMAGES = 3_072, 128  # MLP units of a ViT-B, which gets as many tokens as text; fewest images
KINDS = {"causal-lm": "a causal language model", "masked-lm": "a masked language model"}


@dataclass(frozen=True)
class Calibration:
    """Batches of model inputs on the CPU, with "labels" if the data has them.

    `digest` is the SHA-256 of every sample in use; `task` scores logits if the model's head fits the data.
    """

    name: str  # argument of --calibrate that reproduces it
    says: str
    digest: str
    fit: list[Batch]
    guard: list[Batch]
    heldout: list[Batch]
    task: Task | None = field(default=None, repr=False, compare=False)
    asked: int | None = None  # number of fit samples requested by the user, if any
    sources: tuple[Calibration, ...] = field(default=(), repr=False, compare=False)  # the parts of mixed data
    columns: str | None = None
    classes: str | None = None  # which outputs the classes are, in words
    split: Mapping[str, str] = field(default_factory=dict, compare=False)  # rule and digests (`splits.Split.identity`)

    def stands_apart(self, fitted: Iterable[Mapping[str, str]]) -> bool:
        """Return whether no held-out sample was used for training in other data, whose splits are `fitted`."""
        return all(splits.stands_apart(one.split, fitted) for one in self.sources or (self,))

    def mask(self, batch: Batch) -> Tensor | None:
        """Return the mask (batch, tokens) bool, True at real tokens; None if all are."""
        mask = batch.get("attention_mask")
        return None if mask is None or mask.dim() != 2 else mask.bool()

    def answer_mask(self, batch: Batch) -> Tensor | None:
        """Return the mask of the decoder's input in an encoder-decoder; for other models that is `mask`."""
        if "decoder_input_ids" not in batch:
            return self.mask(batch)
        return batch["labels"] != IGNORED if "labels" in batch else None

    def score(self, logits: Tensor, batch: Batch) -> tuple[float, float] | None:
        """Return the loss sum and count of a batch; None if the data has no labels for this head."""
        if self.task is None or "labels" not in batch:
            return None
        classes = batch["labels"].dim() == 1 and not batch["labels"].is_floating_point()
        if self.task.head not in LANGUAGE and classes and logits.shape[-1] <= int(batch["labels"].max()):
            return None  # the model's head is for other classes
        score = self.task.score(logits, batch)
        return float(score.loss_sum.detach()), float(score.loss_count)

    def as_record(self) -> SampleData:
        """Return name, digest and sample counts, as `surgery.json` stores them."""
        from leansurgeon.measure.data.batches import rows_of

        samples = {part: sum(map(rows_of, getattr(self, part))) for part in WORDS}
        sources = tuple(source.as_record() for source in self.sources)
        return SampleData(
            self.name, self.says, self.digest, samples, sources, self.asked, self.split, self.classes, self.columns
        )


def open_calibration(
    spec: str,
    source: Source,
    *,
    cache: Path,
    samples: int | None = None,
    seed: int = 0,
    say: Say = silent,
    flag: str = "--calibrate",
    columns: str | None = None,
) -> Calibration:
    """Open the data that SPEC names (the value of a command's `flag`) for this model, with the labels that its head
    predicts. `samples` is the number of fit samples; `columns` assigns roles to the columns of a table.

    Raises `UsageError` if there is no such data, too little of it, or of a kind that the model does not take.
    """
    how = {"cache": cache, "samples": samples, "seed": seed, "say": say}
    if spec.startswith(PREFIX):
        name, options = parse_task(spec, flag)
        return from_task(name, options, source, **how)
    try:
        chosen = choose_task(source, user_data.recognise(spec, flag), columns, measured=True)
        for sentence in chosen.says:
            say(sentence)
        data = from_task(chosen.name, chosen.options, source, **how)
    except UsageError as error:
        hint = error.hint  # task options cannot be set when only files are named
        if "tokenizer" in error.message:
            hint = f"Name a folder that holds the model and its tokenizer, or {flag} task:NAME,tokenizer=FOLDER."
        elif hint and any(option in hint for option in ("seq_len", "eval_fraction")):
            hint = "Give more text."
        elif hint and "option" in hint:
            hint = None
        raise UsageError(error.message, hint) from error
    return replace(data, name=spec, columns=columns)


# -- from a task ----------------------------------------------------------------------------------


def from_task(
    name: str,
    options: dict[str, Any],
    source: Source,
    *,
    cache: Path,
    samples: int | None = None,
    seed: int = 0,
    say: Say = silent,
) -> Calibration:
    """Make calibration data from a task, with the same splits as a training on it."""
    from leansurgeon.measure.data.batches import tokens_of

    if has_two_stacks(source):  # no sample data provides the decoder's input
        raise UsageError(
            f"{source.name} has an encoder and a decoder, and sample data cannot be run through both.",
            "Use --uncalibrated: the weights alone, proved on noise.",
        )
    task = tasks.make(name, options)
    check_head(task, source)
    for note in (*source.pad_note, *source.head_note):
        say(f"{source.name}: {note}.")
    task.prepare(cache, source.folder, workers=1, say=say)
    for sentence in filter(None, (task.was_read, task.held_out)):
        say(sentence)
    found = choose_classes(task, source)
    if found:
        say(found.says if not found.new_head else f"{found.says}, so its labels are not scored.")
    task = name_classes(task, found, cache, source.folder)
    check_kind(task, source)
    check_classes(source, task, found, chance=source.record is None)
    probe = task.batch("train", np.arange(1), seed=seed, epoch=0)
    check_length(probe, task, source)
    tokens = probe["input_ids"].shape[-1] if "input_ids" in probe else None
    usual = images_wanted(probe, max(stage.mlp_dim for stage in source.shape.stages))
    lines = task.lengths("train") is not None
    if lines:  # as many lines as usual, or fewer if they are longer
        longer = max(1.0, float(task.lengths("train").mean()) / LINE)
        usual = LINES.each(lambda _, count: max(4, int(count / longer)))
    elif tokens:
        usual = TOKENS.each(lambda _, count: max(4, count // tokens))
    wanted = usual._replace(fit=samples, guard=max(1, samples // 4)) if samples else usual
    third = "test" in task.splits
    parted = Parts("train", "eval" if third else "train", "test" if third else "eval")
    rows = choose(parted.each(lambda _, split: task.size(split)), wanted, seed, f"task {name}", apart=third)
    size = max(1, 2_048 // tokens) if tokens else max(8, 64 * 64 // tokens_of(probe))

    def read(part: str, chosen: ndarray) -> list[Batch]:
        split = getattr(parted, part)
        some = by_length(chosen, task.lengths(split)[chosen]) if lines else chunks(chosen, size)
        batches = (task.batch(split, c, seed=seed, epoch=0) for c in some)
        # Keys with "_" are a task's own bookkeeping for its metric.
        kept = [{k: v for k, v in batch.items() if not k.startswith("_")} for batch in batches]
        for batch in kept:  # samples differ in length
            check_length(batch, task, source)
        return kept

    parts, counts = rows.each(read), describe_counts(Parts(*map(len, rows)))
    source_of = task.describe().get("source", name)
    if damaged := task.describe().get("damaged"):
        counts += f", {damaged} damaged left out"
    says = f"{source_of}: {counts} ({f'windows of {tokens} tokens' if tokens and not lines else 'samples'})"
    made = of_parts(spell_task(name, options), says, parts, task, asked=samples, split=task.identity)
    if scores(task, source) and not (found and found.new_head):
        return replace(made, classes=found and found.says)
    bare = parts.each(lambda _, batches: [without_labels(batch) for batch in batches])
    return replace(made, task=None, **bare._asdict())  # its digest still covers the labels


def of_parts(name: str, says: str, parts: Batches, task: Task | None, **others: Any) -> Calibration:
    """Assemble a `Calibration` from its parts."""
    return Calibration(name, says, digest(parts), *parts, task, **others)


def images_wanted(probe: Batch, units: int = UNITS) -> Parts[int]:
    """Return how many images each part gets, by the size of the first ones, (B, C, S, S), for a model with this many
    MLP units. A refit solves for one row per unit, so a small model needs fewer tokens; one of `UNITS` gets as many as
    for text. Data that is not images gets as many samples as large images.
    """
    from leansurgeon.measure.data.batches import rows_of, tokens_of

    sides = [value.shape[-1] for value in probe.values() if value.ndim == 4]
    if not sides:
        return IMAGES
    if max(sides) <= SMALL:
        return SMALL_IMAGES
    tokens = TOKENS.fit * min(UNITS, units) // UNITS
    fit = min(IMAGES.fit, max(LEAST_IMAGES, tokens * rows_of(probe) // tokens_of(probe)))
    return IMAGES._replace(fit=fit, guard=fit // 4)


def scores(task: Task, source: Source) -> bool:
    """Return whether the source's head predicts the labels of this task."""
    if task.head in LANGUAGE:
        return source.head == task.head
    alike = objective_of(source) in (None, getattr(task, "objective", "class"))
    return alike and source.outputs > 0 and source.outputs == task.model_overrides().get("num_labels")


def without_labels(batch: Batch) -> Batch:
    """Return the batch without labels, for a model without a head."""
    return {key: value for key, value in batch.items() if key != "labels"}


def check_head(task: Task, source: Source) -> None:
    """Reject images for a language model, text for a vision model, and text for the wrong kind of language model."""
    head = source.head
    has_images = task.head == "image-classification" or task.name == "images"
    if has_images != takes_images(source):
        takes, has = ("images", "text") if not has_images else ("text", "images")
        raise UsageError(f"{source.name} takes {takes}, and the task {task.name} has {has}.")
    if head in LANGUAGE and task.head in LANGUAGE and head != task.head:
        raise UsageError(
            f"The task {task.name} is for {KINDS[task.head]}, and {source.name} is {KINDS[head]}.",
            f"Give task:{head}.",
        )


def check_length(batch: Batch, task: Task, source: Source) -> None:
    """Reject samples longer than the model has positions for."""
    if "input_ids" not in batch:
        return
    tokens = batch["input_ids"].shape[-1]
    if takes := inputs.describe_limit(tokens, source.config, source.architecture):
        raise UsageError(
            f"Task {task.name} has samples of {tokens:,} tokens, and {source.name} takes {takes}.",
            "Give text files, or a task with samples of that length.",
        )


def check_kind(task: Task, source: Source) -> None:
    """Reject data whose image size or vocabulary does not match the model's."""
    from leansurgeon.checkpoints.model import check_fit

    asked = task.model_overrides()
    if source.architecture.takes.any_image_size:
        asked.pop("image_size", None)
    check_fit(source.flat_config, asked)


def choose(there: Parts[int], wanted: Parts[int], seed: int, what: str, *, apart: bool) -> Parts[ndarray]:
    """Choose the sample numbers of every part, at most `wanted` out of `there`. Parts that are not `apart` share the
    training split: fit and guard both come from it. Held-out samples of a separate split are the first ones, whatever
    the seed.
    """
    if there.fit < 2 - apart or min(there) < 1:
        least = f"{there.fit} training and {min(there.guard, there.heldout)} evaluation samples"
        raise UsageError(f"The {what} has {least}; calibration needs at least 2 and 1.", "Give more data.")
    order, other = (np.random.default_rng([seed, i]).permutation(n) for i, n in ((1, there.fit), (2, there.heldout)))
    if apart:
        guards = np.random.default_rng([seed, 2]).permutation(there.guard)[: wanted.guard]
        return Parts(*map(np.sort, (order[: wanted.fit], guards)), np.arange(min(wanted.heldout, there.heldout)))
    guard = min(wanted.guard, max(1, there.fit // 5))
    fit = min(wanted.fit, there.fit - guard)
    return Parts(*map(np.sort, (order[:fit], order[fit : fit + guard], other[: wanted.heldout])))


def by_length(rows: ndarray, lengths: ndarray) -> Iterator[ndarray]:
    """Yield row numbers of samples of similar length, since padding costs as much as tokens: 32, or of long ones as
    many as have the tokens of 32 usual ones.
    """
    order = np.argsort(lengths, kind="stable")
    while len(order):
        size = 32
        while size > 1 and lengths[order[:size]][-1] * size > 32 * LINE:
            size //= 2
        yield rows[order[:size]]
        order = order[size:]


def chunks(rows: ndarray, size: int) -> Iterator[ndarray]:
    """Yield row numbers in pieces of `size`."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def tokenise(texts: list[str], tokenizer: PreTrainedTokenizerBase, source: Source) -> list[Batch]:
    """Tokenize sentences into padded batches of similar length, since padding costs as much as tokens."""
    if tokenizer.pad_token_id is None:
        tokenizer.padding_side = "right"  # right padding does not move the positions of real tokens
    rows = source.flat_config.get("vocab_size")
    pad = vocab.pad_id(tokenizer, source.config.get("pad_token_id"), rows)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    only = only_length(source)
    how = {"padding": "max_length", "max_length": only} if only else {"padding": True}
    prompt = default_prompt(source.folder)
    second = vocab.second_text(tokenizer)
    pairs = None if second is None else [second] * len(texts)
    whole = tokenizer([prompt + text for text in texts], pairs, truncation=True, max_length=text_length(source))
    # A model without token-type embeddings may add the type ids as if they were words.
    typed = source.flat_config.get("type_vocab_size")
    keys = [key for key in whole if typed or key != "token_type_ids"]
    order = sorted(range(len(texts)), key=lambda i: (len(whole["input_ids"][i]), texts[i]))
    chosen = (order[start : start + 32] for start in range(0, len(order), 32))
    batches = ({key: [whole[key][i] for i in some] for key in keys} for some in chosen)
    return [dict(tokenizer.pad(batch, return_tensors="pt", **how)) for batch in batches]


# -- what was used --------------------------------------------------------------------------------


def digest(parts: Batches) -> str:
    """Return the SHA-256 of every tensor of every batch, in order."""
    sha256 = hashlib.sha256()
    for part, batches in parts._asdict().items():
        sha256.update(part.encode())
        for batch in batches:
            for key, value in batch.items():
                sha256.update(f"{key}{tuple(value.shape)}".encode())
                sha256.update(np.ascontiguousarray(value.numpy()).tobytes())
    return sha256.hexdigest()
