"""What the rows of state files say: a table, and where and by how much ours is below its rivals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, stdev

import pandas
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


def domains_of(rows: Iterable[Row]) -> list[str]:
    """The domains, in the order in which they first stand."""
    return list(dict.fromkeys(name for row in rows for name in row["domains"]))


def table(rows: Sequence[Row]) -> str:
    """By model, layers and method: perplexity over the source's and divergence on every domain, over the seeds; the
    share of labels that is right where the model classifies.
    """
    rows = list({(r["model"], r["layers"], r["method"], r["seed"]): r for r in rows}.values())  # of several the last
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


def sentences(rows: Sequence[Row]) -> list[str]:
    """For every model: in how many cells (layers x domain) our default is lowest, and how far below the best rival's
    excess it is at each depth. Excess is ratio - 1; of a model that classifies the divergence, since its cut may be
    surer of the right class than itself. Only seeds that both were measured at count.
    """
    keys = ("model", "layers", "method", "seed")
    cells = pandas.DataFrame(
        [{key: row[key] for key in keys} | {"domain": domain, "excess": excess(row, found)}
         for row in rows for domain, found in row["domains"].items()]
    )  # fmt: skip
    said = []
    for model, part in cells.groupby("model", sort=False):
        own, others = part[part.method == DEFAULT], part[~part.method.isin(OURS)]
        both = others.merge(own, on=["layers", "domain", "seed"], suffixes=("_theirs", ""))
        if both.empty:
            said.append(f"{model}: no cell has both {DEFAULT} and a rival.")
            continue
        both = both.rename(columns={"method_theirs": "rival"})
        pairs = both.groupby(["layers", "domain", "rival"], sort=False)[["excess", "excess_theirs"]].mean()
        lowest = (pairs.excess < pairs.excess_theirs).groupby(["layers", "domain"], sort=False).all()
        lost = ", ".join(f"{layers} layers on {domain}" for layers, domain in lowest[~lowest].index)
        cells_won = f"{lowest.sum()} of {len(lowest)} cells (layers x domain, mean over the seeds that both have)"
        said.append(f"{model}: {DEFAULT} is lowest in {cells_won}{f'; not at {lost}' if lost else ''}.")
        what = "Divergence" if any(r.get("classifies") for r in rows if r["model"] == model) else EXCESS
        depths = [below(layers, found.droplevel("layers")) for layers, found in pairs.groupby("layers", sort=False)]
        said.append(f"{what} beside the best rival's: " + "; ".join(filter(None, depths)) + ".")
    return said


def excess(row: Row, found: dict[str, float]) -> float:
    """How much worse than the source a cut is on a domain."""
    return found["kl"] if row.get("classifies") else found["ratio"] - 1


def below(layers: int, pairs: pandas.DataFrame) -> str:
    """`24 layers 0.235 against 0.290 of NAME, 19 % below (...)` over all domains, then on each against its best."""
    domains = pairs.groupby("domain", sort=False)
    rivals = pairs.groupby("rival", sort=False)
    means = rivals.mean()[rivals.size() == len(domains)]
    if means.empty:
        return ""
    best = means.excess_theirs.idxmin()
    own, theirs = means.loc[best]
    each = ", ".join(f"{domain} {against(*found.loc[found.excess_theirs.idxmin()])}" for domain, found in domains)
    return f"{layers} layers {own:.3f} against {theirs:.3f} of {best}, {against(own, theirs)} ({each})"


def against(own: float, theirs: float) -> str:
    """`19 % below`, as a share of the rival's excess; a rival without excess has none."""
    if theirs <= 0:
        return f"{own:.3f} against {theirs:.3f}"
    share = 1 - own / theirs
    return f"{abs(share):.0%} {'below' if share >= 0 else 'above'}".replace("%", " %")
