"""Which start wins after training, on a small Llama: rows, resume, frozen blocks, and that learning helps."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tests.benchmarks.rivals.common import blocks, without_block
from tests.benchmarks.rivals.distil import at_their_place, healed, said
from tests.benchmarks.rivals.healing import main, table
from tests.conftest import build
from tests.support.models.word_models import WORDS, words


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


@pytest.mark.parametrize(
    "shape, starts", [(["--layers", "3"], ("closed", "smallest angle")), (["--heads", "2x"], ("add", "split"))]
)
def test_the_command_goes_on_by_starts_and_says_which_is_lowest(shape, starts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    build("llama", num_hidden_layers=4, attention_bias=False, mlp_bias=False).save_pretrained(tmp_path / "model")
    words(tmp_path / "model")
    lines = (" ".join(WORDS[(k * k + j * j) % 25] for j in range(9)) for k in range(160))
    (tmp_path / "a.txt").write_text("\n".join(lines))
    state = tmp_path / "healing.jsonl"
    call = ["--model", str(tmp_path / "model"), *shape, "--calibrate", str(tmp_path / "a.txt"), "--samples", "8"]
    call += ["--train", "8", "--windows", "2", "--minutes", "0.002", "--every", "0.001", "--state", str(state)]
    call += [word for start in starts for word in ("--start", start)]
    main(call)
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    assert [(row["start"], row["minutes"]) for row in rows] == [(s, m) for s in starts for m in (0.0, 0.001, 0.002)]
    state.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))  # the second start did not end
    main(call)
    again = [json.loads(line) for line in state.read_text().splitlines()]
    assert [row["start"] for row in again] == [starts[0]] * 3 + [starts[1]] * 5
    printed = capsys.readouterr().out
    assert "after 0.002 minutes" in printed and "0.001 min" in printed
    if "add" in starts:  # silent heads are exact
        assert rows[0]["domains"]["a.txt"]["ratio"] == pytest.approx(1, abs=1e-4)


def test_the_order_is_that_of_means_over_domains_and_seeds():
    def row(start, seed, minutes, *ratios):
        domains = {name: {"ratio": ratio} for name, ratio in zip("ab", ratios, strict=True)}
        return {"model": "m", "shape": "3 layers", "start": start, "seed": seed, "minutes": minutes, "domains": domains}

    rows = [row("x", 0, 0.0, 9, 9), row("x", 0, 0.0, 1.2, 1.4), row("x", 1, 0.0, 1.0, 1.2), row("y", 0, 0.0, 1.1, 1.2)]
    rows += [row("y", 0, 5.0, 1.1, 1.2), row("x", 0, 5.0, 1.0, 1.1)]
    printed = table(rows)
    assert "after 0 minutes, mean over domains and seeds: y 1.150, x 1.200." in printed
    assert "after 5 minutes, mean over domains and seeds: x 1.050, y 1.150." in printed
