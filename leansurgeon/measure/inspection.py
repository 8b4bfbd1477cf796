"""Inspect a model by its files, without running it: shape, parameters, how its library treats head_dim, where it comes
from, and known traps. Uses torch only to ask the library which weights a head needs.

The main trap: if a library derives head_dim from width // heads, editing the number of heads leaves every tensor's
shape unchanged. The checkpoint loads strictly, without a warning, and computes another function.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from leansurgeon.architectures.base import Architecture
from leansurgeon.checkpoints.record import SurgeryRecord
from leansurgeon.checkpoints.source import Source
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.shape import NUMBERS, Shape

LABELS = {number: words for number, words in NUMBERS.items() if number != "inner"} | {"mlp_dim": "MLP width"}


@dataclass(frozen=True)
class Finding:
    """`contradiction`: the files disagree with each other. `trap`: nothing is visibly wrong, but beware."""

    level: str
    says: str


@dataclass(frozen=True)
class Inspection:
    source: Source
    heads: str  # how the library treats head_dim
    findings: tuple[Finding, ...]
    record: SurgeryRecord | None  # surgery.json

    def as_dict(self) -> JsonObject:
        """Return the findings for JSON."""
        source, arch = self.source, self.source.architecture
        # Who can load a changed number of heads at the same head_dim.
        keep = "library" if arch.stores_head_dim else "leansurgeon" if arch.decoupled else "nobody"
        return {
            "name": source.name,
            "kind": source.kind,
            "family": arch.name,
            "library": arch.library,
            "class": (source.config.get("architectures") or [None])[0],
            "shape": source.shape.as_dict(),
            "parameters": source.parameters.as_dict(),
            "head_dim": {"stored": arch.stores_head_dim, "keep": keep, "says": self.heads},
            "findings": [asdict(f) for f in self.findings],
            "surgery": self.record and self.record.as_dict(),
            "notes": list(source.notes),
        }


def inspect(source: Source) -> Inspection:
    """Collect everything that can be said about an opened source."""
    record, trouble = source.record, source.record_trouble
    if record is not None and record.plan.after is None:
        record, trouble = None, "it holds no plan"
    damage = trouble and f"surgery.json is damaged, so the model's past is not known ({trouble})."
    wrong = damage, contradiction(source.shape, record), describe_ignored_head_dim(source)
    traps = describe_hidden_edits(source, recorded=record is not None), *(f"{note}." for note in source.head_note)
    findings = [Finding("contradiction", says) for says in wrong if says]
    findings += [Finding("trap", says) for says in traps if says]
    return Inspection(source, head_policy(source.architecture), tuple(findings), record)


def head_policy(arch: Architecture) -> str:
    """Describe in a sentence what the library does with head_dim when the number of heads changes."""
    who = "our modelling file" if arch.library == "leansurgeon" else arch.library
    if arch.stores_head_dim:
        limit = ", if the number of heads divides the width" if arch.heads_divide_width else ""
        return f"{who} stores head_dim for {arch.name}: heads can be added and keep their size{limit}."
    derived = f"{who} derives head_dim of {arch.name} from width // heads"
    if arch.decoupled:
        return f"{derived}: heads that keep their size need a modelling file of ours, which travels with the result."
    return f"{derived}: heads can be split only (--head-dim split); heads that keep their size cannot be stored."


def contradiction(shape: Shape, record: SurgeryRecord | None) -> str:
    """Describe where config.json states another shape than surgery left; empty if it does not."""
    left = record.plan.after if record else None
    if left is None:
        return ""
    stages = len(left.stages), len(shape.stages)
    if stages[0] != stages[1]:
        return f"surgery.json has {stages[0]} stages, config.json {stages[1]}."
    plain = all(t.kv_heads == t.heads for t in (*left.stages, *shape.stages))
    differing = [
        (label, left.column(n), shape.column(n))
        for n, label in LABELS.items()
        if left.column(n) != shape.column(n) and not (plain and n == "kv_heads")
    ]
    if not differing:
        return ""
    what = ", ".join(f"{label} {a} in surgery.json and {b} in config.json" for label, a, b in differing)
    only_heads = {label for label, *_ in differing} <= {"heads", "head_dim", "key/value heads"}
    silent = only_heads and left.column("inner") == shape.column("inner")
    says = " Every tensor keeps its shape, so libraries load it without a warning and compute another function."
    return f"Edited by hand after surgery: {what}.{says if silent else ''}"


def describe_ignored_head_dim(source: Source) -> str:
    """Describe a head_dim in the config that the family's library ignores; empty if there is none."""
    arch, stage = source.architecture, source.shape.stages[0]
    asked = source.flat_config.get("head_dim")
    if arch.stores_head_dim or asked is None or asked == stage.head_dim:
        return ""
    reads = " for attention, while its rotary positions read it: it fails or computes something else"
    also = reads if arch.positions == "rope" else ""
    says = f"config.json says head_dim = {asked}, which {arch.library} ignores in {arch.name}{also}"
    return f"{says}; heads are {stage.head_dim} wide."


def describe_hidden_edits(source: Source, *, recorded: bool) -> str:
    """Describe which keys could have been edited without any tensor's shape showing it; empty if there are none."""
    arch, shape = source.architecture, source.shape
    stages = []  # of the same inner width, with more and smaller heads or one large head
    for stage in shape.stages:
        by = next((by for by in range(2, stage.head_dim + 1) if stage.head_dim % by == 0), 0)
        heads, shared = (stage.heads * by, stage.kv_heads * by) if by else (1, 1)
        stages.append(replace(stage, heads=heads, kv_heads=shared, head_dim=stage.inner // heads))
    split = Shape(tuple(stages))
    sizes = [[spec.shape for spec in arch.tensors(source.config, s)] for s in (shape, split)]
    if source.weights is None or sizes[0] != sizes[1]:
        return ""
    flat = source.flat_config
    key = " or ".join(dict.fromkeys(blocks.keys.heads for blocks in arch.stages if blocks.keys)) or arch.keys.heads
    if arch.keys.head_dim and flat.get(arch.keys.head_dim):
        key += f" together with {arch.keys.head_dim}"
    known = (
        "surgery.json would show it unless it was edited, too."
        if recorded
        else "Without a surgery.json nothing can tell with how many heads it was trained."
    )
    return f"An edit of {key} in config.json would show in no tensor's shape. {known}"
