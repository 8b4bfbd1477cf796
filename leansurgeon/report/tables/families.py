"""The table of `leansurgeon families`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version

from leansurgeon.errors import plural
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.surgery.family_check import FamilyCheck

NUMBERS = ("depth", "heads", "mlp_dim")


def counts(rows: Sequence[FamilyCheck]) -> Mapping[str, int]:
    """Return how many types can be tried, and how many allow each change."""
    built = [row for row in rows if row.built]
    return {
        "types": len(rows),
        "tried": len(built),
        **{number: sum(row.can(number) for row in built) for number in NUMBERS},
        "all three": sum(all(row.can(number) for number in NUMBERS) for row in built),
        "heads by our modelling file": sum(row.can("heads") and row.decoupled for row in built),
        "wrong": sum(row.difference is not None and not row.right for row in built),
        "defects": sum(row.defect for row in built),
    }


def document(rows: Sequence[FamilyCheck]) -> JsonObject:
    """Return the JSON document that `--json` prints."""
    known = [asdict(row) for row in rows]
    shown = [{key: value for key, value in row.items() if key != "defect"} for row in known]
    return {"versions": versions(), "counts": counts(rows), "rows": shown}


def versions() -> Mapping[str, str]:
    """Return the versions of leansurgeon and of the libraries that the families come from."""
    return {name: version(name) for name in ("leansurgeon", "transformers", "timm", "torch")}


def describe_counts(rows: Sequence[FamilyCheck]) -> str:
    """Return a paragraph on how many types can be cut in which way."""
    count = counts(rows)
    return (
        f"{count['tried']} of {plural(count['types'], 'type')} could be tried. Layers can be dropped in "
        f"{count['depth']}; heads can change in {count['heads']}, in {count['heads by our modelling file']} of them by "
        f"the modelling file that travels; the MLP can change in {count['mlp_dim']}, all three in "
        f"{count['all three']}. Results that differ from a cut by hand: {count['wrong']}; defects: {count['defects']}."
    )


def markdown(rows: Sequence[FamilyCheck]) -> str:
    """Return the whole page, with a table row for every type, and one for every timm model."""
    said = ", ".join(f"{name} {number}" for name, number in versions().items())
    of_timm = [row for row in rows if row.name.startswith("timm/")]
    types = [row for row in rows if row not in of_timm]
    lines = ["# Families", "", f"`leansurgeon families`, {said}."]
    lines += part(types, TYPES) if types else []
    lines += ["", "## timm", *part(of_timm, OF_TIMM)] if of_timm else []
    return "\n".join(lines) + "\n"


TYPES = (
    "A small random model of every type, with the flags of its default config (or those after `?`), was saved,",
    "cut by `shrink` (two layers fewer a stage, twice the heads of the same size, a wider MLP: whatever is not",
    "refused), loaded by its plain library or the modelling file that travels, and compared with the same cut by",
    "hooks in memory.",
)
OF_TIMM = (
    "A small random model of every name (fewer layers, narrower, smaller images where its constructor takes them) was",
    "saved by timm's `save_for_hf`, cut by `shrink` in the same way, loaded by `timm.create_model` (heads beyond the",
    "width: behind our entry point), and compared with the same cut by hooks in memory.",
)


def part(rows: Sequence[FamilyCheck], said: Sequence[str]) -> list[str]:
    """Return counts, method, the table, and what was not tried."""
    left = [f"- {row.name}: {plain(row.why)[:160]}" for row in rows if not row.built]
    return [
        *("", describe_counts(rows), "", *said, ""),
        "| name | class | layers | heads | MLP | difference | what stands in the way |",
        "|---|---|---|---|---|---|---|",
        *(line(row) for row in rows if row.built),
        *(("", "No small model of these runs on text, images or sound alone:", "", *left) if left else ()),
    ]


def line(row: FamilyCheck) -> str:
    """Return a type's row of the Markdown table."""
    heads = "by modelling file" if row.can("heads") and row.decoupled else mark(row, "heads")
    difference = f"{row.difference:.0e}" if row.difference is not None else "–"
    reasons = "; ".join(dict.fromkeys(plain(r)[:140] for r in row.refused.values() if r))
    why = "; ".join(text for text in (plain(row.why)[:160], reasons) if text)
    name = row.name + (" (declared)" if row.declared else "")
    return f"| {name} | {row.cls} | {mark(row, 'depth')} | {heads} | {mark(row, 'mlp_dim')} | {difference} | {why} |"


def mark(row: FamilyCheck, number: str) -> str:
    """Return whether the number (`depth`, `heads`, `mlp_dim`) can be changed, as yes or no."""
    return "yes" if row.can(number) else "no"


def plain(text: str) -> str:
    """Return text on one line, safe in a Markdown cell."""
    return " ".join(text.split()).replace("|", "/")
