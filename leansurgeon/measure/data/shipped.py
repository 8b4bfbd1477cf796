"""Samples for surgery without data where a model makes none itself: the novel that comes with the package, in the form
that the model reads, or random tokens where it has no tokenizer that knows the novel's words.

Nothing of the model but its config and its tokenizer is looked at, so this serves models of any size.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from leansurgeon import tasks
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data import own, pairs
from leansurgeon.measure.data.calibration import Calibration, open_calibration
from leansurgeon.measure.data.choose_task import has_two_stacks, only_length, window
from leansurgeon.measure.data.parts import RANDOM, Parts

PAIRS = Parts(fit=256, guard=64, heldout=64)
ANSWER = 0.5  # of the tokens of a random input


def samples(source: Source, *, cache: Path, seed: int = 0) -> Calibration:
    """The novel, or random tokens. Raises `UsageError` for models that do not read text."""
    name = (source.config.get("architectures") or [""])[0]
    writes = name.endswith("ForConditionalGeneration")
    if has_two_stacks(source):
        if writes and own.novel(source):
            with suppress(UsageError):  # a tokenizer may have no token that hides others
                data = pairs.open_pairs(own.NOVEL, source, seed=seed)
                words = f"spans hidden in a novel that comes with the package ({data.says})"
                return replace(data, name=own.NOVEL, says=words)
        return random_pairs(source, seed, writes)
    if own.novel(source):
        with suppress(UsageError):
            data = open_calibration(own.NOVEL, source, cache=cache, seed=seed)
            return replace(data, says=f"a novel that comes with the package ({data.says})")
    return random_windows(source, seed)


def random_windows(source: Source, seed: int) -> Calibration:
    """Windows of any tokens; they are their own labels for a causal model, which then judges by its predictions."""
    if source.head != "causal-lm":
        return own.made(RANDOM, RANDOM, own.random_tokens(source, seed))
    windows = own.drawn(source, sum(own.WINDOWS), window(source), seed)
    return own.made(RANDOM, RANDOM, own.their_own_labels(windows, own.WINDOWS), tasks.make(source.head, {}))


def random_pairs(source: Source, seed: int, writes: bool) -> Calibration:
    """Any tokens for an encoder, and any others for its decoder to read and to say."""
    length = only_length(source) or min(own.LINE_TOKENS, window(source)) // 2
    rows = own.drawn(source, sum(PAIRS), length + round(ANSWER * length), seed)
    start = source.config.get("decoder_start_token_id", source.config.get("pad_token_id")) or 0

    def batch(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        labels = ids[:, length:].clone()
        before = labels.roll(1, 1)
        before[:, 0] = int(start)
        both = {"input_ids": ids[:, :length].clone(), "decoder_input_ids": before}
        return both | {"labels": labels} if writes else both

    parts = own.parted(rows, PAIRS, pairs.ROWS).each(lambda _, groups: [batch(ids) for ids in groups])
    return own.made(RANDOM, RANDOM, parts, pairs.Seq2Seq() if writes else None)
