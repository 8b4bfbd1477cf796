"""The table: every rival and ours on one model, the same tokens and windows. Rows that a file holds are kept."""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev

import torch
from tabulate import tabulate
from torch import nn

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.training.runs.sample_data import sample_data, sample_data_of_all
from tests.benchmarks.rivals import dropping, flattengpt, laco, linearpatch, replaceme
from tests.benchmarks.rivals.common import Batches, Rival
from tests.benchmarks.rivals.judge import judged
from tests.benchmarks.rivals.ours import ours

RIVALS: Mapping[str, Rival] = {
    "ShortGPT": dropping.shortgpt,
    "smallest angle": dropping.smallest_angle,
    "SLEB": dropping.sleb,
    "LaCo": laco.laco,
    "ReplaceMe, least squares": replaceme.by_least_squares,
    "ReplaceMe, cosine": replaceme.by_cosine,
    "LinearPatch (with its matrix)": linearpatch.linearpatch,
    "FlattenGPT": flattengpt.flattengpt,
}
OURS = {"leansurgeon, closed form": "closed", "leansurgeon, local fit": "local"}
Row = dict[str, object]


def windows(batches: list[dict]) -> Batches:
    return [batch["input_ids"] for batch in batches]


def cuts(source: Source, whole: nn.Module, data: Calibration, layers: int) -> Iterator[tuple[str, Callable]]:
    """Every method by name, and what makes its model."""
    tokens = [*windows(data.fit), *windows(data.guard)]  # what ours keeps to guard with, rivals may fit to
    count = source.shape.depth - layers

    def of(rival: Rival) -> nn.Module:
        model = copy.deepcopy(whole)
        rival(model, tokens, count)
        return model.eval()

    for name, rival in RIVALS.items():
        yield name, lambda rival=rival: of(rival)
    for name, heal in OURS.items():
        yield name, lambda heal=heal: ours(source, data, layers, heal)


def measure(folder: str, layers: int, named: list[str], others: list[str], seed: int, out: Path, samples: int) -> None:
    """Append what is not in `out` yet."""
    source = open_source(folder)
    done = {(r["method"], r["layers"], r["seed"], r["model"]) for r in rows_of(out)}
    data = sample_data_of_all(source, named, None, samples or None, seed, print)
    parts = {s.name: s for s in (data.sources or (data,))} | {
        name: sample_data(source, name, None, None, seed, print) for name in others
    }
    domains = {Path(name).name: windows(part.heldout) for name, part in parts.items()}
    whole = load(source.folder).model.eval()
    for name, make in cuts(source, whole, data, layers):
        if (name, layers, seed, source.slug) in done:
            continue
        start = time.perf_counter(), time.process_time()
        try:
            made, trouble = make(), None
        except (ValueError, RuntimeError) as error:
            made, trouble = None, str(error)
        row: Row = {"model": source.slug, "layers": layers, "method": name, "seed": seed, "data": data.digest}
        row |= {"seconds": time.perf_counter() - start[0], "cpu": time.process_time() - start[1], "trouble": trouble}
        row["domains"] = judged(whole, made, domains) if made else {}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{source.slug}, {layers} layers, seed {seed}: {name} after {row['cpu']:.0f} CPU s", flush=True)


def rows_of(out: Path) -> list[Row]:
    """What was measured already."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(rows: list[Row]) -> str:
    """By model, layers and method: perplexity over the source's and divergence on every domain, over the seeds."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["layers"], row["method"]), []).append(row)
    lines = []
    for (model, layers, method), found in groups.items():
        line = {"model": model, "layers": layers, "method": method, "seeds": len(found)}
        for domain in dict.fromkeys(name for row in found for name in row["domains"]):
            for key in ("ratio", "kl"):
                values = [row["domains"][domain][key] for row in found if domain in row["domains"]]
                spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
                line[f"{domain}, {key}"] = f"{mean(values):.3f}{spread}"
        lines.append(line | {"CPU s": round(mean(row["cpu"] for row in found)), "trouble": found[0]["trouble"] or ""})
    return tabulate(lines, headers="keys", tablefmt="github")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", required=True, help="one number or several: 27,24,20")
    parser.add_argument("--calibrate", action="append", required=True)
    parser.add_argument("--judge", action="append", default=[], help="texts that nobody is calibrated on")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--samples", type=int, default=0, help="windows to fit to")
    parser.add_argument("--out", type=Path, default=Path("rivals.jsonl"))
    asked = parser.parse_args(words)
    torch.manual_seed(0)
    for seed in map(int, asked.seeds.split(",")):
        for layers in map(int, asked.layers.split(",")):
            measure(asked.model, layers, asked.calibrate, asked.judge, seed, asked.out, asked.samples)
    print(table(rows_of(asked.out)))


if __name__ == "__main__":
    main()
