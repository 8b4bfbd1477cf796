"""Tokenizers of the text tasks: the model's own, or a small one made from the training text.

The latter are character, byte, BPE or WordPiece tokenizers. All are `transformers` tokenizers, so that they can be
saved beside the trained model and loaded by `AutoTokenizer`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from leansurgeon.errors import UsageError
from leansurgeon.reading import jsonfile, names
from leansurgeon.reading.files import in_home
from leansurgeon.tasks import base, disk_cache, user_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("model", "char", "byte", "bpe", "wordpiece")
HUB = "hub:"


def _check_choice(value: str) -> str:
    """Check the choice: `model`, one of our kinds, the folder of a saved tokenizer, or `hub:NAME`."""
    if value in KINDS or value.startswith(HUB) or "/" in value:
        return value
    raise ValueError(f"must be one of {', '.join(map(repr, KINDS))}, a folder (with a '/'), or hub:NAME")


Choice = Annotated[str, AfterValidator(_check_choice)]
Size = Annotated[int | None, Field(ge=16)]
PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DEFAULT_SIZE = 4096
_TRAINED = ("bpe", "wordpiece")
_POSITIONS = ("max_position_embeddings", "n_positions", "block_size")


class Tokenized(base.Task):
    """A task whose options name a `tokenizer` (the model's, or one made from training text) and its `vocab_size`."""

    _tokenizer: PreTrainedTokenizerBase | None = None

    def _tokenizer_key(self, model_dir: Path | None) -> dict[str, Any]:
        """Return what determines the tokenizer besides the text, for the key of a cache entry."""
        return key_of(self.options.tokenizer, self.options.vocab_size, model_dir)

    def _make_tokenizer(self, folder: Path, texts: Iterable[str], model_dir: Path | None) -> PreTrainedTokenizerBase:
        """Create the tokenizer and save it in the cache entry `folder`."""
        made = make(self.options.tokenizer, self.options.vocab_size, texts, model_dir)
        made.save_pretrained(folder / "tokenizer")
        return made

    def _template(self, model_dir: Path | None) -> user_data.Render:
        """Return a function that writes chats by the tokenizer's template, loaded at the first chat.

        It returns None without a template.
        """
        kind = self.options.tokenizer
        load_once = cache(lambda: make(kind, None, (), model_dir))

        def render(chat: list[dict[str, Any]]) -> str | None:
            if kind in KINDS[1:] or not load_once().chat_template:
                return None
            return load_once().apply_chat_template(chat, tokenize=False)

        return render

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the data, to save beside the trained model."""
        if self._tokenizer is None:
            self._tokenizer = load(self._folder / "tokenizer")
        return self._tokenizer

    def model_overrides(self) -> base.Overrides:
        """Return the vocabulary size if the tokenizer is the task's own."""
        o = self.options
        if o.tokenizer == "model":
            return {}
        tokens = self._info["vocab"]
        if o.tokenizer in _TRAINED or o.vocab_size is None:
            return {"vocab_size": tokens}
        if o.vocab_size < tokens:
            raise UsageError(
                f"The {o.tokenizer} tokenizer has {tokens} tokens, more than the task's option vocab_size "
                f"{o.vocab_size}."
            )
        return {"vocab_size": o.vocab_size}  # with spare rows

    def _particulars(self) -> base.Description:
        o = self.options
        return {"tokenizer": o.tokenizer, "vocab_size": self._info["vocab"], "seq_len": o.seq_len}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tokenizer": None}


def key_of(kind: str, vocab_size: int | None, model_dir: Path | None) -> dict[str, Any]:
    """Return what determines the tokenizer besides the text, for the key of a cache entry.

    Raises UsageError if the model's own tokenizer is requested and its folder has none.
    """
    if kind not in KINDS:
        return {"kind": "folder", "form": 2, "files": _digests(_folder(kind))}
    if kind != "model":
        return {"kind": kind, "size": (vocab_size or DEFAULT_SIZE) if kind in _TRAINED else None}
    hint = "Choose a tokenizer of the task's own: char, byte, bpe or wordpiece."
    if model_dir is None:
        raise UsageError("The task's option tokenizer is 'model', and there is no model folder to take one from.", hint)
    return {"kind": kind, "files": _digests(model_dir, hint)}


def _digests(folder: Path, hint: str | None = None) -> dict[str, str]:
    present = [name for name in (*names.TOKENIZER, *names.TEMPLATES[:2]) if (folder / name).is_file()]
    if not set(present) & set(names.VOCABULARIES):
        option = "'model'" if hint else f"'{folder}'"
        raise UsageError(f"The task's option tokenizer is {option}, and {folder} holds no tokenizer.", hint)
    return {name: disk_cache.file_digest(folder / name) for name in present}


def make(
    kind: str, vocab_size: int | None, texts: Iterable[str], model_dir: Path | None = None
) -> PreTrainedTokenizerBase:
    """Create the tokenizer of this kind; char, bpe and wordpiece vocabularies are made from `texts`.

    Our own tokenizers have the ids 0 to 4 for [PAD] [UNK] [CLS] [SEP] [MASK], and [SEP] ends a document.
    """
    if kind == "model":
        return load(model_dir)
    if kind not in KINDS:
        return load(_folder(kind))
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    common = {"vocab_size": vocab_size or DEFAULT_SIZE, "special_tokens": list(SPECIAL), "show_progress": False}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "char":
        characters = sorted({character for piece in _all_pieces(texts) for character in piece})
        vocabulary = {token: i for i, token in enumerate((*SPECIAL, *characters))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    elif kind == "byte":
        vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
        tokenizer.train_from_iterator(_all_pieces(texts), trainer)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.train_from_iterator(_all_pieces(texts), trainers.WordPieceTrainer(**common))
    ids = [(name, tokenizer.token_to_id(name)) for name in (CLS, SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=CLS,
        sep_token=SEP,
        mask_token=MASK,
        eos_token=SEP,
        clean_up_tokenization_spaces=False,
    )


def load(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder. Raises UsageError if its files are damaged, even if that shows only in use."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        probe = copy.deepcopy(tokenizer)  # a call changes the truncation and padding that are saved
        probe(["a b", "c"], verbose=False)
        probe(["a b", "c"], padding=probe.pad_token_id is not None, truncation=True, max_length=8)
        return tokenizer
    except Exception as error:
        # Damaged tokenizer files raise many kinds of errors; the first line says what is wrong.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"The tokenizer in {folder} cannot be read: {reason}") from error


def own(folder: Path | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model in a folder. Raises UsageError if it is missing or damaged."""
    key_of("model", None, folder)
    return load(folder)


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Return whether two tokenizers tokenise text equally.

    Every token must have the same id, and a text of thousands of vocabulary entries, both as words and run together,
    must give the same ids, special ones included. A vocabulary that only has the same size is not equal.
    """
    if (entries := one.get_vocab()) != other.get_vocab():
        return False
    some = one.convert_tokens_to_string(sorted(entries)[:: 1 + len(entries) // 4096])
    text = f"{some}\n {' '.join(sorted(entries)[:: 1 + len(entries) // 1024])} Élan  naïve\tÀ 1234567.89 don't\r\n"
    # A call changes a tokenizer's truncation and padding.
    ids = [copy.deepcopy(tokenizer)(text, verbose=False)["input_ids"] for tokenizer in (one, other)]
    return ids[0] == ids[1]


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that the tokenizer puts before every text (BOS of Gemma and Llama).

    Empty if it puts none there (GPT-2, Qwen), or one that stands for the whole text instead ([CLS] of BERT).
    """
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [begin] else []


def second_text(tokenizer: PreTrainedTokenizerBase, model_dir: Path | None = None) -> str | None:
    """Return the second text to pair single texts with; None if they need none.

    It is empty if the tokenizer adds its [CLS] only to pairs (Crammed BERT's, whose authors do the same). Raises
    UsageError if no text gets a [CLS] although the model in `model_dir` is an encoder whose head reads it.
    """
    if tokenizer.cls_token_id is None:
        return None
    # In lists, because the library treats an empty text outside a list as missing.
    alone, paired = (tokenizer(["a"], second, verbose=False)["input_ids"][0] for second in (None, [""]))
    if tokenizer.cls_token_id in alone:
        return None
    if tokenizer.cls_token_id in paired:
        return ""
    if model_dir is not None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

        config = jsonfile.read_object_if_whole(model_dir / "config.json") or {}
        averaged = config.get("is_encoder_decoder") or config.get("classifier_pooling") == "mean"
        encoder = config.get("model_type") in ENCODERS or "AutoModelForMaskedLM" in (config.get("auto_map") or {})
        if encoder and not averaged:
            raise UsageError(
                f"The model's head reads the token {tokenizer.cls_token}, and the tokenizer does not add it to texts.",
                "Give tokenizer.json a post_processor (TemplateProcessing) that does, or choose a tokenizer of the "
                "task's own: --set task.tokenizer=wordpiece --set train.new_tokenizer=true.",
            )
    return None


def pad_id(tokenizer: PreTrainedTokenizerBase, of_model: int | None, rows: int | None) -> int:
    """Return the token that pads texts.

    It is that of the model's config.json (decoders find the last token of a text by it, and RoBERTa its positions),
    else the tokenizer's pad token, else its end token. It must be among the model's `rows`, since many tokenizers got a
    pad token later.
    """
    ids = (of_model, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    return next((number for number in ids if isinstance(number, int) and not (rows and number >= rows)), 0)


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest token id, which exceeds the number of tokens if ids have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def read_setting(folder: Path | None, name: str, *keys: str) -> Any:
    """Return the value of the first of these keys in a JSON file of a model's folder; None if there is none."""
    path = None if folder is None else folder / name
    document = (jsonfile.read_object_if_whole(path) if path and path.is_file() else None) or {}
    return next((document[key] for key in keys if document.get(key) is not None), None)


def most_tokens(folder: Path | None) -> int | None:
    """Return the length at which the tokenizer of a folder cuts texts, by sentence-transformers' or its own file."""
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        said = read_setting(folder, name, key)
        if isinstance(said, int | float) and 0 < said < 10**9:  # transformers writes 10^30 for no limit
            return int(said)
    return None


def pieces(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Yield a long text in pieces of at most about `size` characters, cut after line ends if there are any."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            newline = text.rfind("\n", start, end)
            end = newline + 1 if newline >= start else end
        yield text[start:end]
        start = end


def encode_all(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str | list[int]], dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Yield the token ids of documents, each followed by the tokenizer's end token, if it has one.

    Documents that are lists of ids are passed through. Raises UsageError for an id that the tokenizer lacks.
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    last = np.array([] if end is None else [end], dtype=dtype)
    rows = count_ids(tokenizer)
    waiting = []

    def encode_waiting() -> Iterator[np.ndarray]:
        texts = [part for part, _ in waiting]
        how = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        encoded = tokenizer(texts, add_special_tokens=False, **how)["input_ids"] if texts else []
        for row, (_, closes) in zip(encoded, waiting, strict=True):
            yield np.array(row, dtype=dtype)
            if closes and len(last):
                yield last
        waiting.clear()

    for document in documents:
        if isinstance(document, str):
            parts = list(pieces(document)) or [""]
            for i, part in enumerate(parts):
                waiting.append((part, i == len(parts) - 1))
                if len(waiting) == 16 * 64 or (len(waiting) >= 16 and len(parts) > 1):
                    yield from encode_waiting()
            continue
        yield from encode_waiting()
        ids = np.array(document, dtype=np.int64)
        strange = ids[(ids < 0) | (ids >= rows)]
        if len(strange):
            raise UsageError(
                f"The data holds the token id {strange[0]}, and the tokenizer has {rows:,}: it is not the "
                "one that the data was made with."
            )
        yield ids.astype(dtype)
    yield from encode_waiting()


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned dtype that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def check_length(seq_len: int, model_dir: Path | None) -> None:
    """Raise UsageError if the model's config has fewer positions than `seq_len`."""
    for name in _POSITIONS:
        limit = read_setting(model_dir, "config.json", name)
        if isinstance(limit, int) and 0 < limit < seq_len:
            raise UsageError(
                f"The task's seq_len is {seq_len} and the model in {model_dir} has {limit} positions ({name})."
            )


def _folder(kind: str) -> Path:
    """Return the folder of a tokenizer that is neither the model's nor one of ours, downloaded from the hub if needed.

    Raises UsageError if it cannot be downloaded.
    """
    if not kind.startswith(HUB):
        return in_home(kind)
    from huggingface_hub import snapshot_download

    name = kind.removeprefix(HUB)
    try:
        return Path(snapshot_download(name, allow_patterns=[*names.TOKENIZER, *names.TEMPLATES, "config.json"]))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UsageError(
            f"The tokenizer {name} cannot be fetched from huggingface.co/{name}: {reason}.",
            "Save it on another machine with AutoTokenizer's save_pretrained and name its folder as the tokenizer.",
        ) from error


def _all_pieces(documents: Iterable[str | list[int]]) -> Iterator[str]:
    """Yield the texts in pieces. Raises UsageError for documents of token ids."""
    for document in documents:
        if not isinstance(document, str):
            raise UsageError(
                "The data holds token ids and no text, so no vocabulary can be made from it.",
                "Choose the tokenizer that it was made with: its folder, or hub:NAME.",
            )
        yield from pieces(document)
