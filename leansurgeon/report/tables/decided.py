"""What sample data has decided during a `shrink`, as a person reads it: which layers, and what became of each. 80
columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from leansurgeon.checkpoints.record import Proof
from leansurgeon.checkpoints.recorded.decided import BlockRefit, Decisions, MadeLayer
from leansurgeon.errors import short
from leansurgeon.report.tables.in_words import criteria
from leansurgeon.report.tables.shape_rows import draw_table
from leansurgeon.words import ranges, wrap


def table(decided: Decisions) -> str:
    """The sets of layers that were tried with their scores, and what became of every layer that was changed; empty
    where nothing was left to decide.
    """
    measured = any(layer.heads for layer in decided.decisions)
    by_weight = "" if measured else weighed(decided.kept_heads)
    parts = [tried(decided), changed(decided.decisions), by_weight, spent(decided)]
    return "\n\n".join(part for part in parts if part)


def tried(decided: Decisions) -> str:
    """Candidates, `*` before the one that was taken."""
    heads, rows, note = list_candidates(decided, 15)
    return "\n".join([*draw_table(rows, heads), *wrap(note)]) if rows else ""


def list_candidates(decided: Decisions, width: int = 60) -> tuple[list[str], list[list[str]], str]:
    """Heads and rows of the sets of layers that competed, each after its own refit, and what their scores are; no rows
    where there was one. A list of layers is cut at `width`.
    """
    candidates, healing = decided.candidates, decided.healing
    if len(candidates) < 2:
        return [], [], ""
    taken = healing and (decided.layers, healing.attention, healing.later)
    same = [i for i, c in enumerate(candidates) if (c.kept, c.attention, c.later) == taken]
    rows = []
    for i, c in enumerate(candidates):
        also = [word for word in ("attention", "later") if getattr(c, word)]
        mark = "*" if same and i == same[-1] else ""
        judged_on = "less" if c.left_out else c.data
        score = "" if c.score.judged_by is None else f"{c.score.judged_by:.4f}"
        rows.append([mark, short(ranges(c.kept), width), c.criterion, ", ".join(also), judged_on, score])
    predicts = candidates[-1].score.guard_divergence is not None
    judged, what = ("divergence", "predictions") if predicts else ("error", "outputs")
    head = ["", "layers kept", "chosen by", "also refitted", "data", judged]
    note = f"{judged.capitalize()} of the {what} on guard samples after the refit; * is taken."
    if {c.data for c in candidates} == {"part", "all"}:
        note += " The sets first compete on a part of the data, the best ones again on all of it."
    if any(c.left_out for c in candidates):
        note += " Those judged on less could not have won."
    told = criteria(c.criterion for c in candidates)
    note += f" {told[0].upper()}{told[1:]}." if told else ""
    return head, rows, note


def changed(layers: Sequence[MadeLayer]) -> str:
    """One line for every new layer that is not a plain copy."""
    rows = []
    for layer in layers:
        kept = layer.refit.kept if isinstance(layer.refit, BlockRefit) else ()
        source = ranges(range(layer.source, layer.until + 1))
        error = "" if layer.error_after is None else f"{layer.error_after:.4f}"
        rows.append([layer.layer, source, short(made(layer), 42), ", ".join(kept), error])
    if not rows:
        return ""
    head = ["layer", "for", "made", "refitted", "error"]
    note = "'for': the layers of the source that it stands for; 'error': that of its output on guard samples."
    return "\n".join([*draw_table(rows, head), *wrap(note)])


def made(layer: MadeLayer) -> str:
    """How a layer came about: heads and units that stay, heads split."""
    ways = []
    if layer.heads:
        ways.append(f"heads {ranges(layer.heads.kept)}")
    if layer.split:
        ways.append(f"split, {100 * (layer.split.kept or 0):.1f} % of scores kept")
    if layer.mlp:
        ways.append("MLP trimmed")
    return ", ".join(ways)


def spent(decided: Decisions) -> str:
    """How many passes of the source the cut took, and what their bound left out; records of earlier versions do not
    say.
    """
    if decided.passes is None:
        return ""
    over = "the calibration samples" if decided.tokens is None else f"{decided.tokens:,} calibration tokens"
    told = f"The cut took {decided.passes:.1f} forward passes of the source over {over}."
    if decided.steps_taken_over:
        told += " Some of them are of the cut that was interrupted."
    if decided.held_back:
        told += f" Their bound left out: {'; '.join(decided.held_back)}."
    return "\n".join(wrap(told))


def weighed(kept: Mapping[str, Sequence[int]]) -> str:
    """Heads that stay because of their weights alone."""
    rows = [[layer, short(ranges(heads), 60)] for layer, heads in kept.items()]
    return "\n".join(draw_table(rows, ["source layer", "heads kept"])) if rows else ""


def closing(folder: Path, proof: Proof) -> str:
    """Where a result is, and what its reload has shown."""
    lines = wrap(f"Written to {folder}; reloaded in a fresh process with {proof.loaded_with}:")
    lines += wrap(f"{proof.parameters:,} parameters, {proof.tensors}, output {list(proof.output)} is finite.")
    return "\n".join(["", *lines])
