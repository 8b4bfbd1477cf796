"""The page "Your data" of the guide: every row of its tables is tried."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from leansurgeon.reading import tables
from leansurgeon.tasks.text import corpus
from leansurgeon.tasks.user_data import columns_of, labels_in, recognise

PAGE = (Path(__file__).parents[2] / "examples/guide/data.md").read_text()
KINDS = ("causal-lm", "features", "sequence-classification", "seq2seq")


def rows(heading: str) -> list[list[list[str]]]:
    """What is in code in every cell of the table below a heading."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return [
        [[word.replace("\\|", "|").strip("`") for word in re.findall(r"``|`[^`]+`", cell)] for cell in line]
        for line in cells
    ]


def words(column: int, row: int) -> str:
    return (
        " ".join(("bright", "quiet", "early", "green", "other")[(column + row * k) % 5] for k in range(6)) + f" {row}"
    )


def table(path, columns):
    marks = {"label": [0, 1], "score": [0.25, 0.5], "toxic": [0, 1], "insult": [1, 0]}
    lines = [
        [
            marks[c][row % 2] if c in marks else f"R {row}" if c.endswith("id") else words(n, row)
            for n, c in enumerate(columns)
        ]
        for row in range(40)
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *lines])
    return recognise(str(path))


@pytest.mark.parametrize("columns, expected", [(row[0], row[1:]) for row in rows("Which columns are read")])
def test_columns(tmp_path, columns, expected):
    data = table(tmp_path / "a.csv", columns)
    for kind, texts in zip(KINDS, expected, strict=True):
        if texts:
            assert list(columns_of(data, None, kind).texts) == texts, kind


@pytest.mark.parametrize("cells, line", [
    (row[0], line)
    for row, line in zip(
        rows("What stands in a column of labels"),
        [line for line in PAGE.split("column of labels\n")[1].split("\n## ")[0].splitlines() if line[:1] == "|"][2:],
        strict=True,
    )
])  # fmt: skip
def test_labels(cells, line):
    kind = {"one class": "class", "several classes": "several", "a score": "score"}
    said = line.rsplit(" | ", 1)[1].strip(" |").split(", ")
    values = [json.loads(cell) if cell.startswith("[") else cell for cell in cells]
    found = labels_in([[value] for value in values], ["label"])
    assert found.kind == kind[said[0]]
    assert [value is None for value in found.values] == [word == "none" for word in said] or len(said) == 1


def write(path: Path, lines: list[dict[str, str]]) -> None:
    form = path.suffix.lower()
    if form == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist([*lines, {"text": None}]), path)
    elif form in (".json", ".jsonl"):
        one = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        path.write_text(json.dumps(lines) if form == ".json" else one)
    elif form == ".txt":
        path.write_text("\n".join(line["text"] for line in lines))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text"], delimiter="\t" if form == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(lines)


@pytest.mark.parametrize("name", [row[0][0] for row in rows("Files")])
def test_files(tmp_path, name):
    texts = ['a text of "some" words, and more', "another one of about this length"]
    write(tmp_path / name, [{"text": text} for text in texts])
    assert tables.is_table(tmp_path / name) == (not name.endswith("txt"))
    assert corpus.find(str(tmp_path / name), "text").texts() == texts


@pytest.mark.parametrize("names, parts", [(row[0], row[1:]) for row in rows("Parts")])
def test_parts(tmp_path, names, parts):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text\nsome words\n")
    found = recognise(str(tmp_path))
    expected = [tuple(str(tmp_path / name) for name in part) for part in parts]
    assert [found.names, *(found.held_out.get(part, ()) for part in ("eval", "test"))] == expected
