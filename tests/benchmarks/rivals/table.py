"""What the rows of state files say: a table, and where and by how much ours is below its rivals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, stdev

from tabulate import tabulate

from tests.benchmarks.rivals import dropping, flattengpt, laco

Row = dict[str, object]
OURS = {"leansurgeon, closed form": "closed", "leansurgeon, local fit": "local"}
DEFAULT = "leansurgeon, local fit"  # what shrink does by itself; the sentences are about it
EXCESS = "Excess (ratio - 1)"
FEWER = {"SLEB": dropping.TOKENS, "FlattenGPT": flattengpt.TOKENS}
FEWER |= dict.fromkeys(("LaCo", "LaCo, its notebook"), laco.TOKENS)
SAW = (
    f"Tokens: SLEB chooses on the first {dropping.TOKENS:,} of the calibration tokens and LaCo on {laco.TOKENS:,}; "
    f"FlattenGPT chooses on all and refits on {flattengpt.TOKENS:,}. All other methods see all of them. "
    "An image counts as 64."
)


def once(rows: Iterable[Row]) -> list[Row]:
    """One row for every cell; of several the last."""
    return list({(r["model"], r["layers"], r["method"], r["seed"]): r for r in rows}.values())


def domains_of(rows: Iterable[Row]) -> list[str]:
    """The domains, in the order in which they first stand."""
    return list(dict.fromkeys(name for row in rows for name in row["domains"]))


def table(rows: Sequence[Row]) -> str:
    """By model, layers and method: perplexity over the source's and divergence on every domain, over the seeds; the
    share of labels that is right where the model classifies.
    """
    rows = once(rows)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["layers"], row["method"]), []).append(row)
    keys = ["ratio", "kl", *(["right"] if any(row.get("classifies") for row in rows) else [])]
    lines = []
    for (model, layers, method), found in groups.items():
        line = {"model": model, "layers": layers, "method": method, "seeds": len(found)}
        line["tokens"] = tokens_of(method, found[0])
        for domain in domains_of(rows):
            for key in keys:
                values = [row["domains"][domain][key] for row in found if domain in row["domains"]]
                line[f"{domain}, {key}"] = spread(values)
        line |= {"s": round(mean(row["seconds"] for row in found)), "CPU s": round(mean(row["cpu"] for row in found))}
        lines.append(line | {"trouble": next((row["trouble"] for row in found if row["trouble"]), "")})
    if not any(line["trouble"] for line in lines):
        lines = [{key: value for key, value in line.items() if key != "trouble"} for line in lines]
    return "\n\n".join(
        [tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True), SAW, *sentences(rows)]
    )


def tokens_of(method: str, row: Row) -> str:
    """How many calibration tokens a method saw, as far as the row says it."""
    given = row.get("tokens")
    few = FEWER.get(method)
    return f"{min(few, given or few):,}" if few else f"{given:,}" if given else "all"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    each = [mean(values), *([stdev(values)] if len(values) > 1 else [])]
    return " ± ".join(f"{value:.3f}" if value < 1_000 else f"{value:.1e}" for value in each)


# -- ours and its rivals --------------------------------------------------------------------------


def excess(rows: Sequence[Row], method: str, seeds: Iterable[int], domain: str) -> float:
    """Mean over the seeds of ratio - 1; of a model that classifies of the divergence, since its cut may be surer of the
    right class than itself.
    """
    found = {row["seed"]: row for row in rows if row["method"] == method}
    at = [found[seed] for seed in seeds]
    return mean(r["domains"][domain]["kl"] if r.get("classifies") else r["domains"][domain]["ratio"] - 1 for r in at)


def compared(rows: Sequence[Row], domain: str) -> dict[str, tuple[float, float]]:
    """By rival: our excess and its, over the seeds that both were measured at; `rows` are of one model and depth."""
    seeds = {m: {r["seed"] for r in rows if r["method"] == m and domain in r["domains"]} for m in methods_of(rows)}
    found = {}
    for method in methods_of(rows):
        shared = sorted(seeds[method] & seeds.get(DEFAULT, set()))
        if method not in OURS and shared:
            found[method] = excess(rows, DEFAULT, shared, domain), excess(rows, method, shared, domain)
    return found


def methods_of(rows: Iterable[Row]) -> list[str]:
    """The methods, in the order in which they first stand."""
    return list(dict.fromkeys(row["method"] for row in rows))


def sentences(rows: Sequence[Row]) -> list[str]:
    """For every model: in how many cells (layers x domain) our default is lowest, and how far below the best rival's
    excess it is at each depth.
    """
    said = []
    for model in dict.fromkeys(row["model"] for row in rows):
        depths = {row["layers"]: [r for r in rows if (r["model"], r["layers"]) == (model, row["layers"])]
                  for row in rows if row["model"] == model}  # fmt: skip
        cells = {(layers, domain): pairs for layers, part in depths.items() for domain in domains_of(part)
                 if (pairs := compared(part, domain))}  # fmt: skip
        if not cells:
            said.append(f"{model}: no cell has both {DEFAULT} and a rival.")
            continue
        lowest = [cell for cell, pairs in cells.items() if all(ours < theirs for ours, theirs in pairs.values())]
        lost = ", ".join(f"{layers} layers on {domain}" for layers, domain in cells if (layers, domain) not in lowest)
        said.append(f"{model}: {DEFAULT} is lowest in {len(lowest)} of {len(cells)} cells (layers x domain, mean over "
                    f"the seeds that both have){f'; not at {lost}' if lost else ''}.")  # fmt: skip
        parts = [below(layers, {d: p for (n, d), p in cells.items() if n == layers}) for layers in depths]
        what = "Divergence" if any(row.get("classifies") for part in depths.values() for row in part) else EXCESS
        said.append(f"{what} beside the best rival's: " + "; ".join(part for part in parts if part) + ".")
    return said


def below(layers: int, cells: dict[str, dict[str, tuple[float, float]]]) -> str:
    """`24 layers: 0.235 against 0.290 of NAME (19 % below): ...` over all domains, then on each against its best."""
    everywhere = set.intersection(*(set(pairs) for pairs in cells.values())) if cells else set()
    if not everywhere:
        return ""
    means = {name: [mean(pairs[name][i] for pairs in cells.values()) for i in (0, 1)] for name in everywhere}
    best = min(means, key=lambda name: means[name][1])
    own, theirs = means[best]
    each = ", ".join(f"{domain} {against(*min(pairs.values(), key=lambda pair: pair[1]))}"
                     for domain, pairs in cells.items())  # fmt: skip
    return f"{layers} layers {own:.3f} against {theirs:.3f} of {best}, {against(own, theirs)} ({each})"


def against(own: float, theirs: float) -> str:
    """`19 % below`, as a share of the rival's excess; a rival without excess has none."""
    if theirs <= 0:
        return f"{own:.3f} against {theirs:.3f}"
    share = 1 - own / theirs
    return f"{abs(share):.0%} {'below' if share >= 0 else 'above'}".replace("%", " %")
