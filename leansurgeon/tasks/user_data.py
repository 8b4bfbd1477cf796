"""Recognise the user's data: text, a table, images with or without class folders, a hub data set; and its columns.

    found = recognise("reviews.csv")
    found.kind, found.columns                                # "table", ("id", "review", "sentiment")
    columns_of(found, None, "sequence-classification")       # texts=("review",), labels=("sentiment",)

Only names and the head of a table are read, so that a wrong path is reported at once.
"""

from __future__ import annotations

import csv
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from leansurgeon.errors import UsageError, quote
from leansurgeon.reading import tables
from leansurgeon.reading.files import files_below, in_home
from leansurgeon.tasks import hub
from leansurgeon.tasks.classes import key
from leansurgeon.tasks.images import places as image_places
from leansurgeon.tasks.text import files as text_files

Render = Callable[[list[dict[str, Any]]], str | None]  # writes a chat as a model reads it, or None
DataKind = Literal["text", "table", "classes", "images", "hub"]
HINT = "Give a file, a folder or a glob of your own. --data austen is the included novel, for text models."
# Common names for the texts of a row, by letters and digits only: `sentence_1` equals `sentence1`.
PAIRS = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
    ("query", "passage"), ("query", "document"), ("text", "textpair"), ("text1", "text2"), ("texta", "textb"),
    ("sentencea", "sentenceb"),
)  # fmt: skip
TRIPLETS = (("anchor", "positive", "negative"), ("query", "positive", "negative"), ("anchor", "positive"))
ANSWERS = (
    ("input", "target"), ("inputs", "targets"), ("inputtext", "targettext"), ("text", "summary"),
    ("article", "highlights"), ("source", "target"), ("src", "tgt"), ("document", "summary"), ("dialogue", "summary"),
    ("article", "summary"), ("question", "answer"), ("input", "output"),
)  # fmt: skip
CHATS = (
    ("messages",), ("conversations",), ("conversation",), ("prompt", "completion"), ("prompt", "response"),
    ("instruction", "input", "output"), ("instruction", "output"), ("instruction", "context", "response"),
    ("instruction", "response"),
)  # fmt: skip
TEXTS = (
    "text", "sentence", "content", "review", "document", "body", "message", "comment", "tweet", "utterance", "question",
    "query", "description", "title",
)  # fmt: skip
LABELS = (
    "label", "labels", "class", "category", "target", "sentiment", "topic", "rating", "stars", "intent", "score",
    "similarity", "similarityscore", "labeltext",
)  # fmt: skip
FORMS = {  # forms that each kind of model reads, by priority; the first entry is `Columns.form`
    "sequence-classification": (("pair", (*PAIRS, ("question", "answer"))),),
    "seq2seq": (("chat", CHATS[3:]), ("answer", ANSWERS)),
    "features": (("triplet", TRIPLETS), ("pair", PAIRS), ("chat", CHATS), ("answer", ANSWERS)),
    "causal-lm": (("chat", CHATS), ("answer", ANSWERS), ("triplet", TRIPLETS), ("pair", PAIRS)),
}
ROLES = frozenset((*TEXTS, *(name for sets in (PAIRS, TRIPLETS, ANSWERS, CHATS) for names in sets for name in names)))
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_ID = re.compile(r"(^|[^a-z])(ids?|idx|index|uuid|guid|key|url|link|date|time|timestamp|hash)$|^unnamed|^$")
IMAGE_COLUMNS = ("image", "img", "jpg")
_SAMPLE = 200  # rows examined if column names say nothing
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w.-]+)?")
ABOUT = ("readme", "license", "licence")  # files that describe data
_DEPTH = 3  # levels of subfolders searched for the kind of data


@dataclass(frozen=True)
class UserData:
    """The user's data. `spec` is what was typed, `names` what a task takes for it.

    `columns` are those of the (first) table. If names of files or folders say so, `held_out` has the parts for
    validation ("eval") and "test".
    """

    kind: DataKind
    spec: str
    names: tuple[str, ...]
    columns: tuple[str, ...] = ()
    held_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """A word for names of runs: the last part of the path, without its suffix."""
        last = self.spec.split(",")[0].rstrip("/*").split("/")[-1]
        stem = last.split(".")[0] or last
        return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "data"


@dataclass(frozen=True)
class Columns:
    """The columns with the texts of a row, in order, and with its labels.

    There may be no label column, one, or one of 0 and 1 for each class. `form` is "text", "pair", "triplet", "answer"
    (input and expected output), or "chat".
    """

    form: str
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()


def recognise(spec: str, flag: str = "--data") -> UserData:
    """Recognise SPEC, the value of `flag`. Raises `UsageError` if it does not exist or holds nothing readable."""
    hint = HINT.replace("--data", flag)
    words = [word.strip() for word in spec.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{flag} names no data.", hint)
    path = in_home(spec)
    if path.is_dir():
        files = files_below(path, _DEPTH)
        suffixes = {file.suffix.lower() for file in files}
        images = [file for file in files if file.suffix.lower() in image_places.SUFFIXES]
        if images and (listed := image_places.tables_of_images(path)):
            return UserData("classes", spec, (str(path),), tables.columns(listed["train"][0]))
        if images or ".tar" in suffixes:
            flat = images and all(file.parent == path for file in images)
            return UserData("images" if flat else "classes", spec, (str(path),))
        if texts := text_files.in_folder(path):
            return _of_files(texts, spec, [str(path)], root=path)
        what = ", ".join(sorted(suffix or "files without an extension" for suffix in suffixes)[:5]) or "no files"
        raise UsageError(
            f"{path} holds neither text nor images that can be read ({what}).",
            f"Text is {', '.join(text_files.SUFFIXES)}; tables are {', '.join(tables.SUFFIXES)}; images lie in a "
            "folder for every class.",
        )
    if path.is_file():
        return _of_files([path], spec)
    if spec.startswith("hub:"):
        return _of_hub(spec)
    if len(words) == 1 and _HUB_NAME.fullmatch(spec) and not path.parent.is_dir():
        return _of_hub(f"hub:{spec}")
    if any(character in spec for character in "*?[") or len(words) > 1 or spec in text_files.PACKAGED:
        try:
            files = text_files.find(words)
        except UsageError as error:
            raise UsageError(error.message, HINT) from None
        return _of_files(files, spec, words)
    raise UsageError(f"{flag} {spec}: there is no file or folder of that name.", hint)


def _of_files(files: list[Path], spec: str, words: list[str] | None = None, root: Path | None = None) -> UserData:
    if all(file.suffix.lower() in image_places.SUFFIXES for file in files):
        raise UsageError(f"'{spec}' names single images.", "Give the folder that they lie in.")
    if any(file.suffix.lower() == ".tar" for file in files):
        return UserData("classes", spec, (spec,))
    if len(files) == 1 and image_places.image_column(files[0]):
        return UserData("classes", spec, (str(files[0]),), tables.columns(files[0]))
    parts = parts_of(files, root)
    train = parts.get("train", files)
    held_out = {part: tuple(map(str, parts[part])) for part in ("eval", "test") if part in parts}
    if parts:
        words = [str(file) for file in train]
    if not all(map(tables.is_table, train)):
        return UserData("text", spec, tuple(words or [str(files[0])]), held_out=held_out)
    columns = tables.columns(train[0])
    if train[0].suffix.lower() == ".parquet" and any(name in columns for name in IMAGE_COLUMNS):
        return UserData("classes", spec, (spec,), columns)
    return UserData("table", spec, tuple(words if words and root is None else map(str, train)), columns, held_out)


def parts_of(files: Sequence[Path], root: Path | None = None) -> dict[str, list[Path]]:
    """Return files by the split that their names say, or those of the folders between them and `root`.

    Empty unless they say "train" and another one. If tables and text files both do, the data is there twice, and the
    tables are used.
    """
    tabular = [file for file in files if tables.is_table(file)]
    text = [file for file in files if file not in tabular and file.stem.lower() not in ABOUT]
    parted = [image_places.parts_by_name(some, root, mixed=some is tabular) for some in (tabular, text) if some]
    parts = parted[0] if all(parted) and parted else {}
    return parts if len(parts) > 1 and "train" in parts else {}


def _of_hub(spec: str) -> UserData:
    """Return a data set of the hub; its content is known once it is loaded."""
    columns = tuple(hub.load(*hub.parse(spec), "train", by_hand=HINT).column_names)
    images = any(column in columns for column in IMAGE_COLUMNS)
    return UserData("classes" if images else "hub", spec, (spec,), columns)


# -- columns ---------------------------------------------------------------------------------------


def columns_of(data: UserData, given: str | None, kind: str = "causal-lm") -> Columns:
    """Return what the columns of a table hold, for a model of this kind (a head as tasks name it, or "seq2seq").

    Columns are taken as `given` in the form `ROLE=COLUMN,...`, else by their names, else by their content. Labels are
    searched only if the model predicts some. Raises `UsageError`.
    """
    roles = _parse_roles(given, data.columns)
    labels = tuple(column for role, column in roles if role == "label")
    texts = {role: column for role, column in roles if role != "label"}
    free = [column for column in data.columns if column not in labels]
    by_name = texts or {_letters(column): column for column in reversed(free)}
    forms = [(form, names) for form, sets in FORMS.get(kind, FORMS["causal-lm"]) for names in sets]
    found = None
    for form, names in forms:
        if found is None and set(names) <= by_name.keys() and len(texts) <= len(names):
            columns = tuple(by_name[name] for name in names)
            if texts or all(map(_holds_text, _samples(data, columns).values())):
                found = Columns(form, columns, labels)
    if found is None and len(texts) > 1:
        known = "; ".join(" and ".join(names) for _, names in forms)
        raise UsageError(f"--columns {given}: this model reads no rows of {' and '.join(texts)}.", f"It reads {known}.")
    if found is None:
        named = next((by_name[name] for name in TEXTS if name in by_name), None)
        column = next(iter(texts.values()), None) or named or _wordiest(data, free)
        reads_pairs = any(form == "pair" for form, _ in forms)
        pair = (column,)
        if reads_pairs and not texts:  # the column whose name differs only in a and b, or 1 and 2
            swapped = str.maketrans("abAB12", "baBA21")
            names = (column[:i] + column[i].translate(swapped) + column[i + 1 :] for i in range(len(column)))
            twins = _samples(data, [name for name in names if name in free and name != column])
            pair = tuple(sorted((column, *[name for name, values in twins.items() if _holds_text(values)][:1])))
        found = Columns("pair" if len(pair) > 1 else "text", pair, labels)
    if kind == "sequence-classification" and not labels:
        free = [column for column in data.columns if column not in found.texts]
        found = replace(found, labels=labels_among(data, free))
    return found


def label_of_images(data: UserData, given: str | None) -> str | None:
    """Return the column that `given` names for the classes of images. Raises `UsageError` if it says anything else."""
    roles = _parse_roles(given, data.columns)
    if roles and [role for role, _ in roles] != ["label"]:
        raise UsageError(
            f"--columns {given}: {data.spec} holds images; say label=COLUMN alone.", _list_columns(data.columns)
        )
    return roles[0][1] if roles else None


def spell(*roles: tuple[str, str]) -> str:
    """Return the option to type for these roles and columns."""
    words = [f"{role}={column}" for role, column in roles]
    return "--columns " + shlex.quote(",".join(f'"{word}"' if "," in word else word for word in words))


def missing_label(data: UserData, texts: Sequence[str]) -> UsageError:
    """Return the error for a table without a column that looks like a label."""
    roles = [("text", texts[0]), *(("text_pair", column) for column in texts[1:2]), ("label", "COLUMN")]
    return UsageError(
        f"No column of {data.spec} looks like a label.", f"Say which: `{spell(*roles)}`. {_list_columns(data.columns)}"
    )


def _parse_roles(given: str | None, columns: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (role, column) of each word; a second `text` is the pair of the first."""
    by_letters = {name.strip().casefold(): name for name in reversed(columns)}
    roles = []
    for word in next(csv.reader([given or ""], skipinitialspace=True), []):
        role, equals, column = word.partition("=")
        role = _letters(role)
        if not equals or role not in (*ROLES, "label"):
            raise UsageError(
                f"--columns {given}: write it as ROLE=COLUMN,ROLE=COLUMN, such as text=COLUMN,label=COLUMN.",
                f"{_list_columns(columns)} Roles: text, text_pair, label, input, target, prompt, completion, messages, "
                "anchor, positive, negative.",
            )
        named = column if column in columns else by_letters.get(column.strip().casefold())
        if named is None:
            raise UsageError(f"--columns {given}: there is no column '{column.strip()}'.", _list_columns(columns))
        roles.append(("textpair" if role == "text" and "text" in dict(roles) else role, named))
    return roles


def is_role(name: str) -> bool:
    """Return whether a column of this name is taken for a text or a label."""
    return _letters(name) in ROLES or _letters(name) in LABELS


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold())


def _is_id(column: str) -> bool:
    return _ID.search(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).strip().lower()) is not None


def _wordiest(data: UserData, columns: Sequence[str]) -> str:
    """Return the column with the longest texts, except ids. Raises `UsageError` if no column holds words."""
    lengths = {  # in words; for scripts without spaces, half the number of characters
        column: sum(
            max(len(value.split()), sum(ord(character) > 0x2E80 for character in value) / 2) for value in values
        )
        / len(values)
        for column, values in _samples(data, [column for column in columns if not _is_id(column)]).items()
        if values and all(isinstance(value, str) for value in values)
    }
    best = max(lengths, key=lengths.__getitem__, default=None)
    if best is None or lengths[best] < 2:
        raise UsageError(
            f"No column of {data.spec} looks like text.",
            f"Say which: `{spell(('text', 'COLUMN'), ('label', 'COLUMN'))}`. {_list_columns(data.columns)}",
        )
    return best


def labels_among(data: UserData, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the label columns: the one named like a label, unless it is nearly unique and not a score.

    Otherwise all columns of 0 and 1, or the only one with few distinct values that repeat. Empty if there is none, or
    more than one.
    """
    by_name = {_letters(column): column for column in reversed(columns)}
    values = _samples(data, columns)
    for name in LABELS:
        column = by_name.get(name)
        if column is not None:
            there = values[column]
            unique = len(_texts_of(there)) > 0.9 * len(there) and not any(isinstance(_number(v), float) for v in there)
            if len(there) < 20 or not unique:
                return (column,)
    columns = [column for column in columns if not _is_id(column)]
    marks = tuple(column for column in columns if values[column] and _texts_of(values[column]) <= {"0", "1"})
    if len(marks) > 1:
        return marks
    few = [
        column
        for column in columns
        if len(values[column]) >= 8 and 2 <= len(_texts_of(values[column])) <= max(2, len(values[column]) // 4)
    ]
    return tuple(few) if len(few) == 1 else ()


def _texts_of(values: Sequence[Any]) -> set[str]:
    """Return the distinct values, where 1.0 and True equal 1."""
    return {key(str(value)) for value in values}


def _holds_text(values: Sequence[Any]) -> bool:
    """Return whether these are texts, or lists of texts or chat turns, rather than numbers."""
    return any(isinstance(value, str | list) and _number(value) is None for value in values)


def _samples(data: UserData, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return the first non-empty values of these columns."""
    if not columns:
        return {}
    if data.kind == "hub":
        name, config = hub.parse(data.spec)
        rows = hub.rows(hub.load(name, config, "train", by_hand=HINT), list(columns), name)
    else:
        rows = tables.read(text_files.find(list(data.names))[0], list(columns))
    first = [row for _, row in islice(rows, _SAMPLE)]
    return {column: [row[i] for row in first if not is_empty(row[i])] for i, column in enumerate(columns)}


def _list_columns(columns: tuple[str, ...]) -> str:
    return f"Columns: {', '.join(columns)}." if columns else "The table has no columns."


def tell(
    names: Sequence[str],
    counted: Mapping[str, int],
    roles: Sequence[tuple[str, Sequence[str]]],
    columns: Sequence[str] = (),
    labels: Mapping[Any, int] | None = None,
    cut: tuple[int, int] = (0, 0),
) -> str:
    """Describe the data that was read to the user.

    `counted` are amounts ("rows" first, then what was omitted); `roles` say which of the `columns` is what; `labels`
    counts each label (for scores only minimum and maximum are shown); `cut` are the number of cut texts and the length
    in tokens.
    """
    often, total = Counter(labels), sum((labels or {}).values())
    most = [f"{label} {100 * count / total:.0f} %" for label, count in sorted(often.most_common(4))]
    most += [f"{len(often) - 4} more"] if len(often) > 4 else []
    if any(isinstance(label, float) for label in often):
        most = [f"{min(often):g} to {max(often):g}"]
    amount, *rest = [f"{count:,} {what}" for what, count in counted.items() if count] or ["nothing"]
    read = {role: ", ".join(names) for role, names in roles if columns}
    if "label" in read and most:
        read["label"] += f" ({', '.join(most)})"
    words = [amount, *(f"{role} = {said}" for role, said in read.items()), *rest]
    others = [column for column in columns if not any(column in read for _, read in roles)]
    if others:
        words.append(f"{', '.join(others[:4])}{f' and {len(others) - 4} more' if len(others) > 4 else ''} left out")
    if cut[0]:
        texts, are = ("text", "is") if cut[0] == 1 else ("texts", "are")
        words.append(f"{cut[0]:,} {texts} longer than {cut[1]:,} tokens {are} cut")
    return f"{name_some(names)}: {'; '.join(words)}."


def name_some(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


# -- cells -----------------------------------------------------------------------------------------


def is_empty(value: Any) -> bool:
    """Return whether a cell is empty: None, NaN, white space, or an empty list."""
    return value is None or value != value or (isinstance(value, str) and not value.strip()) or value in ([], {})


def texts_in(cells: Sequence[Any], where: str) -> list[str]:
    """Return every text of a row: texts, lists of them, and the content of chats.

    Raises `UsageError` for anything else.
    """
    texts = []
    for cell in cells:
        for item in cell if isinstance(cell, list) else [cell]:
            text = _turn(item)[1] if isinstance(item, Mapping) else item
            if is_empty(text):
                continue
            if not isinstance(text, str):
                raise UsageError(f"{where}: {quote(text)} is not a text.")
            texts.append(text)
    return texts


def document_in(cells: Sequence[Any], where: str, chat: bool, render: Render | None) -> str | list[int]:
    """Return a row as a language model reads it. Raises `UsageError`.

    That is its texts joined by line breaks, a chat as `render` writes it, or the token ids that it consists of.
    """
    if len(cells) == 1 and isinstance(cells[0], list) and all(isinstance(token, int) for token in cells[0]):
        return cells[0]
    turns = [turn for cell in cells if isinstance(cell, list) for turn in cell if isinstance(turn, Mapping)]
    if turns:
        said = [dict(zip(("role", "content"), _turn(turn), strict=True)) for turn in turns]
    else:
        *asked, answer = ("\n\n".join(texts_in([cell], where)) for cell in cells)
        said = [{"role": "user", "content": "\n\n".join(filter(None, asked))}, {"role": "assistant", "content": answer}]
    try:
        rendered = render(said) if render and (chat or turns) else None
        return "\n".join(texts_in(cells, where)) if rendered is None else rendered
    except UsageError:
        raise
    except Exception as error:  # templates are programs and may raise anything
        raise UsageError(f"{where}: the model's chat template does not take this chat: {error}.") from None


def _turn(turn: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the role and content of a turn, from `role` and `content` or `from` and `value`."""
    who = str(turn.get("role", turn.get("from", "user")))
    return SPEAKERS.get(who, who), turn.get("content", turn.get("value"))


@dataclass(frozen=True)
class Labels:
    """The labels of a table: "class", "several" (any number of classes) or "score", and the value of each row.

    `values` (N,) hold a name, a tuple of names, a number, or None for a row without a label.
    """

    kind: str
    values: list[Any]


def labels_in(cells: Sequence[Sequence[Any]], columns: Sequence[str], names: Sequence[str] | None = None) -> Labels:
    """Return the labels of rows from their cells in these columns.

    Whole floats are integers; lists, `a|b` and columns of 0 and 1 are several classes; numbers with decimals are
    scores; empty cells are no label, and so is -1 among several classes. `names` are those of numbers from 0. Raises
    `UsageError` for objects, and if some are names and others scores.
    """

    def name_of(value: Any) -> str:
        number = _number(value)
        if names is not None and isinstance(number, int) and 0 <= number < len(names):
            return names[number]
        return str(value).strip() if number is None else str(number)

    if len(columns) > 1:
        return Labels("several", [
            None if all(map(is_empty, row))
            else tuple(column for column, mark in zip(columns, row, strict=True) if key(str(mark)) == "1")
            for row in cells
        ])  # fmt: skip
    values = [row[0] for row in cells]
    if strange := next((value for value in values if isinstance(value, Mapping)), None):
        raise UsageError(
            f"'{columns[0]}' holds {quote(strange)}, which is no label.", "Write one of its fields into a column."
        )
    lists = [value for value in values if isinstance(value, list)]
    if lists:
        widths, inner = {len(one) for one in lists}, {key(str(v)) for one in lists for v in one}
        marks = len(widths) == 1 and inner <= {"0", "1"} and widths != {1}
        places = names or [str(i) for i in range(max(widths))]
        return Labels("several", [
            None if not isinstance(value, list)
            else tuple(places[i] for i, v in enumerate(value) if key(str(v)) == "1") if marks
            else tuple(map(name_of, value))
            for value in values
        ])  # fmt: skip
    if any(isinstance(value, str) and "|" in value for value in values):
        return Labels("several", [
            None if is_empty(value) else tuple(name_of(one) for one in str(value).split("|") if one.strip())
            for value in values
        ])  # fmt: skip
    numbers = [None if is_empty(value) else _number(value) for value in values]
    if any(isinstance(number, float) for number in numbers):
        for value, number in zip(values, numbers, strict=True):
            if number is None and not is_empty(value):
                raise UsageError(f"{quote(value)} stands among labels that are numbers with decimals.")
        return Labels("score", [None if number is None else float(number) for number in numbers])
    others = {name_of(value) for value in values if not is_empty(value)} - {"-1"}
    skips = names is not None or len(others) != 1  # otherwise -1 and 1 are two classes
    return Labels("class", [
        None if is_empty(value) or (number == -1 and skips) else name_of(value)
        for value, number in zip(values, numbers, strict=True)
    ])  # fmt: skip


def _number(value: Any) -> int | float | None:
    """Return the number in a cell, as int if it is whole; None for anything else."""
    if isinstance(value, int):
        return int(value)
    try:
        number = float(value) if isinstance(value, str | float) else math.nan
    except (ValueError, OverflowError):
        return None
    if isinstance(value, str) and re.fullmatch(r"\s*0\d+\s*|.*[^-+.\deE\s].*", value):
        return None  # 007 and 1_000 are names
    return None if not math.isfinite(number) else int(number) if number.is_integer() else number
