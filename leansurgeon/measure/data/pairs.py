"""Sample data for models with an encoder and a decoder (T5, BART): inputs and target outputs.

A table holds both (`input` and `target`, `text` and `summary`, ...), and so does a `.tsv` file without a header,
`input<TAB>answer` on every line: data for translation, summarization, a fine-tuned T5. Other texts are turned into the
model's own pre-training objective, sentence by sentence: about 15 % of the tokens are hidden in spans of three; T5
marks the spans and outputs them (Raffel et al., arXiv 1910.10683), BART has one mask token per span and outputs the
whole sentence (Lewis et al., arXiv 1910.13461).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leansurgeon.checkpoints.kind import class_name
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data.calibration import Batch, Calibration, Parts, choose, chunks, describe_counts, of_parts
from leansurgeon.progress import Say, silent
from leansurgeon.tasks.base import IGNORED, token_score
from leansurgeon.tasks.splits import SIDES, hash_text, split_by_content
from leansurgeon.tasks.text import corpus, vocab
from leansurgeon.tasks.text import files as text_files
from leansurgeon.tasks.user_data import HINT, Columns, columns_of, is_role, name_some, recognise, tell

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

COUNTS = Parts(fit=512, guard=64, heldout=512)
INPUT_TOKENS, ANSWER_TOKENS = 256, 128
SPAN, HIDDEN = 3, 0.15
ROWS = 16  # pairs in a batch

Pair = tuple[list[int], list[int]]


class Seq2Seq:
    """Score a decoder's output against the answer: loss sum and count over its tokens."""

    head = "seq2seq"

    def score(self, logits: Tensor, batch: Batch, *, label_smoothing: float = 0.0) -> Any:
        """Return the cross-entropy of the answer's tokens."""
        return token_score(logits, batch["labels"], label_smoothing)


def open_pairs(
    spec: str,
    source: Source,
    *,
    samples: int | None = None,
    seed: int = 0,
    flag: str = "--data",
    columns: str | None = None,
    say: Say = silent,
) -> Calibration:
    """Open the pairs that SPEC names (the value of a command's `flag`).

    Raises `UsageError` if there are none, or for another kind of model.
    """
    name = class_name(source.config)
    if not name.endswith("ForConditionalGeneration"):
        raise UsageError(f"{source.name} is a {name or 'model'} with an encoder and a decoder, but no text generator.")
    if spec.startswith("task:"):
        raise UsageError(
            f"{flag} {spec}: {source.name} has an encoder and a decoder, and no task feeds both.",
            "Give a table with columns input and target, FILE.tsv with input<TAB>answer on every line, or texts.",
        )
    data, tokenizer, rng = recognise(spec, flag), vocab.own(source.folder), np.random.default_rng([seed, 4])
    if data.kind not in ("text", "table", "hub"):
        raise UsageError(f"{source.name} takes text, and {data.spec} holds images.", HINT)
    files = {side: list(some) for side, some in {"train": data.names, **data.held_out}.items()}
    headless = data.kind == "table" and not columns and all(name.lower().endswith(".tsv") for name in data.names)
    if headless and not any(map(is_role, data.columns)):
        given, names, texts = True, [Path(name).name for some in files.values() for name in some], {}
        said = {
            side: read_pairs("\n".join(text_files.read(Path(name)) for name in some), flag)
            for side, some in files.items()
        }
    else:
        roles = columns_of(data, columns, "seq2seq") if data.kind != "text" else Columns("text", ("text",))
        texts = {side: corpus.find(some, roles.texts) for side, some in files.items()}
        given, names = len(roles.texts) > 1, [name for one in texts.values() for name in one.names]
        said = {side: one.answers() if given else one.texts() for side, one in texts.items()}
    pairs = {
        side: list(encode_pairs(some, tokenizer) if given else make_hidden_pairs(some, tokenizer, rng))
        for side, some in said.items()
    }
    made, unit = [pair for some in pairs.values() for pair in some], "pairs" if given else "sentences"
    amount = {unit: len(made)}
    shown = [("input", roles.texts[:-1]), ("answer", roles.texts[-1:])] if texts and given else None
    say(corpus.tell(texts, amount, roles=shown) if texts else tell(names, amount, ()))
    split = split_by_content([number for number, _ in made], None, {side: len(some) for side, some in pairs.items()})
    say(split.sentence(unit))
    sides = Parts(*(split.rows[side] for side in SIDES))
    wanted = COUNTS._replace(fit=samples or COUNTS.fit)
    rows = choose(Parts(*map(len, sides)), wanted, seed, "text", apart=True)
    start = source.config.get("decoder_start_token_id", source.config.get("pad_token_id"))
    pad = tokenizer.pad_token_id or 0

    def read(part: str, chosen: np.ndarray) -> list[Batch]:
        taken = sorted((made[i][1] for i in getattr(sides, part)[chosen]), key=lambda pair: len(pair[0]))
        return [batch_of([taken[i] for i in at], pad, int(start or 0)) for at in chunks(np.arange(len(taken)), ROWS)]

    kind = "pairs" if given else "hidden spans"
    says = f"{name_some(names)}: {describe_counts(Parts(*map(len, rows)))} ({kind})"
    return of_parts(kind, says, rows.each(read), Seq2Seq(), split=split.identity())


def read_pairs(text: str, flag: str) -> Iterator[tuple[str, str]]:
    """Yield inputs and answers of a `.tsv` file without a header. Raises `UsageError` for a line without a tab."""
    for number, line in enumerate(text.split("\n"), 1):
        before, tab, after = line.partition("\t")
        if line.strip() and not (tab and before.strip() and after.strip()):
            raise UsageError(f"{flag}: line {number} is not input<TAB>answer.")
        if line.strip():
            yield before, after


def encode_pairs(said: Iterable[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, Pair]]:
    """Yield the content hash and the tokens of each distinct pair of input and answer."""
    for before, after in dict.fromkeys(said):
        ids = tokenizer(before, truncation=True, max_length=INPUT_TOKENS)["input_ids"]
        answer = tokenizer(text_target=after, truncation=True, max_length=ANSWER_TOKENS)["input_ids"]
        yield hash_text(before, after), (ids, answer)


def make_hidden_pairs(
    sentences: Iterable[str], tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator
) -> Iterator[tuple[int, Pair]]:
    """Yield the same for sentences with hidden spans, in the style of the tokenizer's family."""
    sentinels = tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(100)])
    names_spans = sentinels[0] is not None and sentinels[0] != tokenizer.unk_token_id
    if not names_spans and tokenizer.mask_token_id is None:
        raise UsageError(
            "The model's tokenizer has neither a mask token nor <extra_id_0>, so spans cannot be hidden.",
            "Give FILE.tsv with input<TAB>answer on every line.",
        )
    for sentence in sentences:
        # The tokenizer decides which special tokens surround it.
        ids = tokenizer(sentence, truncation=True, max_length=ANSWER_TOKENS)["input_ids"]
        special = tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)
        inner = [i for i, other in enumerate(special) if not other]
        starts = spans(len(inner), rng)
        if not starts:
            continue
        hidden = [(inner[at], inner[at] + SPAN) for at in starts]
        if names_spans:
            yield hash_text(sentence), name_spans(ids, hidden, sentinels, tokenizer.eos_token_id)
        else:
            yield hash_text(sentence), (replace_spans(ids, hidden, lambda _: tokenizer.mask_token_id), ids)


def spans(tokens: int, rng: np.random.Generator) -> list[int]:
    """Return where spans begin: one in each of as many equal sections as the share needs, at least one token apart."""
    number = max(1, round(tokens * HIDDEN / SPAN))
    section = tokens // number
    if section < SPAN + 2:
        return []
    return [i * section + int(rng.integers(1, section - SPAN)) for i in range(number)]


def replace_spans(ids: list[int], hidden: Sequence[tuple[int, int]], by: Callable[[int], int]) -> list[int]:
    """Replace every hidden span by one token."""
    tokens, at = [], 0
    for i, (start, stop) in enumerate(hidden):
        tokens += [*ids[at:start], by(i)]
        at = stop
    return tokens + ids[at:]


def name_spans(ids: list[int], hidden: Sequence[tuple[int, int]], names: Sequence[int], end: int | None) -> Pair:
    """Return T5's pair: sentinels in the input, and each sentinel followed by its span in the answer."""
    answer = [token for name, (start, stop) in zip(names, hidden, strict=False) for token in (name, *ids[start:stop])]
    end_of_text = [] if end is None else [end]
    return replace_spans(ids, hidden, names.__getitem__), [*answer, names[len(hidden)], *end_of_text]


def batch_of(pairs: Sequence[Pair], pad: int, start: int) -> Batch:
    """Return padded inputs, labels (-100 at padding), and the labels shifted by one as the decoder's input."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    given, answers = ([torch.tensor(ids, dtype=torch.long) for ids in side] for side in zip(*pairs, strict=True))
    labels = pad_sequence(answers, batch_first=True, padding_value=IGNORED)
    before = torch.full_like(labels, start)
    before[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad)
    return {
        "input_ids": pad_sequence(given, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in given], batch_first=True),
        "decoder_input_ids": before,
        "labels": labels,
    }
