"""Which output of a model each class of the data is: one rule for tables, folders, shards and every command."""

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

NAMED: ContextVar[list[str] | None] = ContextVar("class names", default=None)  # what --classes says
NEW = "new"  # as --classes: other classes than the model's, for which it gets a new head
SHOWN = 6  # classes in a sentence
OPTIONS = 20  # in an option that is spelled out


@dataclass(frozen=True)
class ClassMap:
    """`names[i]` is what the data calls output i; where it has no such class, what the model calls it. With `new_head`
    the outputs are the data's own, and the model has others. `says` is for a person.
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
    """The classes `labels` of the data, in its order, as outputs of a model that calls them `own` (empty: it names
    none). By name where the model knows all, or by how their names begin; else numbers in their order, as many as
    outputs, or from 0; else, for a model without names, as many in the order of the data where that counts (`ordered`).
    `given` is what the user says: the data's classes in the order of the outputs, or the names of its numbers from 0.

    Raises `UsageError` where a model without names has as many outputs as there are names in no order, where it knows
    at least half of the names and not all, and where `given` does not name them.
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
    """The map of classes at these places. Raises `UsageError` for two at the same."""
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
    """Label -> place among the names, of every label that is one of them: case, blanks, `_` and `-` aside, LABEL_3
    being 3, "4 stars" 4 where all names are numbered so, and "tench, Tinca tinca" either of them.
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
    """The same where every label is how one name begins, as "neg" is of "negative", or begins with it; else nothing."""
    places = {}
    for label in labels:
        pairs = [sorted((key(label), key(name)), key=len) for name in names]
        near = [place for place, (short, long) in enumerate(pairs) if len(short) > 2 and long.startswith(short)]
        places |= {label: near[0]} if len(near) == 1 else {}
    return places if len(places) == len(set(places.values())) == len(labels) else {}


def parse_numbered(names: Sequence[str]) -> tuple[str, dict[str, int]]:
    """The word and the number of each, of names that are one word (or none) with a number of their own: `class_3`,
    "4 stars"; else nothing.
    """
    found = {name: re.fullmatch(r"([^\W\d]*)(-?\d+)([^\W\d]*)", key(name)) for name in names}
    words = {number and number[1] + number[3].removesuffix("s") for number in found.values()}
    numbers = {name: int(number[2]) for name, number in found.items() if number}
    alike = len(words) == 1 and len(set(numbers.values())) == len(names)
    return (words.pop() or "", numbers) if alike else ("", {})


def key(name: str) -> str:
    """A class name by what matters of it; a hyphen between numbers does ("3-9" is not 39)."""
    bare = re.sub(r"(?<=[^\d\s_-])[\s_-]+|(?<=.)[\s_-]++(?=\D|$)", "", name.strip()).casefold()
    number = re.fullmatch(r"(?:label|class)?(\d+)(?:\.0+)?", bare)
    return str(int(number[1])) if number else {"false": "0", "true": "1"}.get(bare, re.sub(r"[\s_-]+", "-", bare))


def sort_names(names: Iterable[str]) -> list[str]:
    """The order of classes that the data gives none: numbers by their size, then words by the alphabet."""
    return sorted(names, key=lambda name: (0, int(name), name) if re.fullmatch(r"-?\d+", name) else (1, 0, name))


def read_names(classes: str | Sequence[str] | None) -> list[str] | None:
    """What --classes says the classes of data are (`A,B,C`, one with a comma in quotation marks), for `NAMED`; None
    where it says nothing. Raises `UsageError`.
    """
    names = next(csv.reader([classes], skipinitialspace=True), []) if isinstance(classes, str) else list(classes or ())
    names = [name.strip() for name in names if name.strip()]
    if classes is not None and names != [NEW] and (len(names) < 2 or len({key(name) for name in names}) < len(names)):
        raise UsageError(
            f"--classes {classes}: name two classes or more, each once.", "Write --classes A,B,C, or --classes new."
        )
    return names or None


def spell_names(names: Sequence[str] | None = None) -> str | None:
    """The value of `--classes` for these names, or to have it again."""
    return ",".join(f'"{name}"' if "," in name else name for name in names or NAMED.get() or ()) or None


class StoredClasses:
    """The classes of a prepared data set, stored as places in `names` (None: as numbers), and which outputs they are by
    `wanted`, names in the order of the outputs (None: as stored). `labels` are those that are there, in their order.

    Raises `UsageError` for a class that is not `wanted`.
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
        """(B,) int64 outputs of classes as they are stored; what is below 0 is no class and stays."""
        import numpy as np

        stored = stored.astype(np.int64)
        return stored if self._outputs is None else np.where(stored < 0, stored, self._outputs[stored.clip(min=0)])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
