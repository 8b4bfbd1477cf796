"""Which start wins after training? The model of every start learns the source's logits for so many minutes of processor
time (`process_time`, judging not counted), and is judged on the way on the samples that judge the cuts themselves.

    python -m tests.benchmarks.rivals.healing --model MODEL --layers 24 --start closed --start local --start SLEB \
        --calibrate brown.txt --calibrate austen.txt --judge bible.txt --minutes 30 --every 5 --state healing.jsonl
    python -m tests.benchmarks.rivals.healing --table healing.jsonl

Starts: `closed` and `local` are ours, the others are rivals by name; with `--heads 2x` instead of `--layers`, `add` is
silent new heads and `split` children of the old ones, at equal parameters. Blocks learn from the one before the cut
on, the rest stays. The rate is that of `retrain`; it rises and falls by the clock, so all starts get it alike. A start
whose last row is in the state file is done; one that was interrupted begins anew.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pandas
from tabulate import tabulate
from torch import nn

from leansurgeon.checkpoints.source import open_source
from leansurgeon.commands.samples import sample_data_of_all
from tests.benchmarks.rivals.__main__ import Contest, move_batches
from tests.benchmarks.rivals.__main__ import rows_of as lines_of
from tests.benchmarks.rivals.common import Batches
from tests.benchmarks.rivals.distil import healed
from tests.benchmarks.rivals.judge import judged
from tests.benchmarks.rivals.ours import more_heads
from tests.benchmarks.rivals.table import OURS, Row

NAMES = {short: name for name, short in OURS.items()}


def started(contest: Contest, asked: argparse.Namespace, start: str) -> nn.Module:
    """The model of a start."""
    if asked.heads:
        return more_heads(contest.source, contest.data, asked.heads, start)
    return contest.made_by(NAMES.get(start, start), asked.layers)[0]


def table(rows: Sequence[Row]) -> str:
    """Ratio against minutes by domain and start, and the order of the starts at first and at last."""
    rows = {(r["model"], r["shape"], r["seed"], r["start"], r["minutes"]): r for r in rows}.values()
    keys = ("model", "shape", "seed", "start", "minutes")
    ratios = pandas.DataFrame(
        [{key: row[key] for key in keys} | {"domain": domain, "ratio": found["ratio"]}
         for row in rows for domain, found in row["domains"].items()]
    )  # fmt: skip
    lines = ratios.pivot(index=["model", "shape", "domain", "seed", "start"], columns="minutes", values="ratio")
    lines.columns = [f"{minutes:g} min" for minutes in lines.columns]
    words = []
    for (model, shape, minutes), found in ratios.groupby(["model", "shape", "minutes"]):
        means = found.groupby("start").ratio.mean().sort_values()
        order = ", ".join(f"{start} {ratio:.3f}" for start, ratio in means.items())
        words.append(f"{model}, {shape}, after {minutes:g} minutes, mean over domains and seeds: {order}.")
    told = tabulate(lines.reset_index(), headers="keys", tablefmt="github", floatfmt=".3f", showindex=False)
    return "\n".join([told, "", *words])


def cell(contest: Contest, batches: Batches, asked: argparse.Namespace, start: str, seed: int) -> None:
    """One start: its model, its training, and a row at every mark."""
    model = started(contest, asked, start).to(contest.whole.device)
    base = {"model": contest.source.slug, "shape": shape_of(asked)}

    def look(seconds: float, steps: int) -> None:
        found = judged(contest.said, model.eval(), contest.domains)
        row = base | {"start": start, "seed": seed, "minutes": seconds / 60, "steps": steps, "domains": found}
        with asked.state.open("a") as file:
            file.write(json.dumps(row) + "\n")
        ratios = ", ".join(f"{domain} x {at['ratio']:.3f}" for domain, at in found.items())
        print(f"{start}, seed {seed}, {seconds / 60:g} minutes, {steps} steps: {ratios}", flush=True)

    marks = [60 * asked.every * i for i in range(math.ceil(asked.minutes / asked.every))] + [60 * asked.minutes]
    healed(model, contest.whole, batches, marks, look)


def shape_of(asked: argparse.Namespace) -> str:
    """`24 layers` or `2x heads`."""
    return f"{asked.heads} heads" if asked.heads else f"{asked.layers} layers"


def main(words: list[str] | None = None) -> None:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--table", type=Path, nargs="+", metavar="STATE", help="print what these files hold, no more")
    known.add_argument("--model")
    known.add_argument("--layers", type=int)
    known.add_argument("--heads", help="2x or a number, with --start add and --start split")
    known.add_argument("--start", action="append", default=[], help="closed, local, a rival by name; add, split")
    known.add_argument("--calibrate", action="append", default=[])
    known.add_argument("--judge", action="append", default=[])
    known.add_argument("--seed", default="0", help="one number or several: 0,1,2")
    known.add_argument("--samples", type=int, default=0, help="that starts are made with; by default shrink's number")
    known.add_argument("--train", type=int, default=1_024, help="samples to train on")
    known.add_argument("--windows", type=int, default=8, help="samples of every domain that are judged on")
    known.set_defaults(device="cpu")  # processor time is no clock of a GPU
    known.add_argument("--minutes", type=float, default=30.0)
    known.add_argument("--every", type=float, default=5.0, help="minutes between two looks")
    known.add_argument("--state", type=Path, default=Path("healing.jsonl"))
    asked = known.parse_args(words)
    if not asked.table:
        if not (asked.model and asked.calibrate and asked.start and (asked.layers or asked.heads)):
            known.error("--model, --layers (or --heads), --start and --calibrate are needed, or --table")
        source = open_source(asked.model)
        for seed in map(int, asked.seed.split(",")):
            done = {(r["model"], r["shape"], r["start"], r["seed"], r["minutes"]) for r in lines_of(asked.state)}
            case = source.slug, shape_of(asked)
            left = [start for start in asked.start if (*case, start, seed, asked.minutes) not in done]
            if left:
                contest = Contest.of(asked, source, seed)
                data = sample_data_of_all(source, asked.calibrate, None, asked.train, seed, print)
            for start in left:
                cell(contest, move_batches(data.fit, contest.whole.device), asked, start, seed)
    print(table([row for state in asked.table or [asked.state] for row in lines_of(state)]))


if __name__ == "__main__":
    main()
