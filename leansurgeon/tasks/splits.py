"""Which samples train, which choose, and which are held out for the reported figure.

The side of a sample is a function of its own content (`hash_text`, `hash_image`), so it is the same for every command,
order of files, seed and share of the data, and equal samples stand on one side. What fits, chooses, stops or picks a
checkpoint reads "train" and "eval" only; "test" is read once, for the figure that is reported.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from leansurgeon.errors import UsageError, plural

if TYPE_CHECKING:
    from PIL.Image import Image

RULE = "content-1"  # raised when a sample would fall on another side than before
OWN = f"{RULE}, and the data's own parts"  # where names of files, or small classes, decide too
MADE = "made"  # instead of a rule: samples that a model made itself, which no data holds
SIDES = ("train", "eval", "test")
HELD = 0.1  # of all contents in each of "eval" and "test"
LEAST = 0.05  # of all samples in each, where so few fall there by chance
SMALL = 10  # rows of a class from which on it has a part of what is held out
LARGEST = 2_000  # samples in a "test" that was cut by content, those of the smallest hash: it is read several times
SHORTEST = 2_000  # characters of a block of running text; the mean is twice, the longest eight times that
LONG_LINE, _WORD = 400, re.compile(r"\s*[^\s。！？]{0,400}[\s。！？]*")
BLOCKS = 64  # in a "test" of running text, about 64,000 tokens of English


def hash_text(*texts: str) -> int:
    """A number of 64 bits that stands for the texts of a sample, whatever their white space and Unicode form (NFC)."""
    normal = "\x1f".join(" ".join(unicodedata.normalize("NFC", text).split()) for text in texts)
    return _hash(normal.encode("utf-8", "surrogatepass"))


def hash_tokens(tokens: Sequence[int]) -> int:
    """The same of a document of token ids."""
    return _hash(np.asarray(tokens, dtype=np.int64).tobytes())


def hash_image(image: Image) -> int:
    """The same of a decoded picture: a PNG and its copy as BMP are one sample."""
    return _hash(repr(image.size).encode() + image.convert("RGB").tobytes())


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Split:
    """`rows[side]` are the sample numbers of "train", "eval" and "test", sorted; those of a cut "test" in the order of
    their hashes. `ids` (N,) uint64 are the hashes of all samples, `rule` says what decided, `repeated` samples have the
    content of an earlier one, and `dropped` ones were to be trained on though they stand in a held-out part.
    """

    rows: Mapping[str, ndarray]
    ids: ndarray
    rule: str
    repeated: int
    dropped: int

    def identity(self) -> dict[str, Any]:
        """What stands for the samples of every side in records and summaries; whether they are the same is told by it,
        whatever their order.
        """
        return {"rule": self.rule} | {side: digest(self.ids[rows]) for side, rows in self.rows.items()}

    def sentence(self, kind: str, labels: Sequence[str] | None = None) -> str:
        """What a person is told of it, as `Held out: 1,060 rows by content (negative 49 %, positive 51 %), ...`;
        `labels` are the names of the samples' classes.
        """
        held, choosing = (len(self.rows[side]) for side in ("test", "eval"))
        how = "by content" if self.rule == RULE else "by content and by the data's own parts"
        shares = ""
        if labels is not None and held:
            names, counts = np.unique(
                np.asarray(labels, dtype=object)[self.rows["test"]].astype(str), return_counts=True
            )
            largest = np.argsort(-counts, kind="stable")[:4]
            told = ", ".join(f"{names[i]} {100 * counts[i] / held:.0f} %" for i in np.sort(largest))
            shares = f" ({told}{', ...' if len(names) > 4 else ''})"
        sentence = f"Held out: {held:,} {kind} {how}{shares}; {choosing:,} others choose the best step"
        if self.repeated:
            stay = "stays" if self.repeated == 1 else "stay"
            sentence += f"; {plural(self.repeated, kind.removesuffix('s'))} that repeat others {stay} on one side"
        if self.dropped:
            sentence += (
                f"; {plural(self.dropped, kind.removesuffix('s'))} of train left out, since held-out ones are equal"
            )
        return sentence + "."


def split_by_content(
    ids: Sequence[int] | ndarray,
    labels: Sequence[Any] | None = None,
    given: ndarray | Mapping[str, int] | None = None,
    *,
    most: int = LARGEST,
) -> Split:
    """The sides of samples with these hashes (N,) uint64: "test" below a tenth of their range, "eval" below two tenths.

    Small data, and a class (of `labels`) of ten samples or more, that would have too few or none there gives those of
    the smallest hash. `given` (N,) are sides, as numbers of SIDES, that the data names itself (or how many samples, one
    after the other, are of each): these stay; only a side that is not among them is cut from "train", and samples of
    "train" that are equal to held-out ones are left out. At most `most` samples stand in a "test" that was cut. Raises
    UsageError where too few samples differ.
    """
    ids = np.asarray(ids, dtype=np.uint64)
    if isinstance(given, Mapping):
        given = np.repeat([*map(SIDES.index, given)], [*given.values()])
    given = np.zeros(len(ids), dtype=int) if given is None else np.asarray(given)
    free, named = given == 0, set(given.tolist())
    cut = [part for part in (2, 1) if part not in named]
    if len(np.unique(ids[free])) < len(cut) + 1:
        different = plural(len(np.unique(ids[free])), "different sample")
        raise UsageError(f"The data has {different}, too few to hold any out.", "Give more data.")
    share = ids / 2.0**64
    side = np.where(share < HELD, 2, np.where(share < 2 * HELD, 1, 0))
    side = np.where(free & np.isin(side, cut), side, given)
    chosen, tested = (np.isin(ids, ids[side == part]) for part in (1, 2))
    dropped = (side == 0) & (chosen | tested) | (side == 1) & tested  # equal to one that is held out more strictly
    side[dropped] = -1
    moved = False

    def move_smallest(own: ndarray, part: int) -> bool:
        """Move the training samples with the smallest hash among `own` to `part`, unless none would be left of them."""
        there = np.unique(ids[own & (side == 0)])
        if len(there) > 1:
            side[(ids == there[0]) & (side == 0)] = part
        return len(there) > 1

    for part in cut:
        if labels is not None:
            classes = np.unique([str(label) for label in labels], return_inverse=True)[1]
            for number in np.unique(classes):
                own = (classes == number) & free
                if own.sum() >= SMALL and not (own & (side == part)).any():
                    moved |= move_smallest(own, part)
        while (side == part).sum() < max(1, int(LEAST * free.sum())) and move_smallest(free, part):
            moved = True
    rows = {name: np.flatnonzero(side == number) for number, name in enumerate(SIDES)}
    if 2 in cut:
        rows["test"] = rows["test"][np.argsort(ids[rows["test"]], kind="stable")][:most]
    rule = RULE if len(named) == 1 and not moved else OWN
    return Split(rows, ids, rule, len(ids) - len(np.unique(ids)), int(dropped.sum()))


def stands_apart(split: Mapping[str, str], fitted: Iterable[Mapping[str, str]]) -> bool:
    """Whether nothing of the "test" of a split was trained on in other data, whose splits are `fitted`: it is the same
    test, or content alone decided in both, or a model made one of them.
    """
    return split.get("rule") == MADE or all(
        one.get("rule") == MADE
        or (one.get("rule") == split.get("rule") == RULE)
        or (one.get("test") is not None and one.get("test") == split.get("test"))
        for one in fitted
    )


def digest(ids: ndarray) -> str:
    """What stands for a set of samples, whatever their order."""
    return hashlib.sha256(np.sort(np.asarray(ids, dtype="<u8")).tobytes()).hexdigest()[:16]


def blocks(text: str, shortest: int = SHORTEST) -> Iterator[str]:
    """A text in blocks of whole lines (in long lines of words), whose ends follow from the content near them: text that
    comes again is parted as before, whatever stands in front of it.
    """
    start = end = 0
    lines = text.splitlines(keepends=True)
    for piece in (p for line in lines for p in ([line] if len(line) <= LONG_LINE else _WORD.findall(line))):
        end += len(piece)
        # Behind the shortest length every piece may be the last, with a chance that goes with its length.
        chance = zlib.crc32(b"." + piece.strip().encode("utf-8", "surrogatepass")) / 2**32
        if end - start >= 8 * shortest or (end - start >= shortest and chance < len(piece) / shortest):
            yield text[start:end]
            start = end
    if start < end:
        yield text[start:]
