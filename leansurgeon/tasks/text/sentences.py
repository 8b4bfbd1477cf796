"""Single sentences for an encoder without a head, which is trained to reproduce its source's embeddings.

Embeddings are pooled as the model's sentence-transformers files say (`reading.pooling`), otherwise as means over real
tokens; its default prompt precedes every text.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading.pooling import default_prompt
from leansurgeon.tasks import base, disk_cache, splits, user_data
from leansurgeon.tasks.text import classification, corpus, files, vocab


class Options(base.Options):
    """Options of `sentences`.

    `data`, `eval_data` and `test_data` as in the language tasks. Splits that are not named are cut from `data`,
    sentence by sentence. Sentences are cut at `seq_len` tokens. With `prose`, packaged texts are trained on as well, so
    that other text is not forgotten; without `eval_data`, some also take part in choosing the best step, at most as
    many as of the data. They are never reported on.
    """

    data: str | list[str] = "austen"
    eval_data: str | list[str] | None = None
    test_data: str | list[str] | None = None
    text: str | list[str] = "text"
    documents: int | None = Field(None, ge=2)
    seq_len: int = Field(128, ge=4)
    prose: bool = False
    pad: Literal["longest", "max"] = "longest"
    tokenizer: vocab.Choice = "model"
    vocab_size: vocab.Size = None


class Sentences(base.Embedded, classification.TextClassification):
    """Sentences as an encoder embeds them, with special tokens and padding."""

    name = "sentences"
    Options = Options
    _paired = False

    def prepare(self, cache: Path, model_dir: Path | None, *, workers: int, say: Say) -> None:
        o = self.options
        vocab.check_length(o.seq_len, model_dir)
        corpora = corpus.find_named(o)
        key = {
            "version": 4,  # 1 omitted short rows of tables, 2 held out at random, 3 took lines of a book for sentences
            "tokenizer": [self._tokenizer_key(model_dir), self._pad_of(model_dir)],
            "split": [splits.RULE, *([name, one.key()] for name, one in corpora.items())],
            "seq_len": o.seq_len,
            **({"prompt": prompt} if (prompt := default_prompt(model_dir)) else {}),
            **({"prose": corpus.find(files.PROSE, "text").key()} if o.prose else {}),
        }

        def build(folder: Path) -> disk_cache.Info:
            lines = {side: one.texts() for side, one in corpora.items()}
            if empty := [side for side, some in lines.items() if not some]:
                raise UsageError(f"The {empty[0]} data has no sentence of more than {corpus.LEAST} characters.")
            every = [line for some in lines.values() for line in some]
            given = {side: len(some) for side, some in lines.items()}
            split = splits.split_by_content([*map(splits.hash_text, every)], None, given)
            texts = {side: [every[i] for i in chosen] for side, chosen in split.rows.items()}
            found = base.describe_split(split, "sentences")
            if o.prose:
                # None is cut, so that the reported number of cut texts refers to the user's data.
                prose = {
                    side: [line for line in lines if len(line) <= 2 * o.seq_len]
                    for side, lines in packaged_prose(every).items()
                }
                train, there = prose["train"], prose["eval"]
                most = 0 if o.eval_data else min(len(there), len(texts["eval"]))
                chosen = [there[i] for i in np.linspace(0, len(there) - 1, most).round().astype(int)]
                texts = texts | {"train": texts["train"] + train, "eval": texts["eval"] + chosen}
                also = f" {len(train):,} sentences that come with leansurgeon train, too, and {len(chosen):,} choose."
                found["held_out"] += also
            rows = {
                side: classification.Rows([prompt + line for line in lines], None, np.zeros(len(lines), dtype=np.int32))
                for side, lines in texts.items()
            }
            say(f"{self.name}: tokenising {sum(map(len, texts.values())):,} sentences ({o.tokenizer})")
            info = self._store(folder, rows, model_dir) | found
            cut = (info["cut"], o.seq_len)
            return info | {"was_read": corpus.tell(corpora, {"different sentences": len(every)}, cut)}

        self._open(cache, "sentences", key, build)
        names = [name for one in corpora.values() for name in one.names]
        self.source = user_data.name_some([*names, "prose of leansurgeon"] if o.prose else names)

    def model_overrides(self) -> base.Overrides:
        return vocab.Tokenized.model_overrides(self)

    def _particulars(self) -> base.Description:
        return vocab.Tokenized._particulars(self)


def packaged_prose(known: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return the packaged sentences by the side of their content, without those contained in `known` texts."""
    there = {splits.hash_text(piece) for text in known for piece in (text, *corpus.SENTENCE_END.split(text))}
    lines = [line for line in corpus.find(files.PROSE, "text").texts() if splits.hash_text(line) not in there]
    if len(lines) < len(splits.SIDES):
        return {side: [] for side in splits.SIDES}
    split = splits.split_by_content([*map(splits.hash_text, lines)])
    return {side: [lines[i] for i in chosen] for side, chosen in split.rows.items()}
