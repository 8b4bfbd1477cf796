"""Map each class of the data to an output of the model: one rule for tables, folders, shards and every command."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leansurgeon.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import numpy as np

NAMED: ContextVar[list[str] | None] = ContextVar("class names", default=None)  # the value of --classes
NEW = "new"  # value of --classes: classes other than the model's, for which it gets a new head
SHOWN = 6  # classes shown in a sentence
OPTIONS = 20  # classes spelled out in an option


@dataclass(frozen=True)
class ClassMap:
    """The mapping of classes. `names[i]` is the data's name of output i or, if the data lacks it, the model's name.

    With `new_head` the outputs are the data's own, because the model has others. `says` is for the user.
    """

    names: tuple[str, ...]
    says: str
    new_head: bool = False


def map_classes(
    labels: Sequence[str],
    own: Sequence[str],
    outputs: int,
    given: Sequence[str] | None = None,
    *,
    ordered: bool = False,
) -> ClassMap:
    """Map the classes `labels` of the data, in its order, to outputs of a model that names them `own` (or not at all).

    The first rule that applies is used: by name if the model has all; by the beginning of names; numbers in their
    order, if there are as many as outputs, or from 0; for a model without names, equally many classes in the data's
    order if that is meaningful (`ordered`). `given` is the user's choice: the data's classes in the order of the
    outputs, or names for its numbers from 0.

    Raises `UsageError` if a model without names has as many outputs as there are unordered names, if it has at least
    half of the names but not all, and if `given` does not name them.
    """
    if len(labels) < 2 and given is None:
        has = f"one: {labels[0]}" if labels else "none"
        raise UsageError(f"A classifier needs two classes or more, and the data has {has}.")
    word, by_number = parse_numbered(labels)
    if given is not None and list(given) != [NEW]:
        return _as_given(labels, own, outputs, given, by_number)
    known = match(labels, own)
    if given is None:
        if own and len(known) == len(labels):
            return _make_map(known, own, outputs, "by name")
        if short := {} if known else _match_prefixes(labels, own):
            return _make_map(short, own, outputs, "by how their names begin")
        fits = not (own and word) and set(by_number.values()) <= set(range(outputs))
        if by_number and (len(labels) == outputs or fits):
            if len(labels) == outputs:
                by_number = {label: place for place, label in enumerate(sorted(labels, key=by_number.__getitem__))}
            return _make_map(by_number, own, outputs, "by number")
        if not own and len(labels) == outputs:
            if not ordered:
                by_alphabet = spell_names(labels) if len(labels) <= OPTIONS else "A,B,C"
                raise UsageError(
                    f"The model does not say what its {outputs} outputs are called, so which of them is which of the "
                    f"data's {len(labels)} classes ({_some(labels)}) is not known.",
                    f"Say it, in the order of the outputs (by the alphabet: --classes {by_alphabet}); as "
                    "task.class_names in a recipe. --classes new trains a new head.",
                )
            return _make_map(
                {label: i for i, label in enumerate(labels)}, own, outputs, "in this order, since the model names none"
            )
        if own and 2 * len(known) >= len(labels):
            strange = [label for label in labels if label not in known]
            near = did_you_mean(strange[0], list(own))
            raise UsageError(
                f"{len(known)} of the data's {len(labels)} classes are the model's, and {_some(strange)} "
                f"{'is' if len(strange) == 1 else 'are'} not{near}.",
                f"Rename them, or name the classes in the order of the model's outputs ({_some(own)}): "
                "--classes A,B,C. Others get a new head with --classes new.",
            )
    goes = f" ({_some(own)})" if own else ""
    gives = f"{outputs} others{goes}" if outputs > 1 else "one output, a score"
    has = f"The data has {len(labels)} classes ({_some(labels)}) and the model {gives}"
    return ClassMap(tuple(labels), has, new_head=True)


def _as_given(
    labels: Sequence[str], own: Sequence[str], outputs: int, given: Sequence[str], numbers: dict[str, int]
) -> ClassMap:
    places = match(labels, given)
    first = min(1, *numbers.values()) if numbers else 0
    if len(places) < len(labels) and numbers and max(numbers.values()) - first < len(given):
        called = {label: given[number - first] for label, number in numbers.items()}
        known = match(list(called.values()), own or given)
        if len(known) < len(called):
            known = match(list(called.values()), given)
        places = {label: known[name] for label, name in called.items()}
    if len(places) < len(labels):
        strange = [label for label in labels if label not in places]
        raise UsageError(
            f"--classes names {_some(given)}, and the data has {_some(strange)}, too{did_you_mean(strange[0], given)}.",
            f"Name them all, in the order of the model's outputs. The data's classes: {', '.join(labels)}.",
        )
    if len(given) > outputs:
        says = f"--classes names {len(given)} classes and the model has {outputs}"
        return ClassMap(tuple(given), says, new_head=True)
    return _make_map(places, own, outputs, "as --classes says")


def _make_map(places: dict[str, int], own: Sequence[str], outputs: int, how: str) -> ClassMap:
    """Return the map of classes to these outputs. Raises `UsageError` if two classes share one."""
    by_place = {}
    for label, place in sorted(places.items(), key=lambda pair: pair[1]):
        if place in by_place:
            raise UsageError(
                f"'{by_place[place]}' and '{label}' are the same class of the model"
                f"{', ' + own[place] if own else ''}.", "Merge them, or rename one of them."
            )  # fmt: skip
        by_place[place] = label
    names = tuple(by_place.get(i) or (own[i] if own else f"LABEL_{i}") for i in range(outputs))
    shown = list(by_place.items())[:SHOWN]
    if own and how != "by name":
        meant = f"{', '.join(label for _, label in shown)} are read as {', '.join(own[place] for place, _ in shown)}"
    else:
        meant = ", ".join(f"{label} is output {place}" for place, label in shown)
    more = f" and {len(by_place) - SHOWN} more" if len(by_place) > SHOWN else ""
    return ClassMap(names, f"Classes: {meant}{more} ({how}).")


def match(labels: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return label -> index among the names, for every label that is one of them.

    Case, blanks, `_` and `-` are ignored; LABEL_3 equals 3; "4 stars" equals 4 if all names are numbered that way; and
    "tench, Tinca tinca" matches either part.
    """
    aliases = {}
    word, numbers = parse_numbered(names)
    for place, name in enumerate(names):
        for alias in (*name.split(","), *([str(numbers[name])] if numbers else [])):
            aliases.setdefault(key(alias), set()).add(place)
    whole = {key(name): place for place, name in reversed(list(enumerate(names)))}
    places = {alias: min(found) for alias, found in aliases.items() if len(found) == 1} | whole
    called = {label: key(label) for label in labels}
    for label, own in called.items():
        theirs, number = parse_numbered([label])
        if own not in places and number and (not word or theirs in ("", word)):
            called[label] = str(number[label])
    return {label: places[own] for label, own in called.items() if own in places}


def _match_prefixes(labels: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return label -> index if every label is the beginning of one name ("neg", "negative") or the reverse, or {}."""
    places = {}
    for label in labels:
        pairs = [sorted((key(label), key(name)), key=len) for name in names]
        near = [place for place, (short, long) in enumerate(pairs) if len(short) > 2 and long.startswith(short)]
        places |= {label: near[0]} if len(near) == 1 else {}
    return places if len(places) == len(set(places.values())) == len(labels) else {}


def parse_numbered(names: Sequence[str]) -> tuple[str, dict[str, int]]:
    """Split names such as `class_3` or "4 stars" into their common word and a number each.

    The word may be empty, and the numbers must be distinct; other names give an empty word and dict.
    """
    found = {name: re.fullmatch(r"([^\W\d]*)(-?\d+)([^\W\d]*)", key(name)) for name in names}
    words = {number and number[1] + number[3].removesuffix("s") for number in found.values()}
    numbers = {name: int(number[2]) for name, number in found.items() if number}
    alike = len(words) == 1 and len(set(numbers.values())) == len(names)
    return (words.pop() or "", numbers) if alike else ("", {})


def key(name: str) -> str:
    """Normalise a class name; a hyphen between numbers is kept ("3-9" is not 39)."""
    bare = re.sub(r"(?<=[^\d\s_-])[\s_-]+|(?<=.)[\s_-]++(?=\D|$)", "", name.strip()).casefold()
    number = re.fullmatch(r"(?:label|class)?(\d+)(?:\.0+)?", bare)
    return str(int(number[1])) if number else {"false": "0", "true": "1"}.get(bare, re.sub(r"[\s_-]+", "-", bare))


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort classes without an order of their own: numbers by size, then words alphabetically."""
    return sorted(names, key=lambda name: (0, int(name), name) if re.fullmatch(r"-?\d+", name) else (1, 0, name))


def read_names(classes: str | Sequence[str] | None) -> list[str] | None:
    """Parse --classes for `NAMED` (`A,B,C`; a name with a comma is quoted); None if it is not given.

    Raises `UsageError`.
    """
    names = next(csv.reader([classes], skipinitialspace=True), []) if isinstance(classes, str) else list(classes or ())
    names = [name.strip() for name in names if name.strip()]
    if classes is not None and names != [NEW] and (len(names) < 2 or len({key(name) for name in names}) < len(names)):
        raise UsageError(
            f"--classes {classes}: name two classes or more, each once.", "Write --classes A,B,C, or --classes new."
        )
    return names or None


def spell_names(names: Sequence[str] | None = None) -> str | None:
    """Return the value of `--classes` for these names, or the present one."""
    return ",".join(f'"{name}"' if "," in name else name for name in names or NAMED.get() or ()) or None


class StoredClasses:
    """The classes of a prepared data set and their outputs.

    Classes are stored as indices into `names` (None: as numbers). `wanted` are names in the order of the outputs (None:
    as stored). `labels` are the classes that occur, in their order. Raises `UsageError` for a class that is not
    `wanted`.
    """

    def __init__(
        self,
        names: Sequence[str] | None,
        stored: np.ndarray,
        wanted: Sequence[str] | None = None,
        *,
        ordered: bool = False,
    ) -> None:
        import numpy as np

        self.ordered = ordered
        self._stored = np.unique(stored[stored >= 0])
        self.labels = [names[i] if names else str(i) for i in self._stored]
        self._outputs: np.ndarray | None = None
        if wanted is not None:
            exact = {name: place for place, name in enumerate(wanted)}
            found = match(self.labels, wanted) | {label: exact[label] for label in self.labels if label in exact}
            if len(found) < len(self.labels):
                found = {label: int(label) for label in self.labels if label.isdecimal() and int(label) < len(wanted)}
            if strange := [label for label in self.labels if label not in found]:
                raise UsageError(
                    f"The data has the class {strange[0]}, which is none of {_some(wanted)}.",
                    "Correct the task's option class_names, or leave it out.",
                )
            self._outputs = np.zeros(int(self._stored.max(initial=0)) + 1, dtype=np.int64)
            self._outputs[self._stored] = [found[label] for label in self.labels]

    def outputs_of(self, stored: np.ndarray) -> np.ndarray:
        """Return (B,) int64 outputs of stored classes; values below 0 are no class and are kept."""
        import numpy as np

        stored = stored.astype(np.int64)
        return stored if self._outputs is None else np.where(stored < 0, stored, self._outputs[stored.clip(min=0)])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
