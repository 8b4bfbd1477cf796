"""Combine several sources of sample data: mixed evenly, with guard and held-out samples from each. Imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from leansurgeon.measure.data.batches import rows_of, thin
from leansurgeon.measure.data.calibration import (
    LINE,
    LINES,
    TOKENS,
    WORDS,
    Calibration,
    Parts,
    describe_counts,
    images_wanted,
    without_labels,
)

JOIN = " + "
LEAST_LINES, LEAST_TOKENS = 512, 16_384  # fit data with less is thin
MOST = 0.9  # of the usual number of lines
FEWEST = 16  # minimum number of own samples in a part


def mix_sources(sources: Sequence[Calibration]) -> Calibration:
    """Mix the samples of all sources, up to the usual number and evenly from every source.

    Batches alternate, so that any run of them covers all sources. Labels are kept if all sources score them alike.
    """
    if len(sources) == 1:
        return sources[0]
    alike = len({(type(s.task), s.task and s.task.head) for s in sources}) == 1
    parts = {}
    counts = {}
    for part in WORDS:
        rows = [sum(map(rows_of, getattr(s, part))) for s in sources]
        most = max(s.asked if s.asked and part == "fit" else usual(s, part) for s in sources)
        counts[part] = evenly_filled(rows, min(sum(rows), most))
        each = [thin(getattr(s, part), count) for s, count in zip(sources, counts[part], strict=True)]
        in_turns = (batch for turn in zip_longest(*each) for batch in turn if batch is not None)
        parts[part] = [batch if alike else without_labels(batch) for batch in in_turns]
    each = (Parts(*of_source) for of_source in zip(*counts.values(), strict=True))
    says = "; ".join(f"{s.name}: {describe_counts(count)}" for s, count in zip(sources, each, strict=True))
    used = hashlib.sha256("".join(s.digest for s in sources).encode() + str(counts).encode()).hexdigest()
    asked = next((s.asked for s in sources if s.asked is not None), None)
    task = sources[0].task if alike else None
    return Calibration(
        JOIN.join(s.name for s in sources),
        says,
        used,
        **parts,
        task=task,
        asked=asked,
        sources=tuple(sources),
    )


def usual(data: Calibration, part: str) -> int:
    """Return the usual number of samples in a part, given enough data of this kind."""
    first = next(iter(data.fit or data.guard))
    if "input_ids" not in first:
        return getattr(images_wanted(first), part)
    if "attention_mask" in first:
        return getattr(LINES, part)
    return max(4, getattr(TOKENS, part) // first["input_ids"].shape[-1])


def is_thin(data: Calibration, *, prose: bool = False) -> bool:
    """Return whether there are so few texts that fitting to them may harm the model on others. For lines without
    labels, nearly as many as usual are required if the model reads the `prose` that would be added.
    """
    first = data.fit[0]
    if data.asked is not None or "input_ids" not in first:
        return False
    rows = sum(map(rows_of, data.fit))
    if "attention_mask" not in first:
        return rows < LEAST_TOKENS // first["input_ids"].shape[-1]
    if "labels" in first or not prose:  # labels would be lost next to samples without any
        return rows < LEAST_LINES
    tokens = sum(int(batch["attention_mask"].sum()) for batch in data.fit)
    return max(rows, tokens / LINE) < MOST * LINES.fit  # fewer are usual if texts are long


def fill_up(data: Calibration, own: Calibration) -> Calibration:
    """Return as many `own` samples as thin data lacks of the usual number."""
    lacks = {part: max(FEWEST, usual(data, part) - sum(map(rows_of, getattr(data, part)))) for part in WORDS}
    parts = {part: thin(getattr(own, part), count) for part, count in lacks.items()}
    counts = Parts(*(sum(map(rows_of, batches)) for batches in parts.values()))
    return replace(own, says=f"{own.says.rpartition(':')[0]}: {describe_counts(counts)}", **parts)


def evenly_filled(rows: Sequence[int], total: int) -> list[int]:
    """Share `total` evenly among sources with this many `rows`; what one lacks, the others provide.

    >>> evenly_filled([100, 1000, 1000], 1000)
    [100, 450, 450]
    """
    shares, left, open_sources = [0] * len(rows), total, sorted(range(len(rows)), key=lambda i: rows[i])
    while open_sources:
        i = open_sources.pop(0)
        shares[i] = min(rows[i], left // (len(open_sources) + 1))
        left -= shares[i]
    return shares
