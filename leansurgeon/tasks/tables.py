"""Rows of text from csv, tsv, jsonl and parquet files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leansurgeon.errors import UsageError, did_you_mean

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


def read(path: Path, columns: list[str]) -> Iterator[tuple[int, list[Any]]]:
    """(row number from 1, the values of `columns`) of every row. `.json` is read as `.jsonl`: one object a line.

    Raises UsageError, naming file and row, for an unknown kind of file, a missing column, or content that is not what
    the name says.
    """
    readers = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".json": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise UsageError(f"{path} is of no kind that can be read.", f"Name it {', '.join(SUFFIXES)} for what it is.")
    try:
        yield from enumerate(readers[path.suffix](path, columns), start=1)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}.") from None


def _csv(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    tabs = path.suffix == ".tsv"
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Between tabs a quotation mark means itself, as in GLUE's files: a text that begins with one would otherwise
        # swallow the rows behind it.
        quoting = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
        rows = csv.reader(file, delimiter="\t" if tabs else ",", quoting=quoting, strict=True)
        try:
            header = next(rows, [])
            places = [_place(path, column, header) for column in columns]
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
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: not JSON ({error}).") from None
            if not isinstance(row, dict):
                raise UsageError(f"{path}, line {number}: a {type(row).__name__} where an object is expected.")
            for column in columns:
                _place(path, column, list(row), f", line {number}")
            yield [row[column] for column in columns]


def _parquet(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        for column in columns:
            _place(path, column, file.schema_arrow.names)
        for part in file.iter_batches(columns=columns):
            # Columns come in the file's order.
            by_name = part.to_pydict()
            yield from map(list, zip(*(by_name[column] for column in columns), strict=True))
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def _place(path: Path, column: str, header: list[str], where: str = "") -> int:
    if column not in header:
        names = ", ".join(f"'{name}'" for name in header) or "none"
        raise UsageError(f"{path}{where} has no column '{column}'{did_you_mean(column, header)}.", f"Columns: {names}.")
    return header.index(column)
