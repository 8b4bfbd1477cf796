"""Samples for surgery without data where a model makes none itself: the novel that comes with the package, in the form
that the model reads, or random tokens where it has no tokenizer that knows the novel's words.

Nothing of the model but its config and its tokenizer is looked at, so this serves models of any size.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data import own, pairs
from leansurgeon.measure.data.calibration import (
    KINDS,
    Calibration,
    digest,
    head_of,
    of_parts,
    only_length,
    open_calibration,
    window,
)
from leansurgeon.measure.data.parts import RANDOM, Parts, told
from leansurgeon.tasks.text.sentences import of_documents

if TYPE_CHECKING:
    import torch

NOVEL = "austen"
PAIRS = Parts(fit=256, guard=64, heldout=64)
ANSWER = 0.5  # of the tokens of a random input


def samples(source: Source, *, cache: Path, seed: int = 0) -> Calibration:
    """The novel, or random tokens. Raises `UsageError` for models that do not read text."""
    name = (source.config.get("architectures") or [""])[0]
    writes = name.endswith("ForConditionalGeneration")
    if pairs.has_two_stacks(source):
        if writes and knows_novel(source):
            with suppress(UsageError):  # a tokenizer may have no token that hides others
                data = pairs.open_pairs(NOVEL, source, seed=seed)
                words = f"spans hidden in a novel that comes with the package ({data.says})"
                return replace(data, name=NOVEL, says=words)
        return random_pairs(source, seed, writes)
    if knows_novel(source):
        with suppress(UsageError):
            data = open_calibration(NOVEL, source, cache=cache, seed=seed)
            return replace(data, says=f"a novel that comes with the package ({data.says})")
    return random_windows(source, seed)


def knows_novel(source: Source) -> bool:
    """Whether the source has a tokenizer that knows the novel's words."""
    from leansurgeon.tasks.text import corpus, vocab

    try:
        vocab.key_of("model", None, source.folder)
    except UsageError:  # no tokenizer
        return False
    return own.reads(vocab.load(source.folder), of_documents(corpus.find(NOVEL, "text").whole())[: own.READ])


def random_windows(source: Source, seed: int) -> Calibration:
    """Windows of any tokens; they are their own labels for a causal model, which then judges by its predictions."""
    head, task = head_of(source), None
    if head != "causal-lm":
        parts = own.random_tokens(source, seed)
    else:
        from leansurgeon import tasks

        length = window(source)
        counts = own.WINDOWS
        rows = drawn(source, own.total(counts), length, seed)
        parts = own.parted(rows, counts, max(1, 2048 // length)).each(
            lambda _, windows: [{"input_ids": ids, "labels": ids.clone()} for ids in windows]
        )
        task = tasks.make(head, {}) if head in KINDS else None
    return made(parts, task=task)


def random_pairs(source: Source, seed: int, writes: bool) -> Calibration:
    """Any tokens for an encoder, and any others for its decoder to read and to say."""
    length = only_length(source) or min(own.LINE_TOKENS, window(source)) // 2
    rows = drawn(source, own.total(PAIRS), length + round(ANSWER * length), seed)
    start = source.config.get("decoder_start_token_id", source.config.get("pad_token_id")) or 0

    def batch(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        labels = ids[:, length:].clone()
        before = labels.roll(1, 1)
        before[:, 0] = int(start)
        both = {"input_ids": ids[:, :length].clone(), "decoder_input_ids": before}
        return both | {"labels": labels} if writes else both

    parts = own.parted(rows, PAIRS, pairs.ROWS).each(lambda _, groups: [batch(ids) for ids in groups])
    return made(parts, task=pairs.Seq2Seq() if writes else None)


def drawn(source: Source, rows: int, length: int, seed: int) -> torch.Tensor:
    """(rows, length) tokens, each as likely as any other. Raises `UsageError` for models that read none."""
    import torch

    size = source.architecture.flat(source.config).get("vocab_size")
    if not isinstance(size, int):
        raise UsageError(f"{source.name} takes neither tokens nor images.")
    return torch.randint(size, (rows, length), generator=torch.Generator().manual_seed(seed))


def made(parts: Parts[list[dict[str, torch.Tensor]]], **rest: object) -> Calibration:
    """Calibration of these parts."""
    counts = told(parts.each(lambda _, batches: sum(map(own.rows_of, batches))))
    return of_parts(RANDOM, f"{RANDOM}: {counts}", parts, digest=digest(parts), **rest)
