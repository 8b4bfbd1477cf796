"""The documents of a language task: text files, rows of tables, or a data set of the hub, parted for training and
evaluation.

A document is a text, or a list of token ids where the data set was tokenised by its makers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError
from leansurgeon.reading import tables
from leansurgeon.tasks import cache as disk
from leansurgeon.tasks import hub
from leansurgeon.tasks.text import files as text_files

BY_HAND = "Download its parquet files on another machine and name them with the task's option `data`."
Document = str | list[int]


@dataclass(frozen=True)
class Corpus:
    """`files` or one hub data set `rows`; `column` is the one that holds the documents of tables, and `first` how many
    of the documents are used at all (None: all).
    """

    files: tuple[Path, ...]
    rows: Any | None
    column: str
    first: int | None = None

    @property
    def names(self) -> list[str]:
        """Names of the files, or of the hub data set."""
        return [path.name for path in self.files] if self.rows is None else [str(self.rows.info.dataset_name)]

    def key(self) -> list[Any]:
        """What the content follows from, for the name of the cache entry."""
        if self.rows is not None:
            return [hub.digest(self.rows), self.column, self.first]
        stamps = [disk.file_key(path) for path in self.files]
        tabular = any(tables.is_table(path) for path in self.files)
        return stamps + ([self.column] if tabular else []) + ([self.first] if self.first else [])

    def split(self, held: float) -> tuple[_Part, _Part]:
        """All but, and the last part of about this fraction: of each text file, and of the rows of all tables."""
        return _Part(self, held, False), _Part(self, held, True)

    def whole(self) -> _Part:
        """All documents as one part."""
        return _Part(self, None, False)

    def all_rows(self) -> Iterator[Document]:
        """The documents one by one, no more than `first`."""
        if self.rows is not None:
            source = (row for _, (row,) in hub.rows(self.rows, [self.column], self.names[0]))
        else:
            source = (row for path in self.files for row in _rows(path, self.column))
        return islice(source, self.first)


@dataclass(frozen=True)
class _Part:
    """Documents that can be gone through more than once."""

    corpus: Corpus
    held: float | None
    last: bool

    def __iter__(self) -> Iterator[Document]:
        corpus = self.corpus
        plain = [path for path in corpus.files if not tables.is_table(path)]
        for path in plain:
            text = text_files.read(path)
            part = text if self.held is None else text_files.cut(text, self.held)[self.last]
            if part:
                yield part
        if corpus.rows is None and len(plain) == len(corpus.files):
            return
        if self.held is None:
            yield from corpus.all_rows()
            return
        count = sum(1 for _ in corpus.all_rows())
        at = count - max(1, round(count * self.held))
        yield from islice(corpus.all_rows(), at, None) if self.last else islice(corpus.all_rows(), at)


def find(names: str | Sequence[str], column: str, *, split: str = "train", first: int | None = None) -> Corpus:
    """The corpus that a recipe names: files, globs, `austen`, or `hub:owner/name`.

    Raises UsageError for a name that stands for nothing, LeanSurgeonError where the hub cannot be reached.
    """
    listed = [names] if isinstance(names, str) else list(names)
    if any(hub.parse(name) for name in listed):
        if len(listed) > 1:
            raise UsageError(f"A data set of the hub stands alone, and {len(listed)} names are given.")
        name, config = hub.parse(listed[0])
        return Corpus((), hub.load(name, config, split, by_hand=BY_HAND), column, first)
    files = tuple(text_files.find(listed))
    if first is not None and any(not tables.is_table(path) for path in files):
        raise UsageError("The option `documents` counts rows of tables, and a text file has none.")
    return Corpus(files, None, column, first)


def _rows(path: Path, column: str) -> Iterator[Document]:
    if not tables.is_table(path):
        return
    for number, (document,) in tables.read(path, [column]):
        ids = isinstance(document, list) and all(isinstance(token, int) for token in document)
        if not ids and not isinstance(document, str):
            raise UsageError(f"{path}, row {number}: '{column}' is neither a text nor a list of token ids.")
        yield document
