"""Rows of text from csv, tsv, jsonl and parquet files."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError, did_you_mean, quoted
from leansurgeon.reading import files, jsonfile

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
LINE = 64_000_000  # characters of a line, or of a field
ROWS = 1_024  # of a parquet file that are in memory at a time


def read(path: Path, columns: list[str]) -> Iterator[tuple[int, list[Any]]]:
    """(row number from 1, the values of `columns`) of every row. `.json` is read as `.jsonl`: one object a line.

    Raises UsageError, naming file and row, for an unknown kind of file, a missing column, or content that is not what
    the name says.
    """
    readers = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".json": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise UsageError(f"{path} is of no kind that can be read.", f"Name it {', '.join(SUFFIXES)} for what it is.")
    with _readable(path):
        yield from enumerate(readers[path.suffix](path, columns), start=1)


def columns(path: Path) -> tuple[str, ...]:
    """Names of the columns, in their order; of `.jsonl` the keys of its first row. Raises UsageError as `read` does."""
    if path.suffix == ".parquet":
        return tuple(parquet_schema(path).names)
    with _readable(path):
        if path.suffix in (".csv", ".tsv"):
            try:
                return tuple(next(csv.reader(lines(path, ""), delimiter=delimiter(path)), []))
            except csv.Error as error:
                raise UsageError(f"{path}, line 1: {error}.") from None
        first = next((line for line in lines(path) if line.strip()), "{}")
    row = jsonfile.parse(first, f"{path}, line 1,")
    return tuple(row) if isinstance(row, dict) else ()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What cannot be read while this lasts is one sentence about the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text: {error.reason}.", files.as_utf8(path, bytes(error.object))
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {files.why(error)}.") from None


def lines(path: Path, newline: str | None = None) -> Iterator[str]:
    """The lines of a UTF-8 file, each at most `LINE` characters long, with their ends."""
    with io.TextIOWrapper(files.open_regular(path), encoding="utf-8-sig", newline=newline) as file:
        number = 0
        while line := file.readline(LINE + 1):
            number += 1
            if len(line) > LINE:
                raise UsageError(f"{path}, line {number:,} has more than {LINE:,} characters.")
            yield line


def delimiter(path: Path) -> str:
    """What separates the columns: tabs in .tsv; commas in .csv, or what spreadsheets of other languages write instead,
    where the header has that and no comma.
    """
    if path.suffix == ".tsv":
        return "\t"
    header = next(lines(path, ""), "")
    return "," if "," in header else next((mark for mark in ";\t" if mark in header), ",")


def _csv(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    tabs = path.suffix == ".tsv"
    csv.field_size_limit(LINE)
    # Between tabs a quotation mark means itself, as in GLUE's files: a text that begins with one would otherwise
    # swallow the rows behind it.
    quoting = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
    rows = csv.reader(lines(path, ""), delimiter=delimiter(path), quoting=quoting, strict=True)
    try:
        header = next(rows, [])
        places = _places(path, columns, header)
        for row in rows:
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                raise UsageError(
                    f"{path}, line {rows.line_num}: {len(row)} fields where the header has {len(header)}.",
                    "Quotation marks mean themselves in .tsv: keep line ends and tabs in .csv." if tabs else None,
                )
            yield [row[place] for place in places]
    except csv.Error as error:
        raise UsageError(f"{path}, line {rows.line_num}: {error}.") from None


def _jsonl(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    for number, line in enumerate(lines(path), start=1):
        if not line.strip():
            continue
        row = jsonfile.parse(line, f"{path}, line {number},")
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: {jsonfile.a_kind_of(row)} where an object is expected.")
        _places(path, columns, list(row), f", line {number}")
        yield [row[column] for column in columns]


def _parquet(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    for part in parquet_parts(path, columns, ROWS):
        by_name = part.to_pydict()  # columns come in the file's order
        yield from map(list, zip(*(by_name[column] for column in columns), strict=True))


def parquet_parts(path: Path, columns: list[str], rows: int) -> Iterator[Any]:
    """Arrow record batches of at most `rows` rows with these columns. Raises UsageError for a file that is none."""
    with _parquet_file(path) as file:
        _places(path, columns, file.schema_arrow.names)
        yield from file.iter_batches(rows, columns=columns)


def parquet_schema(path: Path) -> Any:
    """The Arrow schema of a parquet file. Raises UsageError for a file that is none."""
    with _parquet_file(path) as file:
        return file.schema_arrow


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    files.open_regular(path).close()
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} is not a readable parquet file: {said}.") from None


def _places(path: Path, columns: list[str], header: list[str], where: str = "") -> list[int]:
    """Where the columns stand. Raises UsageError for one that is not there, or stands there twice."""
    places, often = {column: place for place, column in enumerate(header)}, Counter(header)
    for column in columns:
        if column not in places:
            names = ", ".join(map(quoted, header[:20])) + (", ..." if len(header) > 20 else "") or "none"
            said = f"{path}{where} has no column '{column}'{did_you_mean(column, header)}."
            raise UsageError(said, f"Columns: {names}.")
        if often[column] > 1:
            raise UsageError(
                f"{path}{where} has {often[column]} columns called '{column}'.", "Rename all of them but one."
            )
    return [places[column] for column in columns]
