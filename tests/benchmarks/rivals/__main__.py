"""The table: every rival and ours on one model, the same tokens and windows. One cell after the other; cells that the
state file holds are kept, so that the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.commands.samples import sample_data, sample_data_of_all
from leansurgeon.measure.data import own
from leansurgeon.measure.data.batches import thin
from leansurgeon.measure.data.calibration import Calibration
from tests.benchmarks.rivals import compensated, dropping, flattengpt, folded, ghosted, laco, linearpatch, replaceme
from tests.benchmarks.rivals.common import Batches, Rival
from tests.benchmarks.rivals.judge import judged, said_by
from tests.benchmarks.rivals.ours import ours
from tests.benchmarks.rivals.table import OURS, Row, table

RIVALS: Mapping[str, Rival] = {  # those that take longest at the end
    "smallest angle": dropping.smallest_angle,
    "ReplaceMe, least squares": replaceme.by_least_squares,
    "LinearPatch (with its matrix)": linearpatch.linearpatch,
    "LinearPatch, folded": folded.folded,
    "Ghosted Layers (with its matrix)": ghosted.ghosted,
    "ShortGPT": dropping.shortgpt,
    "ReplaceMe, cosine": replaceme.by_cosine,
    "Prune&Comp": compensated.compensated,
    "LaCo": laco.laco,
    "LaCo, its notebook": laco.as_in_the_notebook,
    "FlattenGPT": flattengpt.flattengpt,
    "SLEB": dropping.sleb,
}
Made = tuple[nn.Module, dict[str, object]]


@dataclass(frozen=True)
class Contest:
    """What all methods of one seed share: the source, its model, sample data, the same as batches for rivals (what ours
    keeps to guard with, they may fit to), domains to judge on, and what the source says of these.
    """

    source: Source
    whole: nn.Module
    data: Calibration
    batches: Batches
    domains: Mapping[str, Batches]
    said: Mapping[str, list[tuple[Tensor, Tensor]]]

    @classmethod
    def of(cls, asked: argparse.Namespace, source: Source, seed: int) -> Contest:
        """The contest of one seed."""
        data = sample_data_of_all(source, asked.calibrate, None, asked.samples or None, seed, print)
        parts = {s.name: s for s in (data.sources or (data,)) if s.name != own.NAME}
        parts |= {name: sample_data(source, name, None, None, seed, print) for name in asked.judge}
        whole = load(source.folder).model.eval().to(asked.device)
        place = partial(move_batches, device=whole.device)
        domains = {Path(name).name: place(thin(part.heldout, asked.windows)) for name, part in parts.items()}
        return cls(source, whole, data, place([*data.fit, *data.guard]), domains, said_by(whole, domains))

    def made_by(self, name: str, layers: int) -> Made:
        """The model of one method, and what it told."""
        if name in OURS:
            made, told = ours(self.source, self.data, layers, OURS[name], str(self.whole.device))
            return made.to(self.whole.device), told
        model = copy.deepcopy(self.whole)
        RIVALS[name](model, self.batches, self.source.shape.depth - layers)
        return model.eval(), {}


def move_batches(batches: Batches, device: torch.device) -> Batches:
    """The same on a device."""
    return [{name: values.to(device) for name, values in batch.items()} for batch in batches]


def rows_of(state: Path) -> list[Row]:
    """What was measured already."""
    return [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []


def cells(asked: argparse.Namespace, source: Source, seed: int, end: float) -> None:
    """Append what is not in the state yet, as long as there is time."""
    contest = None
    for layers in map(int, asked.layers.split(",")):
        rows = [row for row in rows_of(asked.state) if not row["trouble"]]  # what failed is tried again
        done = {(r["method"], r["layers"], r["seed"], r["model"], r.get("device", "cpu")) for r in rows}
        wanted = [name for name in (*OURS, *RIVALS) if name in (asked.methods or (*OURS, *RIVALS))]
        for name in wanted:
            if (name, layers, seed, source.slug, torch.device(asked.device).type) in done:
                continue
            if time.monotonic() >= end:
                return print("No time is left for another cell; the same command goes on.", flush=True)
            contest = contest or Contest.of(asked, source, seed)
            row = cell(contest, name, layers, seed)
            with asked.state.open("a") as file:
                file.write(json.dumps(row) + "\n")


def cell(contest: Contest, name: str, layers: int, seed: int) -> Row:
    """One method at one depth: its time, and how good it is on every domain."""
    start = time.perf_counter(), time.process_time()
    try:
        (made, told), trouble = contest.made_by(name, layers), None
    except (ValueError, RuntimeError) as error:
        made, told, trouble = None, {}, str(error)
    row: Row = {"model": contest.source.slug, "layers": layers, "method": name, "seed": seed}
    row |= {"device": contest.whole.device.type, "data": contest.data.digest, "seconds": time.perf_counter() - start[0]}
    row |= {"cpu": time.process_time() - start[1], "trouble": trouble, "told": told}
    row |= {"tokens": tokens_in(contest.batches), "classifies": classifies(contest.data)}
    row |= {"domains": judged(contest.said, made, contest.domains) if made else {}}
    said = ", ".join(f"{domain} x {found['ratio']:.3f}" for domain, found in row["domains"].items())
    print(f"{layers} layers, seed {seed}: {name}, {row['cpu']:.0f} CPU s: {said or trouble}", flush=True)
    return row


def tokens_in(batches: Batches) -> int | None:
    """Places of the calibration texts, padding included; None of images."""
    return sum(b["input_ids"].numel() for b in batches) if "input_ids" in batches[0] else None


def classifies(data: Calibration) -> bool:
    """Whether a label belongs to a sample and not to a token."""
    return data.task is not None and data.task.head.endswith("classification")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    known = argparse.ArgumentParser(prog="python -m tests.benchmarks.rivals", description=__doc__)
    known.add_argument("--table", type=Path, nargs="+", metavar="STATE", help="print what these files hold, no more")
    known.add_argument("--model", help="a folder or hub id that transformers reads")
    known.add_argument("--layers", help="one number or several: 27,24,20")
    known.add_argument("--calibrate", action="append", default=[])
    known.add_argument("--judge", action="append", default=[], help="data that nobody is calibrated on")
    known.add_argument("--seed", default="0", help="one number or several: 0,1,2")
    known.add_argument("--samples", type=int, default=0, help="to fit to; by default as many as shrink takes")
    known.add_argument("--windows", type=int, default=8, help="samples of every domain that are judged on")
    known.add_argument("--methods", action="append", help="only these, by name")
    known.add_argument("--device", default="cpu", help="cpu or cuda")
    known.add_argument("--minutes", type=float, default=float("inf"), help="no new cell after so many")
    known.add_argument("--state", type=Path, default=Path("rivals.jsonl"))
    return known


def main(words: list[str] | None = None) -> None:
    asked = parser().parse_args(words)
    if asked.table:
        return print(table([row for state in asked.table for row in rows_of(state)]))
    if not (asked.model and asked.layers and asked.calibrate):
        parser().error("--model, --layers and --calibrate are needed, or --table")
    torch.manual_seed(0)
    end = time.monotonic() + 60 * asked.minutes
    source = open_source(asked.model)
    if source.architecture.library == "timm":
        raise SystemExit(f"{source.name} is timm's: rivals are rebuilt on blocks of transformers and of ours.")
    for seed in map(int, asked.seed.split(",")):
        cells(asked, source, seed, end)
    print(table(rows_of(asked.state)))


if __name__ == "__main__":
    main()
