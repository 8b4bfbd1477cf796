"""Samples that a model makes itself, for surgery without data of the user's: better than a cut that sees nothing.

    causal language model   its own texts: tokens drawn one by one from what it predicts, at the temperature and among
                            the tokens that its generation_config.json names, else as predicted
    masked language model   its own fillings: windows of nothing but masks, filled in some rounds, then hidden in part
                            and filled anew (Wang and Cho, arXiv 1902.04094)
    other encoders of text  they predict nothing: sentences of the prose that comes with the package where the tokenizer
                            reads English, and some rows of tokens drawn evenly from the vocabulary; else these alone
    image models            coloured noise with the spectrum of photographs (amplitude 1 / frequency)

What a model makes says what it does on what it knows best, not on the user's data: that is better where there is any.
"""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from leansurgeon import tasks
from leansurgeon.checkpoints.kind import LANGUAGE, class_name
from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import Diverged, UsageError
from leansurgeon.measure.data import inputs
from leansurgeon.measure.data.batches import rows_of, thin
from leansurgeon.measure.data.calibration import (
    KINDS,
    Batch,
    Batches,
    Calibration,
    Parts,
    chunks,
    describe_counts,
    of_parts,
    open_calibration,
    tokenise,
)
from leansurgeon.measure.data.choose_task import LINE as LINE_TOKENS
from leansurgeon.measure.data.choose_task import brings_tokenizer, has_two_stacks, only_length, takes_images, window
from leansurgeon.measure.data.images import folder_options
from leansurgeon.measure.data.pairs import ROWS, Seq2Seq, open_pairs
from leansurgeon.progress import Say, silent
from leansurgeon.reading import jsonfile
from leansurgeon.reading.values import number
from leansurgeon.tasks import Task
from leansurgeon.tasks.base import IGNORED
from leansurgeon.tasks.splits import MADE, RULE
from leansurgeon.tasks.text import corpus, vocab
from leansurgeon.tasks.text import files as text_files
from leansurgeon.tasks.text.sentences import packaged_prose

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RANDOM = "random tokens"  # as records name data that nobody named
NAME, NOVEL = "own", "austen"  # what --calibrate calls them, and the novel
WINDOWS = Parts(fit=24, guard=8, heldout=8)  # of text that a language model writes, of 512 tokens
LINES = Parts(fit=512, guard=128, heldout=128)  # of 128 tokens, for encoders; and images
PROSE_LINES = Parts(fit=2_048, guard=256, heldout=256)  # sentences of them, of some 30 tokens
NOISE = 16  # sentences for a row of random tokens
PAIRS = Parts(fit=256, guard=64, heldout=64)  # of an input and an answer
ANSWER = 0.5  # of the tokens of a random input
LEAST = 8  # windows; fewer say too little
WORK = {"cpu": 1e13, "cuda": 1e15}  # operations that writing may take: minutes on two cores or one GPU
ROUNDS, AGAIN = 10, 4  # of filling windows of masks, and of hiding a part and filling it anew
HIDDEN = 0.15
READ, PIECES, UNKNOWN = 200, 2.0, 0.01  # sentences that are looked at; tokens a word, and unknown ones, at most
ROOM = 0.5  # of the machine's memory that weights may take
CACHE = 2**30  # bytes of keys and values that may be held while texts are written


def samples(source: Source, *, seed: int = 0, device: str = "cpu", say: Say = silent) -> Calibration:
    """Samples that `source` makes itself, in three parts as `open_calibration` gives them.

    Raises `UsageError` for models that cannot make any, or that would take too long; what loading a model raises.
    """
    if has_two_stacks(source):
        raise UsageError("it has an encoder and a decoder.")
    head, rule = source.head, MADE
    if source.architecture.section and head in LANGUAGE:
        raise UsageError("it is one tower of several.")
    if takes_images(source):
        parts, says = images(source, seed), "noise with the spectrum of photographs"
    elif head == "causal-lm":
        parts, says = texts(source, seed, device, say), f"texts that {source.name} wrote"
    elif head == "masked-lm":
        parts, says = fillings(source, seed, device, say), f"masks that {source.name} filled"
    elif known := prose(source):
        parts, rule = sentences(source, known, seed), RULE
        says = "sentences of a novel, of reports on countries, and random tokens"
    else:
        parts, says = random_tokens(source, seed), RANDOM
    # It scores; it has no data of its own.
    return make_calibration(NAME, says, parts, tasks.make(head, {}) if head in KINDS else None, rule)


def make_calibration(name: str, says: str, parts: Batches, task: Task | None = None, rule: str = MADE) -> Calibration:
    """Calibration of parts that were made, or divided by another `rule`; what it says of itself ends in their sizes."""
    counts = describe_counts(parts.each(lambda _, batches: sum(map(rows_of, batches))))
    return of_parts(name, f"{says}: {counts}", parts, task, split={"rule": rule})


# -- what a model says ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn: at a temperature, among the `top_k` most likely (None: all), and of those among as many as
    it takes to hold `top_p` of the probability; never one of `banned`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    banned: tuple[int, ...] = ()

    @classmethod
    def of(cls, source: Source) -> Drawing:
        """What the model's makers sample by, where they say it; ends of a text are not drawn, so windows are full."""
        file = source.folder / "generation_config.json"
        said = jsonfile.read_object(file) if file.exists() else {}
        config = source.flat_config
        ends = said.get("eos_token_id", config.get("eos_token_id"))
        banned = [e for e in (ends if isinstance(ends, list) else [ends]) if isinstance(e, int)]
        said = said if said.get("do_sample") is True else {}
        warm, most, share = number(said.get("temperature")), said.get("top_k"), number(said.get("top_p"))
        return cls(
            temperature=warm if warm and warm > 0 else 1.0,
            top_k=most if isinstance(most, int) and most > 0 else None,
            top_p=share if share and 0 < share < 1 else 1.0,
            banned=tuple(banned),
        )

    def draw(self, logits_NV: Tensor, chance: torch.Generator) -> Tensor:
        """(N,) tokens drawn on the CPU, so that the same seed draws the same whatever the device."""
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        if bool(torch.isnan(logits_NV).any()):
            raise Diverged("The model predicts NaN.", "Are the weights sound?")
        logits = logits_NV.detach().float().cpu() / self.temperature
        logits[:, [token for token in self.banned if token < logits.shape[-1]]] = -torch.inf
        if self.top_k is not None:
            logits = TopKLogitsWarper(self.top_k)(None, logits)
        if self.top_p < 1:
            logits = TopPLogitsWarper(self.top_p)(None, logits)
        return torch.multinomial(logits.softmax(-1), 1, generator=chance)[:, 0]


def texts(source: Source, seed: int, device: str, say: Say) -> Batches:
    """Windows of tokens that a causal model draws one after the other."""
    length = window(source)
    counts = affordable(source, WINDOWS, length, device)
    rows = sum(counts)
    say(f"{source.name} writes {rows} windows of {length} tokens itself ...")
    model = load(source.folder).model.eval().to(device)
    chance, drawing = torch.Generator().manual_seed(seed), Drawing.of(source)
    stage = source.shape.stages[0]
    each = 8 * source.shape.depth * stage.kv_heads * stage.head_dim * length
    begin, size = source.flat_config.get("bos_token_id"), source.flat_config["vocab_size"]
    begins = isinstance(begin, int) and 0 <= begin < size and begin not in drawing.banned
    whole = []
    for some in chunks(np.arange(rows), max(1, CACHE // each)):
        # The token that begins texts, or any where there is none.
        even = torch.zeros(len(some), size)
        first_B1 = torch.full((len(some), 1), begin) if begins else drawing.draw(even, chance)[:, None]
        whole.append(write_tokens(model, first_B1, length, drawing, chance))
    return their_own_labels(torch.cat(whole), counts)


def affordable(source: Source, counts: Parts[int], length: int, device: str) -> Parts[int]:
    """As many windows as can be written in minutes. Raises `UsageError` where that is next to nothing, or where the
    model would hardly fit in memory: writing needs all of it at once, which surgery does not.
    """
    size = 4 * source.parameters.total
    if size > ROOM * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise UsageError(f"{size / 1e9:.1f} GB of weights in fp32 leave no room in memory for writing texts.")
    most = WORK.get(device.split(":")[0], WORK["cuda"]) / (2 * source.parameters.total * length)
    asked = sum(counts)
    if most < LEAST:
        raise UsageError(f"{source.parameters.total:,} parameters would take too long to write texts on {device}.")
    return counts if most >= asked else counts.each(lambda _, number: max(1, int(number * most / asked)))


def write_tokens(
    model: torch.nn.Module, start_B1: Tensor, length: int, drawing: Drawing, chance: torch.Generator
) -> Tensor:
    """(B, length) tokens; keys and values are kept between the steps where the model can."""
    device = next(model.parameters()).device
    caches = "past_key_values" in inspect.signature(model.forward).parameters
    ids, past = start_B1, None
    with torch.no_grad():
        while ids.shape[1] < length:
            given = {"input_ids": (ids if past is None else ids[:, -1:]).to(device)}
            out = model(**given, past_key_values=past, use_cache=True) if caches else model(**given)
            past = out.get("past_key_values") if caches else None
            ids = torch.cat([ids, drawing.draw(out.logits[:, -1], chance)[:, None]], 1)
    return ids


def fillings(source: Source, seed: int, device: str, say: Say) -> Batches:
    """Windows that a masked model fills itself, a part of them hidden again as in its training."""
    tokenizer = vocab.own(source.folder)
    if tokenizer.mask_token_id is None:
        raise UsageError(f"The tokenizer of {source.name} has no mask token.")
    length = window(source, LINE_TOKENS)
    counts = affordable(source, LINES, length * (ROUNDS + AGAIN), device)
    rows = sum(counts)
    say(f"{source.name} fills {rows} windows of {length} masks ...")
    model = load(source.folder).model.eval().to(device)
    chance = torch.Generator().manual_seed(seed)
    size = source.flat_config["vocab_size"]
    unknown = {*range(size)} - {*tokenizer.get_vocab().values()}  # rows of the embedding that no token has
    drawing = Drawing(banned=tuple({*tokenizer.all_special_ids, *unknown}))
    filled, mask = [], tokenizer.mask_token_id
    for some in chunks(np.arange(rows), max(1, 8192 // length)):
        # A share of the masks that are left in every round, then parts of all once more.
        ids = torch.full((len(some), length), mask)
        order = torch.rand(ids.shape, generator=chance)
        turns = [(order >= i / ROUNDS) & (order < (i + 1) / ROUNDS) for i in range(ROUNDS)]
        turns += [torch.rand(ids.shape, generator=chance) < HIDDEN for _ in range(AGAIN)]
        with torch.no_grad():
            for now in turns:
                logits = model(input_ids=ids.masked_fill(now, mask).to(device)).logits
                ids[now] = drawing.draw(logits[now.to(device)], chance)
        filled.append(ids)
    whole = torch.cat(filled)
    hidden = torch.rand(whole.shape, generator=chance) < HIDDEN
    both = torch.stack([whole.masked_fill(hidden, mask), whole.masked_fill(~hidden, IGNORED)], 1)
    pairs = split_rows(both, counts, max(1, 2048 // length))
    return pairs.each(lambda _, some: [{"input_ids": b[:, 0].clone(), "labels": b[:, 1].clone()} for b in some])


# -- what needs no model --------------------------------------------------------------------------


def sentences(source: Source, tokenizer: PreTrainedTokenizerBase, seed: int) -> Batches:
    """For encoders that predict no tokens and read prose: sentences of it, by the side of their content, and noise.

    MiniLM with twice the heads has a cosine of 0.979 to the source on sentences of the Brown corpus after random
    tokens, 0.991 after the novel, and 0.917 by its weights alone.
    """
    noise, lines = random_tokens(source, seed), Parts(*packaged_prose().values())
    chance = np.random.default_rng([seed, 4])

    def both(part: str, count: int) -> list[Batch]:
        there = getattr(lines, part)
        chosen = [there[i] for i in chance.permutation(len(there))[:count]]
        two = (tokenise(chosen, tokenizer, source), thin(getattr(noise, part), max(1, len(chosen) // NOISE)))
        return [batch for pair in zip_longest(*two) for batch in pair if batch is not None]

    return PROSE_LINES.each(both)


def prose(source: Source) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, where it knows the words of the texts that come with the package."""
    if not brings_tokenizer(source.folder):
        return None
    tokenizer, lines = vocab.load(source.folder), corpus.find(text_files.PROSE, "text").texts()
    return tokenizer if reads(tokenizer, lines[:READ]) else None


def reads(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> bool:
    """Whether a tokenizer knows the words of these lines: few pieces a word, hardly any that it does not know."""
    ids = [token for line in tokenizer(lines, add_special_tokens=False)["input_ids"] for token in line]
    words = sum(len(line.split()) for line in lines)
    return len(ids) <= PIECES * words and ids.count(tokenizer.unk_token_id) <= UNKNOWN * len(ids)


def random_tokens(source: Source, seed: int) -> Batches:
    """Rows of any tokens, for encoders that predict none."""
    ids = draw_tokens(source, sum(LINES), only_length(source) or window(source, LINE_TOKENS) // 2, seed)
    return split_rows(ids, LINES, 32).each(lambda _, batches: [{"input_ids": batch} for batch in batches])


def draw_tokens(source: Source, rows: int, length: int, seed: int) -> Tensor:
    """(rows, length) tokens, each as likely as any other. Raises `UsageError` for models that read none."""
    size = source.flat_config.get("vocab_size")
    if not isinstance(size, int):
        raise UsageError(f"{source.name} takes neither tokens nor images.")
    return torch.randint(size, (rows, length), generator=torch.Generator().manual_seed(seed))


def images(source: Source, seed: int) -> Batches:
    """Images whose mean is 0 and deviation 1, as standardised ones: neighbouring pixels and channels are alike."""
    channels, height, width = inputs.image_size(source.config, source.architecture)
    if side := folder_options(source).get("image_size"):  # what its processor makes of images
        height = width = side
    rng = np.random.default_rng(seed)
    across = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    falls = 1 / np.maximum(across, 1 / max(height, width))

    def draw_pixels(_: str, count: int) -> list[Batch]:
        noise = rng.standard_normal((count, channels + 1, height, width))
        noise = np.fft.irfft2(np.fft.rfft2(noise) * falls, s=(height, width))
        mixed = noise[:, :1] + 0.5 * noise[:, 1:]  # what all channels share, and what is their own
        mixed -= mixed.mean((1, 2, 3), keepdims=True)
        mixed /= mixed.std((1, 2, 3), keepdims=True) + 1e-9
        pixels = torch.from_numpy(mixed.astype(np.float32))
        return [{"pixel_values": pixels[rows]} for rows in chunks(np.arange(count), 64)]

    return LINES.each(draw_pixels)


# -- room and parts -------------------------------------------------------------------------------


def their_own_labels(windows: Tensor, counts: Parts[int]) -> Batches:
    """Windows of text (N, T) by part, as a causal model is called with them."""
    batches = split_rows(windows, counts, max(1, 2048 // windows.shape[1]))
    return batches.each(lambda _, some: [{"input_ids": ids, "labels": ids.clone()} for ids in some])


def split_rows(rows: Tensor, counts: Parts[int], size: int) -> Parts[list[Tensor]]:
    """Rows by part, in batches of `size`."""
    left = iter(rows.split(list(counts)))
    return counts.each(lambda *_: list(next(left).split(size)))


# -- what comes with the package -------------------------------------------------------------------------------------


def make_shipped_samples(source: Source, *, cache: Path, seed: int) -> Calibration:
    """For surgery without data where a model makes none itself: the novel that comes with the package, in the form that
    the model reads, or random tokens where it has no tokenizer that knows the novel's words. Only config and tokenizer
    are looked at, so this serves models of any size. Raises `UsageError` for models that do not read text.
    """
    writes = class_name(source.config).endswith("ForConditionalGeneration")
    if has_two_stacks(source):
        if writes and prose(source):
            with suppress(UsageError):  # a tokenizer may have no token that hides others
                data = open_pairs(NOVEL, source, seed=seed)
                words = f"spans hidden in a novel that comes with the package ({data.says})"
                return replace(data, name=NOVEL, says=words)
        # Any tokens for the encoder, and any others for the decoder to read and to say.
        length = only_length(source) or window(source, LINE_TOKENS) // 2
        rows = draw_tokens(source, sum(PAIRS), length + round(ANSWER * length), seed)
        start = source.config.get("decoder_start_token_id", source.config.get("pad_token_id")) or 0

        def batch(ids: Tensor) -> Batch:
            labels = ids[:, length:].clone()
            before = labels.roll(1, 1)
            before[:, 0] = int(start)
            both = {"input_ids": ids[:, :length].clone(), "decoder_input_ids": before}
            return both | {"labels": labels} if writes else both

        parts = split_rows(rows, PAIRS, ROWS).each(lambda _, groups: [batch(ids) for ids in groups])
        return make_calibration(RANDOM, RANDOM, parts, Seq2Seq() if writes else None)
    if prose(source):
        with suppress(UsageError):
            data = open_calibration(NOVEL, source, cache=cache, seed=seed)
            return replace(data, says=f"a novel that comes with the package ({data.says})")
    return random_windows(source, seed)


def random_windows(source: Source, seed: int) -> Calibration:
    """Windows of any tokens; they are their own labels for a causal model, which then judges by its predictions."""
    if source.head != "causal-lm":
        return make_calibration(RANDOM, RANDOM, random_tokens(source, seed))
    windows = draw_tokens(source, sum(WINDOWS), window(source), seed)
    return make_calibration(RANDOM, RANDOM, their_own_labels(windows, WINDOWS), tasks.make(source.head, {}))
