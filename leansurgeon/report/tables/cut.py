"""Format a cut in 80 columns: what changed and what that costs on held-out samples, the plan with its costs, what
sample data decided, and what later steps cannot divide or hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from leansurgeon.checkpoints.proof import report_numbers
from leansurgeon.checkpoints.proof.report_numbers import perplexity
from leansurgeon.checkpoints.record import Comparison, Proof
from leansurgeon.checkpoints.recorded.decided import BlockRefit, Decisions
from leansurgeon.errors import plural, short
from leansurgeon.measure.costs import memory
from leansurgeon.report.humans import join_words
from leansurgeon.shape import NUMBERS, PARTS, Shape
from leansurgeon.surgery.costs import STEPS, Costs
from leansurgeon.surgery.next_steps import Indivisible, UnfitFormats, indivisible
from leansurgeon.surgery.planning import Plan
from leansurgeon.words import ranges, wrap


def plan_table(plan: Plan) -> str:
    """Return shape and parameters before and after the surgery, as a text table."""
    before, after = plan.before, plan.after
    apart = before.column("kv_heads") != before.column("heads")
    old, new = plan.parameters_before, plan.parameters_after
    rows = [
        *shapes(before, after, [key for key in NUMBERS if key != "kv_heads" or apart]),
        *parameters(old.as_dict(), new.as_dict()),
    ]
    a, b = plan.flops_before, plan.flops_after
    if a and b:
        rows.append([f"GFLOPs forward, {a.tokens:,} tokens", giga(a.total), giga(b.total), change(a.total, b.total)])
    lines = [*side_by_side(rows, [plan.source.name, "before", "after", "change"]), ""]
    saved = old.total - new.total
    if saved:
        by = ", ".join(f"{part} {-value:+,}" for part, value in plan.saved_by.items())
        lines += wrap(f"Change of {-saved:+,} parameters: {by} (in this order).")
    lines += wrap(plan.why + ".")
    for step in plan.operators:
        lines += wrap(f"- {step.name} ({step.exactness}): {step.says}", indent="  ")
    if told := explain((step.exactness for step in plan.operators), EXACTNESS):
        lines += wrap(f"{told}.")
    if not plan.operators:
        lines.append("- nothing to do: the shape is the source's own")
    lines += list_next_steps(before, after, plan.cannot_hold)
    return "\n".join(lines)


def costs_table(costs: Costs) -> str:
    """Return shape, parameters, FLOPs and memory before and after with the changes in per cent, what each step saves,
    and whether it fits.
    """
    a, b = costs.before, costs.after
    rows = shapes(a.shape, b.shape, ("depth", "heads", "head_dim", "mlp_dim"))
    rows += parameters(a.parameters.as_dict(), b.parameters.as_dict())
    if a.operations and b.operations:
        tokens = f", {a.flops.tokens:,} tokens" if a.flops else ""
        x, y = a.operations, b.operations
        rows.append([f"GFLOPs forward{tokens}", giga(x), giga(y), change(x, y)])
    if a.memory and b.memory:
        sizes = [(part, getattr(a.memory, part), getattr(b.memory, part)) for part in memory.PARTS]
        sizes.append(("peak", a.memory.total, b.memory.total))
        rows += [[f"memory, {part}", gib(x), gib(y), change(x, y)] for part, x, y in sizes]
    if costs.gpu:
        rows.append(numbers("largest micro batch", a.largest_batch, b.largest_batch))
    lines = [*side_by_side(rows, [costs.source, "before", "after", "change"]), "", *wrap(costs.why + ".")]
    # Where the saving comes from: in memory, first what needs no surgery; else in parameters.
    saved, first = costs.saved, "bf16 and fused attention"
    if b.memory:
        s = b.memory.setting
        first = f"{s.precision} and {'fused' if s.attention == 'sdpa' else 'eager'} attention"
    titles = dict(zip(STEPS, (first, "depth", "heads", "MLP"), strict=True))
    if saved["memory"] and costs.start and b.memory:
        steps = [f"{titles[step]} {100 * -value / costs.start:+.1f} %" for step, value in saved["memory"].items()]
        lines += wrap(
            f"Peak memory of {gib(costs.start)} in fp32 with eager attention becomes {gib(b.memory.total)}: "
            f"{', '.join(steps)} of it, credited in this order; only the last three are surgery."
        )
    elif any(saved["parameters"].values()):
        steps = [f"{titles[step]} {-value:+,}" for step, value in saved["parameters"].items()]
        lines += wrap(f"Change in parameters: {', '.join(steps)} (in this order).")
    if b.memory:
        words = [f"micro batch {s.batch}", s.precision, s.attention, s.optimizer]
        words += ["activation checkpointing"] if s.checkpointing else []
        words += [f"DDP on {s.world_size} GPUs"] if s.world_size > 1 else []
        lines += wrap(
            f"Memory of one GPU at {', '.join(words)}, as torch's allocator counts it, at its peak in the "
            f"{b.memory.when} pass; predicted, not measured. The CUDA context (about 0.5 GiB) comes on top."
        )
    if costs.gpu:
        fits = ["fits" if cost.fits else "does not fit" for cost in (a, b)]
        both = f"before it {fits[0]}, after it {fits[1]}"
        if a.fits == b.fits:
            both = f"both {'fit' if a.fits else 'do not fit'}"
        lines += wrap(f"{costs.gpu.title} ({costs.gpu.memory / 1e9:g} x 10^9 bytes; {costs.gpu.source}): {both}.")
    lines += list_next_steps(a.shape, b.shape, costs.refused)
    return "\n".join(lines)


def gib(value: int) -> str:
    """Return bytes in GiB with two decimals, or in whole MiB below one GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def giga(value: int) -> str:
    """Return billions: `35.1`, `0.0105`."""
    return f"{value / 1e9:,.1f}" if value >= 1e10 else f"{value / 1e9:.3g}"


def decided_table(decided: Decisions) -> str:
    """Return the layer sets that were tried with their scores (`*` marks the one taken), what became of every layer
    that is not a plain copy, and the number of passes; empty if there was nothing to decide.
    """
    heads, rows, note = list_candidates(decided, 15)
    parts = [[*draw_table(rows, heads), *wrap(note)]] if rows else []
    rows = []
    for layer in decided.decisions:
        ways = [f"heads {ranges(layer.heads.kept)}"] if layer.heads else []
        ways += [f"split, {100 * (layer.split.kept or 0):.1f} % of scores kept"] if layer.split else []
        ways += ["MLP trimmed"] if layer.mlp else []
        kept = layer.refit.kept if isinstance(layer.refit, BlockRefit) else ()
        source = ranges(range(layer.source, layer.until + 1))
        error = "" if layer.error_after is None else f"{layer.error_after:.4f}"
        rows.append([layer.layer, source, short(", ".join(ways), 42), ", ".join(kept), error])
    if rows:
        note = "'for': the layers of the source that it stands for; 'error': that of its output on guard samples."
        parts.append([*draw_table(rows, ["layer", "for", "made", "refitted", "error"]), *wrap(note)])
    if decided.kept_heads and not any(layer.heads for layer in decided.decisions):  # chosen by their weights alone
        rows = [[layer, short(ranges(heads), 60)] for layer, heads in decided.kept_heads.items()]
        parts.append(draw_table(rows, ["source layer", "heads kept"]))
    if decided.passes is not None:
        over = "the calibration samples" if decided.tokens is None else f"{decided.tokens:,} calibration tokens"
        told = f"The cut took {decided.passes:.1f} forward passes of the source over {over}."
        told += " Some of them are of the cut that was interrupted." if decided.steps_taken_over else ""
        told += f" Their bound left out: {'; '.join(decided.held_back)}." if decided.held_back else ""
        parts.append(wrap(told))
    return "\n\n".join("\n".join(lines) for lines in parts)


def list_candidates(decided: Decisions, width: int = 60) -> tuple[list[str], list[list[str]], str]:
    """Return head and rows of a table of the layer sets that competed, each after its own refit, and a note on their
    scores. No rows if there was only one. Lists of layers are cut at `width`.
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
    told = explain((c.criterion for c in candidates), CRITERIA)
    note += f" {told[0].upper()}{told[1:]}." if told else ""
    return head, rows, note


def closing(folder: Path, proof: Proof) -> str:
    """Return where a result is, and what its reload showed."""
    lines = wrap(f"Written to {folder}; reloaded in a fresh process with {proof.loaded_with}:")
    lines += wrap(f"{proof.parameters:,} parameters, {proof.tensors}, output {list(proof.output)} is finite.")
    return "\n".join(["", *lines])


ROUNDING = 1e-4  # relative error of outputs that differ by rounding only
SEEN = 0.005  # relative increase of perplexity below which no cost is reported
EXACTNESS = {
    "exact": "the same outputs",
    "near": "nearly the same outputs, and what is lost is measured",
    "fresh": "new, untrained weights",
}
CRITERIA = {
    "angular": "the neighbours that turn hidden states least go, in one block or in two",
    "influence": "the layers that change their input least go",
    "block": "these neighbours go",
    "even": "what stays is evenly spaced",
    "first-of-each": "of each group of neighbours the first stays",
    "last-of-each": "of each group of neighbours the last stays",
    "pattern": "what stays has layers of another kind where formats such as GGUF expect them",
}


def state_verdict(before: Shape, after: Shape, compared: Comparison | None, language: bool, saved: float) -> str | None:
    """Return the verdict in one sentence; None if nothing changed or was compared. `saved` is the share of parameters
    removed.
    """
    changes = []  # subjects of a sentence
    if gone := before.depth - after.depth:
        changes.append(f"{plural(gone, 'layer')} fewer")
    for key, name in (("heads", "heads"), ("head_dim", "numbers a head"), ("mlp_dim", "MLP units")):
        new, old = after.column(key), before.column(key)
        if new != old and not (key == "head_dim" and any("heads" in one for one in changes)):
            changes.append(f"{new} {name} instead of {old}")
    if not changes or compared is None or not compared.done:
        return None
    one = changes == ["1 layer fewer"]
    what = " and ".join(changes)
    weights = f"{100 * abs(saved):.1f} % of the parameters" if abs(saved) >= 5e-4 else ""
    told = f"{what} {state_cost(compared, language, one)}"
    if not weights:
        return f"{told}."
    verb = ("save" if saved > 0 else "add") + "s" * one
    return (
        f"{told}. {'It' if one else 'They'} {verb} {weights}."
        if ":" in told
        else f"{told}{',' * (',' in told)} and {verb} {weights}."
    )


def state_cost(compared: Comparison, language: bool, one: bool) -> str:
    """Return the cost, as the rest of that sentence; `one`: in the singular."""
    costs, change, keep = (word + "s" * one for word in ("cost", "change", "keep"))
    others = {"noise": "with noise as input", report_numbers.SEEN: f"on {report_numbers.SEEN}"}
    on = others.get(compared.data, "on held-out samples")
    if compared.relative_error is not None and compared.relative_error < ROUNDING:
        return f"{change} nothing: the outputs are the same but for rounding"
    if compared.loss and language:
        old, new = compared.loss.source, compared.loss.result
        more = math.expm1(min(new - old, 50.0))
        figures = f"({perplexity(new)} {on}, the source {perplexity(old)})"
        if more < SEEN:
            return f"{costs} no perplexity {figures}"
        if more >= 10:
            return f"{'multiplies' if one else 'multiply'} perplexity by {more + 1:,.0f} {figures}"
        return f"{'raises' if one else 'raise'} perplexity by {100 * more:.0f} % {figures}"
    if compared.accuracy:
        old, new = (100 * share for share in (compared.accuracy.source, compared.accuracy.result))
        figures = f"({new:.1f} % {on}, the source {old:.1f} %)"
        lost = f"{old - new:.1f} points of accuracy" if old - new >= 0.05 else "no accuracy"
        return f"{costs} {lost} {figures}"
    if compared.embeddings:
        kept = compared.embeddings.nearest_kept
        near = f", {100 * kept:.0f} % of the nearest neighbours" if kept is not None else ""
        return f"{keep} a cosine of {compared.embeddings.cosine:.3f} to the source's embeddings{near} {on}"
    if compared.relative_error is not None:
        return f"{change} the outputs by {100 * compared.relative_error:.0f} % of their size {on}"
    return f"{change} outputs that could not be measured"


def explain(names: Iterable[str], meanings: Mapping[str, str]) -> str:
    """Explain the names that occur, by the first word of each: `angular, second`, `block 3-8`."""
    there = [name.split()[0].rstrip(",") if name else "" for name in names]
    return "; ".join(f"{word}: {says}" for word, says in meanings.items() if word in there)


def list_next_steps(before: Shape, after: Shape, refused: UnfitFormats | None = None) -> list[str]:
    """Return what later steps cannot divide, first what is new with this surgery, and formats that cannot hold the
    result, with a choice that they could. Lines of 80 columns.
    """
    old, now = indivisible(before), indivisible(after)
    new, same = [n for n in now if n not in old], [n for n in now if n in old]
    lines = []
    if new:
        lines += wrap(f"What a next step cannot divide, new with this surgery: {spell_numbers(new)}.")
    if same:
        lines += wrap(
            f"What a next step cannot divide{', as before' if new else ', as in the source'}: {spell_numbers(same)}."
        )
    if refused:
        lines += wrap(f"{join_words(refused.formats)} cannot hold it: {refused.why}. What fits: {refused.instead}.")
    return lines


def spell_numbers(numbers: Sequence[Indivisible]) -> str:
    """Return `MLP 344 by quantiser groups of 32, 64, 128 and 256; 9 heads by 2, 4 and 8 GPUs`."""
    said = []
    for number in numbers:
        groups, gpus, kernels = ("/".join(map(str, by)) for by in (number.groups, number.gpus, number.kernels))
        by = [f"quantiser groups of {groups}"] if groups else []
        by += [f"{gpus} GPUs"] if gpus else []
        by += [f"kernels of {kernels}"] if kernels else []
        size = f"{number.size:,}"
        name = f"{size} {number.name}" if number.name.endswith("heads") else f"{number.name} {size}"
        said.append(f"{name} by {join_words(by)}")
    return "; ".join(said)


def draw_table(rows: Sequence[Sequence[object]], heads: Sequence[str], align: Sequence[str] | None = None) -> list[str]:
    """Return a table as lines; cells stay as written, aligned left or as `align` says for each column."""
    return tabulate(rows, headers=heads, colalign=align, disable_numparse=True).splitlines()


def side_by_side(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> list[str]:
    """Return a table of names, two columns of values, and their comparison."""
    return draw_table(rows, heads, ("left", "right", "right", "right"))


def shapes(before: Shape, after: Shape, keys: Iterable[str] = NUMBERS) -> list[list[str]]:
    """Return a row for each of these numbers of a shape."""
    return [[NUMBERS[key], before.column(key), after.column(key), ""] for key in keys]


def parameters(before: Mapping[str, int], after: Mapping[str, int]) -> list[list[str]]:
    """Return a row for every part that both have, with its change."""
    known = {key: label for key, label in PARTS.items() if key in before and key in after}
    return [numbers(f"parameters, {label}", before[key], after[key]) for key, label in known.items()]


def numbers(label: str, a: int, b: int) -> list[str]:
    """Return a row of two counts and their change."""
    return [label, f"{a:,}", f"{b:,}", change(a, b)]


def change(before: int, after: int) -> str:
    """Return the relative change in per cent; empty if there is none, `new` if `before` is 0."""
    return "" if before == after else f"{100 * (after / before - 1):+.1f} %" if before else "new"
