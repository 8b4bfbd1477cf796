"""What the tasks on text have in common: a tokenizer, and texts that become tokens in the cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leansurgeon.tasks import base, user_data
from leansurgeon.tasks.text import vocab

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenized(base.Task):
    """A task whose options name a `tokenizer`, the model's or one made from the training text, and its `vocab_size`."""

    _tokenizer: PreTrainedTokenizerBase | None = None

    def _tokenizer_key(self, model_dir: Path | None) -> dict[str, Any]:
        """What the tokenizer follows from beside the text: part of a cache entry's key."""
        return vocab.key_of(self.options.tokenizer, self.options.vocab_size, model_dir)

    def _make_tokenizer(self, folder: Path, texts: Iterable[str], model_dir: Path | None) -> PreTrainedTokenizerBase:
        """The tokenizer, kept in the cache entry `folder`."""
        made = vocab.make(self.options.tokenizer, self.options.vocab_size, texts, model_dir)
        made.save_pretrained(folder / "tokenizer")
        return made

    def _template(self, model_dir: Path | None) -> user_data.Render:
        """How chats are written: by the template of the tokenizer, loaded for the first of them; None without one."""
        kind, loaded = self.options.tokenizer, []

        def render(chat: list[dict[str, Any]]) -> str | None:
            if kind in vocab.KINDS[1:]:
                return None
            if not loaded:
                loaded.append(vocab.make(kind, None, (), model_dir))
            return loaded[0].apply_chat_template(chat, tokenize=False) if loaded[0].chat_template else None

        return render

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the data, to be saved beside the trained model."""
        if self._tokenizer is None:
            self._tokenizer = vocab.load(self._folder / "tokenizer")
        return self._tokenizer

    def model_overrides(self) -> base.Overrides:
        """The vocabulary, where the tokenizer is the task's own."""
        o = self.options
        if o.tokenizer == "model":
            return {}
        return {"vocab_size": vocab.config_size(o.tokenizer, o.vocab_size, self._info["vocab"])}

    def _particulars(self) -> base.Description:
        o = self.options
        return {"tokenizer": o.tokenizer, "vocab_size": self._info["vocab"], "seq_len": o.seq_len}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tokenizer": None}
