"""Tokenizers of single words, and sentences of them, for tests that need text and no real vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WORDS = [f"w{i}" for i in range(50)]


def words(folder: Path, mask: str | None = None) -> None:
    """A tokenizer of single words beside a model of 61 tokens; `mask` is the token that hides others."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in range(8))]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", mask_token=mask
    ).save_pretrained(folder)


def sentence_encoder(saved, folder: Path, sentences: int) -> tuple[Path, Path]:
    """A BERT without a head, which takes sentences one by one, and a file of `sentences` of 8 to 30 words each."""
    model_folder, model = saved("bert")
    model.bert.save_pretrained(model_folder)
    words(model_folder)
    rng = np.random.default_rng(0)
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(rng.choice(WORDS, rng.integers(8, 31))) for _ in range(sentences)))
    return model_folder, text


def crammed_words(folder: Path, *, pair: bool = True) -> None:
    """A tokenizer with the templates of Crammed BERT's: `<cls>` and `<sep>` for pairs alone (or for nothing)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ("pad", "unk", "cls", "sep", "mask")
    vocabulary = {word: i for i, word in enumerate([*(f"<{name}>" for name in names), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A",
        pair="<cls>:0 $A:0 <sep>:0 $B:0 <sep>:0" if pair else "$A $B",
        special_tokens=[("<cls>", 2), ("<sep>", 3)],
    )
    special = {f"{name}_token": f"<{name}>" for name in names}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
