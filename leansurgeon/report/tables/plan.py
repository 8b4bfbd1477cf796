"""The plan as a person reads it: before and after, what is done, and where the saving comes from. 80 columns."""

from __future__ import annotations

from leansurgeon.report.tables.in_words import exactness
from leansurgeon.report.tables.next_steps import next_steps
from leansurgeon.report.tables.shape_rows import change, parameters, shapes, side_by_side
from leansurgeon.shape import NUMBERS
from leansurgeon.surgery.plan.planning import Plan
from leansurgeon.words import wrap


def plan_table(plan: Plan) -> str:
    """Shape and parameters before and after the surgery, as a text table."""
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
    if told := exactness(step.exactness for step in plan.operators):
        lines += wrap(f"{told}.")
    if not plan.operators:
        lines.append("- nothing to do: the shape is the source's own")
    lines += next_steps(before, after, plan.cannot_hold)
    return "\n".join(lines)


def giga(value: int) -> str:
    """Billions: `35.1`, `0.0105`."""
    return f"{value / 1e9:,.1f}" if value >= 1e10 else f"{value / 1e9:.3g}"
