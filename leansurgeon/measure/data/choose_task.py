"""Choose the task of a model on a user's data, and its options, to match the checkpoint; and check that a trained head
agrees with the data at all, before anything is cut, ranked or healed by labels that may be in another order than its
outputs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leansurgeon.architectures.base import Config
from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.kind import LANGUAGE
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data import images, inputs
from leansurgeon.progress import silent
from leansurgeon.reading import yamlfile
from leansurgeon.reading.images import SKIPS
from leansurgeon.tasks import Task, make, user_data
from leansurgeon.tasks.classes import NAMED, NEW, ClassMap, map_classes, match
from leansurgeon.tasks.text import vocab
from leansurgeon.tasks.user_data import Columns, UserData

PREFIX = "task:"  # marks a task and its options in one word: `task:imagenet,data=/images,crop_pct=0.9`
WINDOW = 512  # tokens per sample of running text
LINE = 128  # tokens of a usual sentence
OWN = {"causal-lm": "bpe", "masked-lm": "wordpiece", "features": "wordpiece", "sequence-classification": "wordpiece"}
OWN_SIZE = 8_192  # of a new vocabulary, or the model's size if smaller
LEAST, MOST = 50, 200  # held-out samples that check a head
LEVEL = 0.05  # agreement reached more often than this by shuffled labels counts as chance
BETTER, SURE = 0.15, 0.001  # another order must be right more often by this share, at this level of McNemar's test
SHUFFLES = 999


@dataclass(frozen=True)
class ChosenTask:
    """A task and its options, with notes for the user on the choice."""

    name: str
    options: Mapping[str, Any]
    says: tuple[str, ...]


def choose_task(
    source: Source,
    data: UserData,
    columns: str | None,
    *,
    tokens: int = WINDOW,
    new_tokenizer: bool = False,
    measured: bool = False,
    taught: bool = False,
    labels: bool = False,
) -> ChosenTask:
    """Choose the task with which this model learns from the data, or with `measured`, is measured on it: then
    classifiers take data without labels, too. A model without a head learns from the labels of a table or of class
    folders, unless it is an embedder (`labels` includes those) or is to be `taught` by a named model. Running text is
    cut into windows of `tokens`.

    Raises `UsageError` for data that the model does not take, and for learned embeddings without a tokenizer.
    """
    kind, reads_images = source.head, takes_images(source)
    if measured and "classification" in kind and not source.has_head:
        kind = "features"  # there are no outputs to compare with labels
    labelled = kind == "features" and not (measured or taught)
    labelled = labelled and (labels or not companions.is_embedder(source.folder))
    has_images = data.kind in ("classes", "images")
    if reads_images != has_images:
        needs, has = ("images", "text") if reads_images else ("text", "images")
        raise UsageError(f"{source.slug} takes {needs}, and {data.spec} holds {has}.", user_data.HINT)
    if columns and not data.columns:
        raise UsageError(f"--columns {columns}: {data.spec} is no table.", "Leave --columns out.")
    if kind == "image-classification" and data.kind == "images" and not measured:
        raise UsageError(
            f"{data.spec} holds images without classes, and {source.slug} is a classifier.",
            "Put them into a folder for every class: DATA/cat/1.jpg, DATA/dog/2.jpg.",
        )
    if reads_images:
        if labelled and data.kind == "classes" and source.record is None:
            kind = "image-classification"
        if kind == "image-classification" and not measured:
            check_objective(source, "class")
        elif kind == "image-classification" and objective_of(source) in ("several", "score"):
            kind = "features"  # judged by its outputs
        return of_images(source, kind, data, columns)
    tokenizer = {}  # the checkpoint's own, or a vocabulary made from the data
    if new_tokenizer or not brings_tokenizer(source.folder):
        if source.learned and not new_tokenizer:
            raise UsageError(
                f"{source.slug} has learned embeddings, and its folder holds no tokenizer.",
                "Copy the tokenizer's files into it, name their folder (--set task.tokenizer=FOLDER/), or start the "
                "embeddings anew: --new-tokenizer.",
            )
        room = source.flat_config.get("vocab_size") or OWN_SIZE
        tokenizer = {"tokenizer": OWN[kind], "vocab_size": min(OWN_SIZE, int(room))}
    chosen = user_data.columns_of(data, columns, kind) if data.kind in ("table", "hub") else None
    if labelled and data.kind == "table":
        found = user_data.columns_of(data, columns, "sequence-classification")
        kind, chosen = ("sequence-classification", found) if found.labels else (kind, chosen)
    if kind == "sequence-classification":
        if not measured or (data.kind == "table" and chosen.labels):
            return of_table(source, data, chosen, tokenizer)
        kind = "features"
    options = {"data": list(data.names) if data.kind != "hub" else data.names[0]}
    options |= {f"{part}_data": list(names) for part, names in data.held_out.items()}
    if chosen:
        options["text"] = one_or_list(chosen.texts)
        options |= {"chat": True} if chosen.form == "chat" and len(chosen.texts) > 1 and kind in LANGUAGE else {}
    options |= {"seq_len": text_length(source) if kind == "features" else window(source, tokens)}
    if kind == "features" and only_length(source):
        options["pad"] = "max"
    options |= tokenizer
    return ChosenTask("sentences" if kind == "features" else kind, options, describe_tokenizer(options))


def objective_of(source: Source) -> str | None:
    """Return what a trained head predicts per sample: "class", "several" classes, or a "score"; None without such a
    head.
    """
    if not source.outputs or NAMED.get() == [NEW]:
        return None
    kind = source.config.get("problem_type")
    if source.outputs == 1 or kind == "regression":
        return "score"
    return "several" if kind == "multi_label_classification" else "class"


def check_objective(source: Source, objective: str) -> None:
    """Raise `UsageError`, with what can still be done, if a trained head does not predict what the data has for each
    sample: "class", "several" or "score".
    """
    words = {"class": "one class", "several": "several classes", "score": "a score"}
    given = objective_of(source) or objective
    if given != objective:
        raise UsageError(
            f"{source.slug} predicts {words[given]} for each sample, and the data has {words[objective]}.",
            "Calibrating and judging need no labels: `leansurgeon shrink --calibrate`, `judge`. For a new head on this "
            "data: --classes new.",
        )


def takes_images(source: Source) -> bool:
    """Return whether the source reads images."""
    plain = source.head == "features" and inputs.takes_images(source.config, source.architecture)
    return plain or source.head == "image-classification"


def choose_classes(task: Task, source: Source) -> ClassMap | None:
    """Return which outputs of the model the classes of a prepared task are, by their names, or as the user or a recipe
    says; None if the data has no classes. Raises what `map_classes` raises.
    """
    new = not source.outputs or NAMED.get() == [NEW]
    if new and getattr(task, "objective", "class") == "score":
        return ClassMap((), f"{source.slug} has no head for scores", new_head=True)
    if not (labels := task.data_classes):
        return None
    own, given = class_names(source.config), NAMED.get() or task.options.class_names
    own = own if len(own) == (source.outputs or len(own)) else []
    if source.outputs:
        ordered = task.orders_classes or not source.learned
        return map_classes(labels, own, source.outputs, given, ordered=ordered)
    lacks = "has no head" if source.head == "features" else "holds no weights of its head"
    known = given or (own if len(match(labels, own)) == len(labels) else labels)
    return ClassMap(tuple(labels if known == [NEW] else known), f"{source.slug} {lacks}", new_head=True)


def name_classes(task: Task, found: ClassMap | None, cache: Path, folder: Path | None) -> Task:
    """Return the prepared task with its classes in the order of the outputs."""
    if not found or found.new_head or list(found.names) in (task.data_classes, task.options.class_names):
        return task
    given = task.options.model_dump(exclude_unset=True) | {"class_names": list(found.names)}
    named = make(task.name, given)
    named.prepare(cache, folder, workers=1, say=silent)
    return named


def class_names(config: Config) -> list[str]:
    """Return the model's names for its outputs, in order; empty if it has none, or only LABEL_0 and so on."""
    given = config.get("id2label") or config.get("label_names") or []
    named = (
        sorted((int(number), name) for number, name in given.items()) if isinstance(given, dict) else enumerate(given)
    )
    names = [str(name) for _, name in named]
    bare = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return [] if bare else names


def window(source: Source, usual: int = WINDOW) -> int:
    """Return the tokens per window of text: the usual number within the model's positions, or the only length
    it takes.
    """
    only, most = inputs.room(source.config, source.architecture)
    return only or min(usual, most or usual)


def text_length(source: Source) -> int:
    """Return the length at which single texts are truncated: by the tokenizer, or the model's positions."""
    only, most = inputs.room(source.config, source.architecture)
    said = vocab.most_tokens(source.folder)
    return only or min((length for length in (most, said) if length), default=WINDOW)


def only_length(source: Source) -> int | None:
    """Return the only number of tokens that the source takes; None for models that take any."""
    return inputs.room(source.config, source.architecture)[0]


def has_two_stacks(source: Source) -> bool:
    """Return whether the model has an encoder and a decoder."""
    apart = any(blocks.keys for blocks in source.architecture.stages) and len(source.shape.stages) > 1
    return apart or bool(source.config.get("is_encoder_decoder"))


def one_or_list(names: Sequence[str]) -> str | list[str]:
    """Return names as a recipe writes them."""
    return names[0] if len(names) == 1 else list(names)


def describe_tokenizer(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe a tokenizer that will be trained on the data."""
    if "tokenizer" not in options:
        return ()
    return (f"A {options['tokenizer']} vocabulary of {options['vocab_size']:,} is made from the data.",)


def brings_tokenizer(folder: Path | None) -> bool:
    """Return whether there is a tokenizer next to the weights."""
    try:
        vocab.key_of("model", None, folder)
    except UsageError:
        return False
    return True


def of_table(source: Source, data: UserData, chosen: Columns | None, tokenizer: dict[str, Any]) -> ChosenTask:
    """Choose text and label columns for a text classifier."""
    if data.kind != "table" or chosen is None:
        raise UsageError(
            f"{source.slug} classifies texts, and {data.spec} has no labels.",
            "Give a table (csv, tsv, jsonl, parquet) with a column of texts and one of labels.",
        )
    if not chosen.labels:
        raise user_data.missing_label(data, chosen.texts)
    options = {"train": list(data.names), "text": chosen.texts[0], "label": one_or_list(chosen.labels)}
    options |= {part: list(names) for part, names in data.held_out.items()}
    options |= {"text_pair": chosen.texts[1]} if len(chosen.texts) > 1 else {}
    options |= {"seq_len": text_length(source)} | tokenizer
    if objective := objective_of(source):
        options["objective"] = objective
    return ChosenTask("text-classification", options, describe_tokenizer(options))


def of_images(source: Source, kind: str, data: UserData, columns: str | None) -> ChosenTask:
    """Choose the task for a folder of images, preprocessed as by the model's own processor."""
    wanted = images.folder_options(source)
    options = {"data": data.names[0], **wanted}
    options |= {"skip_damaged": True} if SKIPS.get() else {}
    if given := user_data.label_of_images(data, columns):
        options["label"] = given
    says = f"{source.slug} does not say how its images are standardised; ImageNet's mean and std are used."
    name = "images" if kind == "features" else "folder"
    return ChosenTask(name, options, () if {"mean", "std"} <= {*wanted} else (says,))


def parse_task(word: str, flag: str = "--calibrate") -> tuple[str, dict[str, Any]]:
    """Parse the value of `flag`, which begins with `PREFIX`, into name and options.

    Raises `UsageError` unless options are `key=value`.
    """
    name, *pairs = re.split(r",(?![^\[]*\])", word.removeprefix(PREFIX))  # brackets enclose a list
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{flag} {word}: '{pair}' is no option; write key=value.")
        try:
            options[key] = yamlfile.value(value, key)
        except UsageError:
            options[key] = value  # a glob such as *.txt is not YAML
    return name, options


def spell_task(name: str, options: Mapping[str, Any]) -> str:
    """Return the word that `parse_task` parses into these."""
    pairs = (f"{key}={'null' if value is None else value}" for key, value in options.items())
    return ",".join([f"{PREFIX}{name}", *pairs])


# -- a trained head and the classes of the data ---------------------------------------------------


def check_classes(source: Source, task: Task, found: ClassMap | None, *, chance: bool) -> None:
    """Check the source's predictions on held-out samples of the prepared task, whose classes are its outputs as `found`
    says. Without `chance`, only another order of the classes is an error, as for a model that a cut may have ruined.

    Skipped if the user named the classes, with fewer than LEAST samples, or without memory for the model. Raises
    `UsageError` if predictions agree with the labels no better than with shuffled ones (shuffling keeps the class
    frequencies, so always predicting the largest class is chance), or if another order, found on one half of the
    samples, fits the other half far better.
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    heard = source.learned and source.folder is not None and 8 * source.parameters.total < whole
    if getattr(task, "objective", "class") != "class" or found is None or found.new_head or NAMED.get() or not heard:
        return
    splits = sorted({"eval", *task.splits} - {"train"})
    held = [(split, row) for split in splits for row in range(task.size(split))]
    if len(held) < LEAST:
        return
    import torch
    from scipy.optimize import linear_sum_assignment
    from scipy.stats import binomtest
    from sklearn.metrics import confusion_matrix

    from leansurgeon.checkpoints.model import load

    chosen = [held[i] for i in np.random.default_rng(0).permutation(len(held))[:MOST]]
    loaded = load(source.folder)
    loaded.model.eval()
    answers, labels = [], []
    for split, row in chosen:
        batch = task.batch(split, np.array([row]), seed=0, epoch=0)
        with torch.no_grad():
            answers.append(int(loaded.forward(batch).argmax(-1)))
        labels.append(int(batch["labels"]))
    answers_N, labels_N = np.array(answers), np.array(labels)
    right = answers_N == labels_N
    told = f"{source.name} is right on {right.sum()} of {len(right)} held-out samples"
    hint = (
        "Say which output is which: --classes A,B,C (task.class_names in a recipe), the data's classes in the order of "
        "the outputs. To go on with the present order, give it. --classes new trains a new head."
    )
    # For each half, the output of each sample's class under the order that fits the other half best.
    size, half = int(max(answers_N.max(), labels_N.max())) + 1, np.arange(len(labels_N)) % 2
    other_N = labels_N.copy()
    for part in (0, 1):
        counts = confusion_matrix(labels_N[half != part], answers_N[half != part], labels=np.arange(size))
        # On ties, the order nearest to the given one.
        order = linear_sum_assignment(counts + 1e-3 * np.eye(size), maximize=True)[1]
        other_N[half == part] = order[labels_N[half == part]]
    other = other_N == answers_N
    won, lost = int((other & ~right).sum()), int((right & ~other).sum())
    more = (won - lost) / len(right)
    if more > BETTER and binomtest(won, won + lost, alternative="greater").pvalue < SURE:
        raise UsageError(
            f"{told}, and with another order of the classes it would be on {other.sum()}. {found.says}", hint
        )
    rng = np.random.default_rng(0)
    as_good = sum((answers_N == rng.permutation(labels_N)).sum() >= right.sum() for _ in range(SHUFFLES))
    if chance and (1 + as_good) / (1 + SHUFFLES) > LEVEL:
        raise UsageError(f"{told}, no better than chance. {found.says}", hint)
