"""What sample data has decided during a `shrink`, as a person reads it: which layers, and what became of each. 80
columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tabulate import tabulate

from leansurgeon.checkpoints.record import Proof
from leansurgeon.errors import short
from leansurgeon.report.tables.in_words import criteria
from leansurgeon.words import ranges, wrap


def table(decided: dict[str, Any]) -> str:
    """The sets of layers that were tried with their scores, and what became of every layer that was changed. `decided`
    is that part of surgery.json; empty where nothing was left to decide.
    """
    decisions = decided.get("decisions", [])
    measured = any("heads" in decision for decision in decisions)
    parts = [
        tried(decided),
        changed(decisions),
        "" if measured else weighed(decided.get("kept_heads", {})),
        spent(decided),
    ]
    return "\n\n".join(part for part in parts if part)


def tried(decided: dict[str, Any]) -> str:
    """Candidates, `*` before the one that was taken."""
    found = decided.get("candidates", [])
    if len(found) < 2:
        return ""
    taken = (decided["layers"], decided["healing"]["attention"], decided["healing"]["later"])
    same = [i for i, c in enumerate(found) if (list(c["kept"]), c["attention"], c["later"]) == taken]
    rows = []
    for i, c in enumerate(found):
        also = [word for word in ("attention", "later") if c[word]]
        mark = "*" if same and i == same[-1] else ""
        judged_on = "less" if c.get("left_out") else c.get("data", "all")
        rows.append(
            [mark, short(ranges(c["kept"]), 15), c["criterion"], ", ".join(also), judged_on, f"{c['judged_by']:.4f}"]
        )
    judged, what = ("divergence", "predictions") if "guard_divergence" in found[-1] else ("error", "outputs")
    head = ["", "layers kept", "chosen by", "also refitted", "data", judged]
    note = f"{judged.capitalize()} of the {what} on guard samples after the refit; * is taken."
    if {c.get("data") for c in found} == {"part", "all"}:
        note += " The sets first compete on a part of the data, the best ones again on all of it."
    if any(c.get("left_out") for c in found):
        note += " Those judged on less could not have won."
    told = criteria(c["criterion"] for c in found)
    note += f" {told[0].upper()}{told[1:]}." if told else ""
    return "\n".join([tabulate(rows, headers=head, disable_numparse=True), *wrap(note)])


def changed(decisions: list[dict[str, Any]]) -> str:
    """One line for every new layer that is not a plain copy."""
    rows = []
    for d in decisions:
        refit = d.get("refit")
        kept = (
            [name for name, r in refit.items() if isinstance(r, dict) and r["kept"]] if isinstance(refit, dict) else []
        )
        source = ranges(range(d["from"], d["until"] + 1))
        error = f"{d['error_after']:.4f}" if "error_after" in d else ""
        rows.append([d["layer"], source, short(made(d), 42), ", ".join(kept), error])
    if not rows:
        return ""
    head = ["layer", "for", "made", "refitted", "error"]
    note = "'for': the layers of the source that it stands for; 'error': that of its output on guard samples."
    return "\n".join([tabulate(rows, headers=head, disable_numparse=True), *wrap(note)])


def made(decision: dict[str, Any]) -> str:
    """How a layer came about: heads and units that stay, heads split, layers fused, steps of fitting."""
    found = []
    if "fused" in decision:
        found.append("fused " + "+".join(map(str, decision["fused"])))
    if "heads" in decision:
        found.append(f"heads {ranges(decision['heads']['kept'])}")
    if "split" in decision:
        found.append(f"split, {100 * decision['split']['kept']:.1f} % of scores kept")
    if "mlp" in decision:
        found.append("MLP trimmed")
    if decision.get("fit", {}).get("kept"):
        found.append("fitted")
    return ", ".join(found)


def spent(decided: dict[str, Any]) -> str:
    """How many passes of the source the cut took, and what their bound left out; records of earlier versions do not
    say.
    """
    if "passes" not in decided:
        return ""
    over = f"{decided['tokens']:,} calibration tokens" if "tokens" in decided else "the calibration samples"
    found = f"The cut took {decided['passes']:.1f} forward passes of the source over {over}."
    if decided.get("steps_taken_over"):
        found += " Some of them are of the cut that was interrupted."
    if left_out := decided.get("held_back"):
        found += f" Their bound left out: {'; '.join(left_out)}."
    return "\n".join(wrap(found))


def weighed(kept: dict[str, list[int]]) -> str:
    """Heads that stay because of their weights alone."""
    rows = [[layer, short(ranges(heads), 60)] for layer, heads in kept.items()]
    return tabulate(rows, headers=["source layer", "heads kept"], disable_numparse=True) if rows else ""


def closing(folder: Path, proof: Proof) -> str:
    """Where a result is, and what its reload has shown."""
    lines = wrap(f"Written to {folder}; reloaded in a fresh process with {proof.loaded_with}:")
    lines += wrap(f"{proof.parameters:,} parameters, {proof.tensors}, output {list(proof.output)} is finite.")
    return "\n".join(["", *lines])
