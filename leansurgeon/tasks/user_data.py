"""What a path is that a person names as data: text, a table, images in class folders, images without classes, or a data
set of the hub.

    found = recognise("reviews.csv")
    found.kind, found.columns                    # "table", ("text", "label")

Nothing is read but names and the head of a table, so that a wrong path is answered at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leansurgeon.errors import UsageError
from leansurgeon.reading import tables
from leansurgeon.tasks import hub
from leansurgeon.tasks.images import places as image_places
from leansurgeon.tasks.text import files as text_files

DataKind = Literal["text", "table", "classes", "images", "hub"]
HINT = "Give a file, a folder or a glob of your own, or --data austen for the novel that comes along."
_TEXT_COLUMNS = ("text", "sentence", "content", "review", "document", "body", "message", "comment", "question", "title")
_LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "sentiment", "topic", "rating", "stars", "intent")
_IMAGE_COLUMNS = ("image", "img", "jpg")
_SAMPLE = 200  # rows that are looked at where names of columns say nothing
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w.-]+)?")
_DEPTH = 3  # folders below the given one that are looked through for its kind


@dataclass(frozen=True)
class UserData:
    """`spec` is what was typed, `names` what a task takes for it; `columns` are those of a table (of its first
    file).
    """

    kind: DataKind
    spec: str
    names: tuple[str, ...]
    columns: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """A word for names of runs: the last part of the path, without its ending."""
        last = self.spec.split(",")[0].rstrip("/*").split("/")[-1]
        stem = last.split(".")[0] or last
        return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "data"


def recognise(spec: str, flag: str = "--data") -> UserData:
    """What SPEC is, the value of `flag`. Raises `UsageError` where there is no such thing, or nothing in it that can
    be read.
    """
    hint = HINT.replace("--data", flag)
    words = [word.strip() for word in spec.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{flag} names no data.", hint)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _of_folder(path, spec)
    if path.is_file():
        return _of_files([path], spec)
    if spec.startswith("hub:"):
        return _of_hub(spec)
    if len(words) == 1 and _HUB_NAME.fullmatch(spec) and not path.parent.is_dir():
        return _of_hub(f"hub:{spec}")
    if any(character in spec for character in "*?[") or len(words) > 1 or spec in text_files.PACKAGED:
        return _of_files(_found(words), spec, words)
    raise UsageError(f"There is no file or folder '{spec}'.", hint)


def columns_of(data: UserData, given: str | None) -> dict[str, str]:
    """Which columns of a table hold what: `{"text": .., "label": ..}`, by `text=A,label=B` as `given`, by their names,
    or where those say nothing by what stands in them; "label" is absent where there is none, "text_pair" only where it
    was given. Raises `UsageError`.
    """
    chosen = _given_columns(given, data.columns)
    if "text" not in chosen:
        chosen["text"] = _named(_TEXT_COLUMNS, data.columns, chosen) or _wordiest(data, chosen)
    if "label" not in chosen:
        label = _named(_LABEL_COLUMNS, data.columns, chosen) or _classlike(data, chosen)
        chosen |= {"label": label} if label else {}
    return chosen


def _of_folder(path: Path, spec: str) -> UserData:
    below = [file for depth in range(_DEPTH + 1) for file in path.glob("/".join(["*"] * (depth + 1)))]
    files = [f for f in below if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)]
    suffixes = {file.suffix.lower() for file in files}
    images = [file for file in files if file.suffix.lower() in image_places.SUFFIXES]
    if images:
        flat = all(file.parent == path for file in images)
        return UserData("images" if flat else "classes", spec, (str(path),))
    if ".tar" in suffixes:
        return UserData("classes", spec, (str(path),))
    tabular = sorted(file for file in files if tables.is_table(file))
    texts = text_files.in_folder(path)
    if tabular and len(tabular) == len(texts):
        return _of_tables(tabular, spec)
    if texts:
        return UserData("text", spec, (str(path),))
    what = ", ".join(sorted(suffix or "files without an ending" for suffix in suffixes)[:5]) or "no files"
    raise UsageError(
        f"{path} holds neither text nor images that can be read ({what}).",
        f"Text is {', '.join(text_files.SUFFIXES)}; tables are {', '.join(tables.SUFFIXES)}; images lie in a "
        "folder for every class.",
    )


def _of_files(files: list[Path], spec: str, words: list[str] | None = None) -> UserData:
    kinds = {"table" if tables.is_table(file) else "text" for file in files}
    if all(file.suffix.lower() in image_places.SUFFIXES for file in files):
        raise UsageError(f"'{spec}' names single images.", "Give the folder that they lie in.")
    if any(file.suffix.lower() == ".tar" for file in files):
        return UserData("classes", spec, (spec,))
    if kinds == {"table"}:
        return _of_tables(files, spec, words)
    return UserData("text", spec, tuple(words or [str(files[0])]))


def _of_tables(files: list[Path], spec: str, words: list[str] | None = None) -> UserData:
    columns = tables.columns(files[0])
    if files[0].suffix.lower() == ".parquet" and any(name in columns for name in _IMAGE_COLUMNS):
        return UserData("classes", spec, (spec,), columns)
    return UserData("table", spec, tuple(words or map(str, files)), columns)


def _of_hub(spec: str) -> UserData:
    """A data set of the hub; what its rows hold is known when it is there."""
    name, config = hub.parse(spec)
    rows = hub.load(name, config, "train", by_hand=HINT)
    columns = tuple(rows.column_names)
    images = any(column in columns for column in _IMAGE_COLUMNS)
    return UserData("classes" if images else "hub", spec, (spec,), columns)


def _found(words: list[str]) -> list[Path]:
    try:
        return text_files.find(words)
    except UsageError as error:
        raise UsageError(error.message, HINT) from None


def _given_columns(given: str | None, columns: tuple[str, ...]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for word in (given or "").split(",") if given else []:
        role, equals, column = word.partition("=")
        role = role.strip()
        if not equals or role not in ("text", "text_pair", "label"):
            raise UsageError(f"--columns {given}: write it as text=COLUMN,label=COLUMN.", _listed(columns))
        named = column if column in columns else {name.strip(): name for name in columns}.get(column.strip())
        if named is None:
            raise UsageError(f"--columns {given}: there is no column '{column.strip()}'.", _listed(columns))
        chosen[role] = named
    return chosen


def _named(names: tuple[str, ...], columns: tuple[str, ...], taken: dict[str, str]) -> str | None:
    by_name = {column.lower(): column for column in columns if column not in taken.values()}
    return next((by_name[name] for name in names if name in by_name), None)


def _wordiest(data: UserData, taken: dict[str, str]) -> str:
    """The column with the longest texts. Raises `UsageError` where none holds words."""
    lengths = {
        column: sum(len(str(value).split()) for value in values) / max(1, len(values))
        for column, values in _samples(data, taken).items()
        if values and all(isinstance(value, str) for value in values)
    }
    best = max(lengths, key=lengths.__getitem__, default=None)
    if best is None or lengths[best] < 2:
        raise UsageError(
            f"No column of {data.spec} looks like text.",
            f"Say which: --columns text=COLUMN,label=COLUMN. {_listed(data.columns)}",
        )
    return best


def _classlike(data: UserData, taken: dict[str, str]) -> str | None:
    """The one column whose few different values come again and again; None where there is none, or more than one."""
    columns = [
        column
        for column, values in _samples(data, taken).items()
        if len(values) >= 8 and 2 <= len({str(value) for value in values}) <= max(2, len(values) // 4)
    ]
    return columns[0] if len(columns) == 1 else None


def _samples(data: UserData, taken: dict[str, str]) -> dict[str, list[Any]]:
    """The first values of every column that is not taken."""
    free = [column for column in data.columns if column not in taken.values()]
    values: dict[str, list[Any]] = {column: [] for column in free}
    if data.kind == "hub":
        name, config = hub.parse(data.spec)
        rows = hub.rows(hub.load(name, config, "train", by_hand=HINT), free, name)
    else:
        rows = tables.read(text_files.find(list(data.names))[0], free)
    for number, row in rows:
        for column, value in zip(free, row, strict=True):
            values[column].append(value)
        if number >= _SAMPLE:
            break
    return values


def _listed(columns: tuple[str, ...]) -> str:
    return f"Columns: {', '.join(columns)}." if columns else "The table has no columns."
