"""Which start wins after training, on a small Llama: frozen blocks, that learning helps, and the order."""

from __future__ import annotations

import copy

import torch

from tests.benchmarks.rivals.common import blocks, without_block
from tests.benchmarks.rivals.distil import at_their_place, healed, said
from tests.benchmarks.rivals.healing import table
from tests.conftest import build


def test_blocks_before_the_cut_stay_and_the_others_come_nearer_to_the_source():
    whole = build("llama", num_hidden_layers=6).eval()
    ids = torch.randint(5, 60, (8, 16), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": part, "labels": part} for part in ids.split(4)]
    model = copy.deepcopy(whole)
    without_block(model, 3, 2)
    assert at_their_place(model, whole) == 2
    before, distances = copy.deepcopy(model), []

    def look(seconds: float, steps: int) -> None:
        with torch.no_grad():
            distances.append((seconds, steps, float((said(model, batches[0])[0] - said(whole, batches[0])[0]).norm())))

    healed(model, whole, batches, [0.0, 0.4], look)
    (first, none, far), (last, some, near) = distances
    assert (first, none, last) == (0.0, 0, 0.4) and some > 0 and near < far
    old, new = before.state_dict(), model.state_dict()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed and all(name.startswith(("model.layers.2", "model.layers.3")) for name in changed)
    assert not any(p.requires_grad for block in blocks(model)[:2] for p in block.parameters())


def test_the_order_is_that_of_means_over_domains_and_seeds():
    def row(start, seed, minutes, *ratios):
        domains = {name: {"ratio": ratio} for name, ratio in zip("ab", ratios, strict=True)}
        return {"model": "m", "shape": "3 layers", "start": start, "seed": seed, "minutes": minutes, "domains": domains}

    rows = [row("x", 0, 0.0, 9, 9), row("x", 0, 0.0, 1.2, 1.4), row("x", 1, 0.0, 1.0, 1.2), row("y", 0, 0.0, 1.1, 1.2)]
    rows += [row("y", 0, 5.0, 1.1, 1.2), row("x", 0, 5.0, 1.0, 1.1)]
    printed = table(rows)
    assert "after 0 minutes, mean over domains and seeds: y 1.150, x 1.200." in printed
    assert "after 5 minutes, mean over domains and seeds: x 1.050, y 1.150." in printed
