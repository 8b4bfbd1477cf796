"""The documents of a language task, split for training and evaluation: text files, rows of tables, or a hub data set.

A document is a text, or a list of token ids if the data set is already tokenised.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from leansurgeon.errors import UsageError
from leansurgeon.reading import tables
from leansurgeon.reading.files import in_home
from leansurgeon.tasks import disk_cache, hub, splits, user_data
from leansurgeon.tasks.text import files as text_files

BY_HAND = "Download its parquet files on another machine and name them with the task's option `data`."
FEW = 20  # blocks; a text with fewer is split into smaller ones
Document = str | list[int] | np.ndarray
Documents = Callable[[], Iterable[Document]]  # every call starts a new iteration
LEAST = 20  # characters of a sentence; shorter lines of a text file are headings and numbers


@dataclass(frozen=True)
class Corpus:
    """Documents of `files` or of one hub data set `rows`.

    `columns` are the table columns with the documents: a `chat`, which `render` writes out, or texts. `first` limits
    the number of documents (None: all). `counted` has the numbers of "rows" and of "empty" ones in the last full
    iteration.
    """

    files: tuple[Path, ...]
    rows: Any | None
    columns: tuple[str, ...]
    first: int | None
    chat: bool
    render: user_data.Render | None = field(compare=False)
    counted: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def names(self) -> list[str]:
        """Names of the files, or of the hub data set."""
        return text_files.short_names(self.files) if self.rows is None else [str(self.rows.info.dataset_name)]

    def key(self) -> list[Any]:
        """Return what determines the content, for the name of the cache entry."""
        if self.rows is not None:
            return [hub.digest(self.rows), *self.columns, self.first]
        stamps = [disk_cache.file_key(path) for path in self.files]
        tabular = any(tables.is_table(path) for path in self.files)
        read = [*self.columns, *(["chat"] if self.chat else [])] if tabular else []
        return stamps + read + ([self.first] if self.first else [])

    def __iter__(self) -> Iterator[Document]:
        """Iterate over all documents, as often as requested."""
        for path in self.files:
            if not tables.is_table(path):
                yield text_files.read(path)
        yield from self._row_documents()

    def split_last(self, held: float) -> tuple[Documents, Documents]:
        """Split off the last part of about this fraction: of each text file, and of the rows of all tables."""

        def read(last: bool) -> Iterator[Document]:
            for path in self.files:
                part = "" if tables.is_table(path) else text_files.cut_end(text_files.read(path), held)[last]
                if part:
                    yield part
            count = sum(1 for _ in self._row_documents())
            at = max(0, count - max(1, round(count * held)))
            yield from islice(self._row_documents(), at, None) if last else islice(self._row_documents(), at)

        return partial(read, False), partial(read, True)

    def _row_documents(self) -> Iterator[Document]:
        """Yield the documents of tables one by one, at most `first`."""
        self.counted["chats"] = self.counted["rendered"] = 0
        if self._holds_ids():
            yield from islice(self._ids(), self.first)
            return

        def render(chat: list[dict[str, Any]]) -> str | None:
            written = self.render(chat) if self.render else None
            self.counted["chats"] += 1
            self.counted["rendered"] += written is not None
            return written

        for cells, where in islice(self._cells(), self.first):
            yield user_data.document_in(cells, where, self.chat, render)

    def texts(self) -> list[str]:
        """Return the distinct sentences of text files, and all texts in the cells of tables, unsplit."""
        unique = {}
        for path in self.files:
            if not tables.is_table(path):
                unique.update(dict.fromkeys(sentences(text_files.read(path))))
        for cells, where in islice(self._cells(), self.first):
            unique.update(dict.fromkeys(text.strip() for text in user_data.texts_in(cells, where)))
        return list(unique)

    def answers(self) -> Iterator[tuple[str, str]]:
        """Yield input and answer of every row that has both; the answer is the last column."""
        for cells, where in islice(self._cells(), self.first):
            *asked, answer = ("\n\n".join(user_data.texts_in([cell], where)) for cell in cells)
            before = "\n\n".join(filter(None, asked))
            if before and answer:
                yield before, answer

    def _holds_ids(self) -> bool:
        """Return whether the column holds lists of integers, by the schema of the hub data set or the parquet files."""
        if len(self.columns) > 1 or self.chat or not all(path.suffix.lower() == ".parquet" for path in self.files):
            return False
        from pyarrow import types

        schemas = (
            [tables.parquet_schema(path) for path in self.files]
            if self.rows is None
            else [self.rows.features.arrow_schema]
        )
        kinds = [schema.field(self.columns[0]).type for schema in schemas if self.columns[0] in schema.names]
        lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        return len(kinds) == len(schemas) and all(
            any(test(kind) for test in lists) and types.is_integer(kind.value_type) for kind in kinds
        )

    def _ids(self) -> Iterator[np.ndarray]:
        """Yield the token ids of every row as arrays: Python numbers are too slow for 43 million rows, a usual size."""
        self.counted["rows"] = self.counted["empty"] = 0
        (column,) = self.columns
        if self.rows is not None:
            parts = self.rows.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
        else:
            parts = (part for path in self.files for part in tables.parquet_parts(path, [column], 10_000))
        for part in parts:
            for chunk in getattr(part[column], "chunks", [part[column]]):
                flat = chunk.flatten()
                if flat.null_count:
                    raise UsageError(f"{self.names[0]}: a token id is missing in '{column}'.")
                ends = np.cumsum([0, *chunk.value_lengths().fill_null(0).to_numpy()])
                ids = flat.to_numpy()
                self.counted["rows"] += len(chunk)
                for start, end in pairwise(ends.tolist()):
                    self.counted["empty"] += start == end
                    if start < end:
                        yield ids[start:end]

    def _cells(self) -> Iterator[tuple[list[Any], str]]:
        """Yield the cells of every non-empty row of all tables, and their location."""
        columns, self.counted["rows"], self.counted["empty"] = list(self.columns), 0, 0
        if self.rows is not None:
            read = [(self.names[0], hub.rows(self.rows, columns, self.names[0]))]
        else:
            read = ((path, tables.read(path, columns)) for path in self.files if tables.is_table(path))
        for place, rows in read:
            for number, cells in rows:
                empty = all(map(user_data.is_empty, cells))
                self.counted["rows"] += 1
                self.counted["empty"] += empty
                if not empty:
                    yield cells, f"{place}, row {number}"


def split_documents(corpora: Mapping[str, Corpus]) -> tuple[splits.Split, dict[str, Documents]]:
    """Split corpora by blocks of text or whole lists of tokens; return the split and the documents of each side.

    `corpora` are named by the sides that the data gives them ("train" among them). A "test" that is cut comes block by
    block, in the order of hashes. Raises UsageError if there is too little text.
    """
    shortest, count = splits.SHORTEST, 0
    while True:
        ids, given, size = array("Q"), array("b"), 0
        for side, corpus in corpora.items():
            for document in corpus:
                size += len(document)
                for block in _blocks(document, shortest):
                    ids.append(splits.hash_text(block) if isinstance(block, str) else splits.hash_tokens(block))
                    given.append(splits.SIDES.index(side))
        if len(ids) >= FEW or len(ids) <= count:
            break
        shortest, count = max(1, size // (4 * FEW)), len(ids)  # use smaller blocks for a small text
    split = splits.split_by_content(np.array(ids), None, np.array(given), most=splits.BLOCKS)
    if shortest < splits.SHORTEST:
        split = replace(split, rule=splits.OWN)

    def read(rows: np.ndarray) -> Iterator[Document]:
        """Yield the content of these blocks; neighbouring blocks of a document form one text."""
        wanted, numbers = set(rows.tolist()), itertools.count()
        for document in itertools.chain(*corpora.values()):
            for chosen, run in itertools.groupby(_blocks(document, shortest), lambda _: next(numbers) in wanted):
                if chosen:
                    yield "".join(run) if isinstance(document, str) else document

    sides = {side: partial(read, split.rows[side]) for side in splits.SIDES}
    if "test" not in corpora:
        rows, documents = split.rows["test"].tolist(), itertools.chain(*corpora.values())
        blocks = enumerate(block for document in documents for block in _blocks(document, shortest))
        wanted = set(rows)
        kept = {number: block for number, block in blocks if number in wanted}
        sides["test"] = lambda: [kept[row] for row in rows]
    return split, sides


def _blocks(document: Document, shortest: int) -> Iterable[Document]:
    return splits.blocks(document, shortest) if isinstance(document, str) else (document,)


def find(
    names: str | Sequence[str],
    columns: str | Sequence[str],
    *,
    split: str = "train",
    first: int | None = None,
    chat: bool = False,
    render: user_data.Render | None = None,
) -> Corpus:
    """Return the corpus that a recipe names: files, globs, `austen`, or `hub:owner/name`.

    Raises UsageError for a name that matches nothing, LeanSurgeonError if the hub cannot be reached.
    """
    listed = [names] if isinstance(names, str) else list(names)
    read = (columns,) if isinstance(columns, str) else tuple(columns)
    if any(hub.parse(name) for name in listed):
        if len(listed) > 1:
            raise UsageError(f"A data set of the hub cannot be mixed with others, and {len(listed)} names are given.")
        return Corpus((), hub.load(*hub.parse(listed[0]), split, by_hand=BY_HAND), read, first, chat, render)
    files = tuple(text_files.find(listed))
    if first is not None and not all(map(tables.is_table, files)):
        raise UsageError("The option `documents` counts rows of tables, but some of the data is plain text.")
    return Corpus(files, None, read, first, chat, render)


def find_named(options: Any, **how: Any) -> dict[str, Corpus]:
    """Return the corpora of a language task by side: options `data`, `eval_data`, `test_data`.

    `how` is passed on to `find`.
    """
    named = {"train": options.data, "eval": options.eval_data, "test": options.test_data}
    listed = [options.data] if isinstance(options.data, str) else options.data
    if not any(hub.parse(name) or name in text_files.PACKAGED or in_home(name).is_file() for name in listed):
        root = in_home(listed[0])
        parts = user_data.parts_of(text_files.find(listed), root if len(listed) == 1 and root.is_dir() else None)
        if getattr(options, "eval_fraction", None):
            parts = {"train": parts["train"]} if parts else {}
        named |= {part: [*map(str, files)] for part, files in parts.items() if part == "train" or named[part] is None}
    corpora = {"train": find(named["train"], options.text, first=options.documents, **how)}
    for side, names, split in (("eval", named["eval"], "validation"), ("test", named["test"], "test")):
        if names is not None:
            corpora[side] = find(names, options.text, split=split, **how)
    return corpora


def tell(
    corpora: Mapping[str, Corpus],
    amount: Mapping[str, int],
    cut: tuple[int, int] = (0, 0),
    roles: Sequence[tuple[str, Sequence[str]]] | None = None,
) -> str:
    """Describe the corpora that were read, with these amounts, to the user (`user_data.tell`)."""
    train = corpora["train"]
    names = [name for one in corpora.values() for name in one.names]
    seen = sum((Counter(one.counted) for one in corpora.values()), Counter())
    counted = {"rows": seen["rows"]} | amount | {"empty rows left out": seen["empty"]}
    tabular = [path for path in train.files if tables.is_table(path)]
    columns = train.rows.column_names if train.rows is not None else tables.columns(tabular[0]) if tabular else ()
    role = "text" if len(train.columns) == 1 else "texts"
    if seen["chats"]:
        how = "by the model's template" if seen["rendered"] else "joined, as the tokenizer has no template"
        role = f"chat ({how})"
    return user_data.tell(names, counted, roles or [(role, train.columns)], columns, None, cut)


def sentences(text: str) -> list[str]:
    """Return the distinct sentences of a text in order: its lines, long ones split after full stops.

    Prose wrapped at one width, as in books, is read by paragraphs.
    """
    lines = [line.strip() for line in text.split("\n")]
    longest = 300
    if is_wrapped(lines):
        lines, longest = [" ".join(some) for full, some in itertools.groupby(lines, bool) if full], 0
    unique = {}
    for line in lines:
        pieces = SENTENCE_END.split(line) if len(line) > longest else [line]
        unique.update((piece, None) for piece in pieces if len(piece) > LEAST)
    return list(unique)


CLOSING = "[\"'’”“»)]"  # may follow a full stop
# A full stop, except that of Mr., Mrs., Dr. or St.
SENTENCE_END = re.compile(rf"(?:(?<=[.!?])|(?<=[.!?]{CLOSING}))(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+")
INSIDE = re.compile(rf"[a-z]{{3}}[.!?]{CLOSING}?\s+[\"'‘“„«(]?[A-Z]")  # a sentence end within a line
LISTED = re.compile(r"[\d>*•|#-]")  # start of a line in a list, a log or a quoted mail


def is_wrapped(lines: Sequence[str]) -> bool:
    """Return whether these are lines of prose wrapped at one width.

    Lines that are followed by another are then mostly about as long as the longest; few end a sentence, and many
    contain the end of one.
    """
    followed = [line for line, after in pairwise(lines) if line and after]
    if len(followed) < FEW:
        return False
    width = sorted(map(len, followed))[int(0.95 * len(followed))]

    def share(found: Callable[[str], Any]) -> float:
        return sum(map(bool, map(found, followed))) / len(followed)

    return (
        width <= 120
        and share(lambda line: len(line) >= 0.75 * width) > 0.7
        and share(lambda line: re.search(rf"[.!?]{CLOSING}?$", line)) < 0.3
        and share(INSIDE.search) > 0.1
        and share(LISTED.match) < 0.2
    )
