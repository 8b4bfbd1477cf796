"""Rows of text from csv, tsv, json, jsonl and parquet files."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError, did_you_mean, quote
from leansurgeon.reading import files, jsonfile

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
LINE = 64_000_000  # characters of a line, or of a field
ROWS = 1_024  # rows of a parquet file in memory at a time
FIRST = 100  # rows of JSON searched for the keys
LARGEST = 4_000_000_000  # bytes of a file that is one JSON document


def is_table(path: Path) -> bool:
    """Return whether a file is a table, by its name."""
    return path.suffix.lower() in SUFFIXES


def read(path: Path, columns: list[str]) -> Iterator[tuple[int, list[Any]]]:
    """Yield (row number from 1, the values of `columns`) of every row; None for keys that a row of JSON lacks.

    Raises UsageError, naming file and row, for an unknown kind of file, a missing column, or content that does not
    match the file's name.
    """
    readers = {".csv": _csv, ".tsv": _csv, ".jsonl": _json, ".json": _json, ".parquet": _parquet}
    if not is_table(path):
        raise UsageError(f"{path} has an unknown file type.", f"Give it the right extension: {', '.join(SUFFIXES)}.")
    with _readable(path):
        yield from enumerate(readers[path.suffix.lower()](path, columns), start=1)


def columns(path: Path) -> tuple[str, ...]:
    """Return the column names in order; for JSON the keys of the first rows. Raises UsageError as `read` does."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return tuple(parquet_schema(path).names)
    with _readable(path):
        if suffix in (".csv", ".tsv"):
            try:
                return tuple(next(csv.reader(lines(path, ""), delimiter=delimiter(path)), []))
            except csv.Error as error:
                raise UsageError(f"{path}, line 1: {error}.") from None
        return tuple(dict.fromkeys(key for _, row in islice(_objects(path), FIRST) for key in row))


def class_names(path: Path, column: str) -> list[str] | None:
    """Return the class names of an integer column in a parquet file of the hub; None if it has none."""
    if path.suffix.lower() != ".parquet":
        return None
    said = (parquet_schema(path).metadata or {}).get(b"huggingface", b"{}")
    description = jsonfile.parse(said, f"The description in {path}")
    names = jsonfile.value_at(description, "info", "features", column, "names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UsageError(f"The description in {path} names its classes {quote(names)}.")
    return names


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn read errors within the context into one sentence about the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}.", files.as_utf8(path)) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {files.why(error)}.") from None


def lines(path: Path, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, each at most `LINE` characters long, with their line ends."""
    with io.TextIOWrapper(files.open_regular(path), encoding="utf-8-sig", newline=newline) as file:
        number = 0
        while line := file.readline(LINE + 1):
            number += 1
            if len(line) > LINE:
                raise UsageError(f"{path}, line {number:,} has more than {LINE:,} characters.")
            yield line


def delimiter(path: Path) -> str:
    """Return the column separator: a tab in .tsv; in .csv a comma, or another one if the header has more of it."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    header = next(lines(path, ""), "")
    return max(",;\t|", key=header.count)


def _csv(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    bare = path.suffix.lower() == ".tsv" and not _is_quoted(path)
    rows = _reader(path, bare)
    try:
        header = next(rows, [])
        places = _places(path, columns, header)
        for row in rows:
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                raise UsageError(
                    f"{path}, line {rows.line_num}: {len(row)} fields where the header has {len(header)}.",
                    "Quotation marks are plain characters in this file: quote line ends and tabs." if bare else None,
                )
            yield [row[place] for place in places]
    except csv.Error as error:
        raise UsageError(f"{path}, line {rows.line_num}: {error}.") from None


def _reader(path: Path, bare: bool) -> Any:
    """Return rows of fields; with `bare`, quotation marks are plain characters."""
    csv.field_size_limit(LINE)
    quoting = csv.QUOTE_NONE if bare else csv.QUOTE_MINIMAL
    return csv.reader(lines(path, ""), delimiter=delimiter(path), quoting=quoting, strict=True)


def _is_quoted(path: Path) -> bool:
    """Return whether quotation marks in a .tsv file enclose fields, as pandas writes them. In GLUE's files they are
    plain characters, and a text that begins with one would swallow the rows behind it.

    They are plain characters if every line then has all fields, unless all that open a field also close it and some
    within are doubled.
    """
    width, doubled, closed = 0, False, True
    for line in lines(path, ""):
        fields = line.rstrip("\r\n").split("\t")
        width = width or len(fields)
        if len(fields) != width and fields != [""]:
            try:
                return all(len(row) in (0, width) for row in _reader(path, bare=False))
            except csv.Error:
                return False
        for field in fields:
            if field.startswith('"'):
                inner = field[1:-1].replace('""', "")
                doubled = doubled or len(inner) < len(field) - 2
                closed = closed and field.endswith('"') and '"' not in inner and len(field) > 1
    return doubled and closed


def _json(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    present = {key for _, row in islice(_objects(path), FIRST) for key in row}
    for number, row in _objects(path):
        if not present.issuperset(columns):
            _places(path, columns, list(row), f", line {number}")
        yield [row.get(column) for column in columns]


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, object) of every row: one per line, in .json files also from a list, or a list under "data"."""
    first = next((line for line in lines(path) if line.strip()), "").strip()
    whole = path.suffix.lower() == ".json" and (first.startswith("[") or first == "{")
    if whole:
        rows = jsonfile.parse(files.read_text(path, LARGEST, encoding="utf-8-sig"), str(path))
        rows = rows.get("data", [rows]) if isinstance(rows, dict) else rows
        numbered, unit = enumerate(rows if isinstance(rows, list) else [rows], start=1), "row"
    else:
        numbered, unit = ((n, line) for n, line in enumerate(lines(path), start=1) if line.strip()), "line"
    for number, row in numbered:
        row = row if whole else jsonfile.parse(row, f"{path}, line {number},")
        if not isinstance(row, dict):
            raise UsageError(f"{path}, {unit} {number}: {jsonfile.a_kind_of(row)} where an object is expected.")
        yield number, row


def _parquet(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    for part in parquet_parts(path, columns, ROWS):
        by_name = part.to_pydict()  # columns come in the file's order
        yield from map(list, zip(*(by_name[column] for column in columns), strict=True))


def parquet_parts(path: Path, columns: list[str], rows: int) -> Iterator[Any]:
    """Yield Arrow record batches of at most `rows` rows with these columns. Raises UsageError for other files."""
    with _parquet_file(path) as file:
        _places(path, columns, file.schema_arrow.names)
        yield from file.iter_batches(rows, columns=columns)


def parquet_schema(path: Path) -> Any:
    """Return the Arrow schema of a parquet file. Raises UsageError for other files."""
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
    """Return the positions of the columns. Raises UsageError for a missing or duplicate one."""
    places, often = {column: place for place, column in enumerate(header)}, Counter(header)
    for column in columns:
        if column not in places:
            names = ", ".join(map(quote, header[:20])) + (", ..." if len(header) > 20 else "") or "none"
            said = f"{path}{where} has no column '{column}'{did_you_mean(column, header)}."
            raise UsageError(said, f"Columns: {names}.")
        if often[column] > 1:
            raise UsageError(
                f"{path}{where} has {often[column]} columns called '{column}'.", "Rename all of them but one."
            )
    return [places[column] for column in columns]
