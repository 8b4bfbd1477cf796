"""The table: every rival and ours on one model, the same tokens and windows. One cell after the other; cells that the
state file holds are kept, so that the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, stdev

import torch
from tabulate import tabulate
from torch import nn

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.measure.data.batches import thin
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.training.runs.sample_data import sample_data, sample_data_of_all
from tests.benchmarks.rivals import dropping, flattengpt, laco, linearpatch, replaceme
from tests.benchmarks.rivals.common import Rival
from tests.benchmarks.rivals.judge import judged
from tests.benchmarks.rivals.ours import ours

OURS = {"leansurgeon, closed form": "closed", "leansurgeon, local fit": "local"}
RIVALS: Mapping[str, Rival] = {  # those that take longest at the end
    "smallest angle": dropping.smallest_angle,
    "ReplaceMe, least squares": replaceme.by_least_squares,
    "LinearPatch (with its matrix)": linearpatch.linearpatch,
    "ShortGPT": dropping.shortgpt,
    "ReplaceMe, cosine": replaceme.by_cosine,
    "LaCo": laco.laco,
    "FlattenGPT": flattengpt.flattengpt,
    "SLEB": dropping.sleb,
}
Row = dict[str, object]
Made = tuple[nn.Module, dict[str, object]]


def methods(source: Source, whole: nn.Module, data: Calibration, layers: int) -> dict[str, Callable[[], Made]]:
    """What makes the model of every method, by name."""
    batches = [*data.fit, *data.guard]  # what ours keeps to guard with, rivals may fit to

    def of(rival: Rival) -> Made:
        model = copy.deepcopy(whole)
        rival(model, batches, source.shape.depth - layers)
        return model.eval(), {}

    found = {name: lambda heal=heal: ours(source, data, layers, heal) for name, heal in OURS.items()}
    return found | {name: lambda rival=rival: of(rival) for name, rival in RIVALS.items()}


def rows_of(state: Path) -> list[Row]:
    """What was measured already."""
    return [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []


def cells(asked: argparse.Namespace, layers: int, seed: int, end: float) -> None:
    """Append what is not in the state yet, as long as there is time."""
    source = open_source(asked.model)
    done = {(r["method"], r["layers"], r["seed"], r["model"]) for r in rows_of(asked.state)}
    wanted = [name for name in (*OURS, *RIVALS) if name in (asked.methods or (*OURS, *RIVALS))]
    left = [name for name in wanted if (name, layers, seed, source.slug) not in done]
    if not left:
        return
    data = sample_data_of_all(source, asked.calibrate, None, asked.samples or None, seed, print)
    parts = {s.name: s for s in (data.sources or (data,))}
    parts |= {name: sample_data(source, name, None, None, seed, print) for name in asked.judge}
    domains = {Path(name).name: thin(part.heldout, asked.windows) for name, part in parts.items()}
    whole = load(source.folder).model.eval()
    makers = methods(source, whole, data, layers)
    for name in left:
        if time.monotonic() >= end:
            return print("No time is left for another cell; the same command goes on.", flush=True)
        start = time.perf_counter(), time.process_time()
        try:
            (made, told), trouble = makers[name](), None
        except (ValueError, RuntimeError) as error:
            made, told, trouble = None, {}, str(error)
        row: Row = {"model": source.slug, "layers": layers, "method": name, "seed": seed, "data": data.digest}
        row |= {"seconds": time.perf_counter() - start[0], "cpu": time.process_time() - start[1], "trouble": trouble}
        row |= {"told": told, "domains": judged(whole, made, domains) if made else {}}
        with asked.state.open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = ", ".join(f"{domain} x {found['ratio']:.3f}" for domain, found in row["domains"].items())
        print(f"{layers} layers, seed {seed}: {name}, {row['cpu']:.0f} CPU s: {said or trouble}", flush=True)


def table(rows: list[Row]) -> str:
    """By model, layers and method: perplexity over the source's and divergence on every domain, over the seeds."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["layers"], row["method"]), []).append(row)
    lines = []
    for (model, layers, method), found in groups.items():
        line = {"model": model, "layers": layers, "method": method, "seeds": len(found)}
        for domain in dict.fromkeys(name for row in rows for name in row["domains"]):
            for key in ("ratio", "kl"):
                values = [row["domains"][domain][key] for row in found if domain in row["domains"]]
                spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
                line[f"{domain}, {key}"] = f"{mean(values):.3f}{spread}" if values else ""
        lines.append(line | {"CPU s": round(mean(row["cpu"] for row in found)), "trouble": found[0]["trouble"] or ""})
    return tabulate(lines, headers="keys", tablefmt="github")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", required=True, help="one number or several: 27,24,20")
    parser.add_argument("--calibrate", action="append", required=True)
    parser.add_argument("--judge", action="append", default=[], help="data that nobody is calibrated on")
    parser.add_argument("--seed", default="0", help="one number or several: 0,1,2")
    parser.add_argument("--samples", type=int, default=0, help="to fit to; by default as many as shrink takes")
    parser.add_argument("--windows", type=int, default=8, help="samples of every domain that are judged on")
    parser.add_argument("--methods", action="append", help="only these, by name")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no new cell after so many")
    parser.add_argument("--state", type=Path, default=Path("rivals.jsonl"))
    asked = parser.parse_args(words)
    torch.manual_seed(0)
    end = time.monotonic() + 60 * asked.minutes
    for seed in map(int, asked.seed.split(",")):
        for layers in map(int, asked.layers.split(",")):
            cells(asked, layers, seed, end)
    print(table(rows_of(asked.state)))


if __name__ == "__main__":
    main()
