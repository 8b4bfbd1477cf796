"""Format costs in 80 columns: before and after, what each step saves, whether it fits."""

from __future__ import annotations

from leansurgeon.measure.costs.memory import PARTS
from leansurgeon.report.tables.cut import change, giga, list_next_steps, numbers, parameters, shapes, side_by_side
from leansurgeon.surgery.costs import STEPS, Costs
from leansurgeon.words import wrap

SHAPE = ("depth", "heads", "head_dim", "mlp_dim")
TITLES = dict(zip(STEPS, ("bf16 and fused attention", "depth", "heads", "MLP"), strict=True))


def costs_table(costs: Costs) -> str:
    """Return shape, parameters, FLOPs and memory before and after, with the changes in per cent."""
    a, b = costs.before, costs.after
    rows = [*shapes(a.shape, b.shape, SHAPE), *parameters(a.parameters.as_dict(), b.parameters.as_dict())]
    if a.operations and b.operations:
        tokens = f", {a.flops.tokens:,} tokens" if a.flops else ""
        x, y = a.operations, b.operations
        rows.append([f"GFLOPs forward{tokens}", giga(x), giga(y), change(x, y)])
    if a.memory and b.memory:
        rows += [sizes(f"memory, {part}", getattr(a.memory, part), getattr(b.memory, part)) for part in PARTS]
        rows.append(sizes("memory, peak", a.memory.total, b.memory.total))
    if costs.gpu:
        rows.append(numbers("largest micro batch", a.largest_batch, b.largest_batch))
    lines = [*side_by_side(rows, [costs.source, "before", "after", "change"]), "", *wrap(costs.why + ".")]
    lines += wrap(credit(costs))
    if b.memory:
        s = b.memory.setting
        words = [f"micro batch {s.batch}", s.precision, s.attention, s.optimizer]
        words += ["activation checkpointing"] if s.checkpointing else []
        words += [f"DDP on {s.world_size} GPUs"] if s.world_size > 1 else []
        lines += wrap(
            f"Memory of one GPU at {', '.join(words)}, as torch's allocator counts it, at its peak in the "
            f"{b.memory.when} pass; predicted, not measured. The CUDA context (about 0.5 GiB) comes on top."
        )
    if costs.gpu:
        fits = ["fits" if cost.fits else "does not fit" for cost in (a, b)]
        both = (
            f"both {'fit' if a.fits else 'do not fit'}"
            if a.fits == b.fits
            else f"before it {fits[0]}, after it {fits[1]}"
        )
        lines += wrap(f"{costs.gpu.title} ({costs.gpu.memory / 1e9:g} x 10^9 bytes; {costs.gpu.source}): {both}.")
    lines += list_next_steps(a.shape, b.shape, costs.refused)
    return "\n".join(lines)


def sizes(label: str, a: int, b: int) -> list[str]:
    """Return a row of two sizes in bytes and their change."""
    return [label, gib(a), gib(b), change(a, b)]


def gib(value: int) -> str:
    """Return bytes in GiB with two decimals, or in whole MiB below one GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def credit(costs: Costs) -> str:
    """Return where the saving comes from: in memory, first what needs no surgery; else in parameters."""
    memory, memory_after = costs.saved["memory"], costs.after.memory
    if memory and costs.start and memory_after:
        setting = memory_after.setting
        first = f"{setting.precision} and {'fused' if setting.attention == 'sdpa' else 'eager'} attention"
        steps = [
            f"{first if step == STEPS[0] else TITLES[step]} {100 * -saved / costs.start:+.1f} %"
            for step, saved in memory.items()
        ]
        return (
            f"Peak memory of {gib(costs.start)} in fp32 with eager attention becomes {gib(memory_after.total)}: "
            f"{', '.join(steps)} of it, credited in this order; only the last three are surgery."
        )
    parameters = costs.saved["parameters"]
    if parameters and any(parameters.values()):
        steps = [f"{TITLES[step]} {-saved:+,}" for step, saved in parameters.items()]
        return f"Change in parameters: {', '.join(steps)} (in this order)."
    return ""
