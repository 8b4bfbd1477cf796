"""Format the comparison of two models in at most 80 columns."""

from __future__ import annotations

import json

from leansurgeon.checkpoints.diff import ABSENT, Compared, Diff
from leansurgeon.errors import short
from leansurgeon.report.tables.cut import draw_table, parameters, shapes, side_by_side
from leansurgeon.words import ranges, wrap

COLUMNS = {"q k v": ("q", "k", "v", "qk", "qkv", "vkq"), "o": ("o",), "up gate": ("up", "gate"), "down": ("down",)}
ROOM = 24  # terminal columns for a config value
LEGEND = (
    "Numbers are |B - A| / |A|; 'same' is every bit; 'shape': the sizes differ; 'rest' are norms, positions and "
    "scales of a layer."
)


def describe(diff: Diff) -> list[str]:
    """Return the comparison as lines of at most 80 columns."""
    lines = [
        line
        for letter, source in (("A", diff.a), ("B", diff.b))
        for line in wrap(f"{letter}  {short(source.name, 50)}: {source.architecture.name}", indent="   ")
    ]
    counts = parameters(diff.a.parameters.as_dict(), diff.b.parameters.as_dict())
    compared = [[*count, "" if changed == "new" else changed] for *count, changed in counts]
    lines += ["", *side_by_side([*shapes(diff.a.shape, diff.b.shape), *compared], ["", "A", "B", ""]), ""]
    if diff.config:
        rows = []
        for key, *values in diff.config:
            shown = ["-" if value is ABSENT else json.dumps(value) for value in values]
            rows.append([short(key, 26), *(short(value, ROOM) for value in shown)])
        lines += [*draw_table(rows, ["config", "A", "B"]), ""]
    if not diff.tensors:
        return [*lines, "No tensors are compared: one of the two is a preset and has no weights."]
    lines += [*blocks(diff), "", *outside(diff)]
    counts = ", ".join(f"{n} {state}" for state, n in sorted(diff.counts.items(), key=lambda pair: -pair[1]))
    return lines + wrap(f"{len(diff.tensors)} tensors: {counts}. Layers matched by {diff.how.removeprefix('by ')}.")


def blocks(diff: Diff) -> list[str]:
    """Return one line for each run of layers with the same changes."""
    rows: list[tuple[list[tuple[int, int]], dict[str, list[Compared]]]] = []
    for pair in diff.layers:
        here = [t for t in diff.tensors if (t.layer_a, t.layer_b) in (pair, (pair[0], None), (None, pair[1]))]
        cells = {name: [] for name in (*COLUMNS, "rest")}
        for tensor in here:
            cells[next((name for name, roles in COLUMNS.items() if tensor.role in roles), "rest")].append(tensor)
        run, before = rows[-1] if rows else ([], cells)
        steady = [(a + 1, b + 1) for a, b in run[-1:]] == [pair]
        if steady and all(kinds(cells[name]) == kinds(before[name]) for name in cells):
            run.append(pair)
            for name in cells:
                before[name] += cells[name]
        else:
            rows.append(([pair], cells))
    table = [
        [ranges([b for _, b in run]), ranges([a for a, _ in run]), *(cell(cells[name]) for name in cells)]
        for run, cells in rows
    ]
    lines = draw_table(table, ["layer", "of A", *COLUMNS, "rest"])
    paired = {"A": {a for a, _ in diff.layers}, "B": {b for _, b in diff.layers}}
    for letter, source in (("A", diff.a), ("B", diff.b)):
        alone = [i for i in range(source.shape.depth) if i not in paired[letter]]
        if alone:
            lines += wrap(f"Only in {letter}: layer{'s' if len(alone) > 1 else ''} {ranges(alone)}.")
    return lines + wrap(LEGEND)


def kinds(tensors: list[Compared]) -> frozenset[str]:
    """Return the states (equal, changed, only in one...) that occur among the tensors."""
    return frozenset(t.state for t in tensors)


def cell(tensors: list[Compared]) -> str:
    """Return what changed in some tensors, the strongest first: only in one model, another shape, changed, same."""
    states = kinds(tensors)
    for state, word in (("only in A", "only A"), ("only in B", "only B"), ("other shape", "shape")):
        if state in states:
            return word
    if "changed" in states:
        changes = [t.change for t in tensors if t.state == "changed"]
        if None in changes:
            return "not finite"
        low, high = (f"{end(changes):.2g}" for end in (min, max))  # relative changes, one number if both print alike
        return high if low == high else f"{low}-{high}"
    return "same" if tensors else ""


def outside(diff: Diff) -> list[str]:
    """Return the tensors outside the blocks; those that are the same are only counted."""
    here = [t for t in diff.tensors if t.layer_a is None and t.layer_b is None]
    rows = [[short(t.name, 50), cell([t])] for t in here if t.state != "same"]
    same = len(here) - len(rows)
    lines = draw_table(rows, ["outside the layers", ""]) if rows else []
    said = f"{same} of {len(here)} tensors outside the layers are the same." if here else ""
    return [*lines, *wrap(said), ""] if here else lines
