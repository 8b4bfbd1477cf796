"""What `plan --calibrate` foretells: its work is what a real cut counts, its arithmetic what can be done by hand."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from leansurgeon.checkpoints.source import open_source
from leansurgeon.cli.main import app
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.walk import calibrated, projection
from leansurgeon.surgery.walk.calibrated import calibrate
from leansurgeon.surgery.walk.ground import Ground, Options
from leansurgeon.surgery.walk.projection import CARDS, KNOWN, Samples, project, work
from tests.surgery.walk.test_device import data


def test_known_models_have_their_published_parameters():
    assert [size.parameters for size in KNOWN] == [1_235_814_400, 8_030_261_248, 70_553_706_496]


@pytest.mark.parametrize("heal", ["closed", "local"])
def test_the_work_is_what_a_cut_counts(heal, saved, monkeypatch):
    depth, tokens = 8, 16
    source = open_source(str(saved("gpt2", n_layer=depth)[0]))
    draws = torch.Generator().manual_seed(0)

    def batches(count):
        ids = (torch.randint(61, (4, tokens), generator=draws) for _ in range(count))
        return [{"input_ids": x, "labels": x} for x in ids]

    noise = Calibration("noise", "noise", "-", batches(8), batches(4), batches(1))
    trial = {"fit": 4 * 64, "guard": 2 * 64}
    monkeypatch.setattr(calibrated, "TRIAL", trial)
    steps = plan(source, Wanted(layers="6"), calibrated=True)
    outcome = calibrate(steps, noise, Options(heal=heal))
    outcome.close()
    monkeypatch.setattr(projection, "FIRST", 64)
    monkeypatch.setattr(projection, "STEP_TOKENS", 64)  # a batch is a step
    samples = Samples(8 * 64, 4 * 64, trial["fit"], trial["guard"], tokens)
    found = work(depth, 2, samples, local=heal == "local").passes(depth, samples)
    took = outcome.record.passes
    if heal == "closed":
        assert found == pytest.approx(took, rel=0.5)
    else:  # a span that gains nothing grows no further
        assert work(depth, 2, samples, local=False).passes(depth, samples) < took < found


def test_larger_models_and_slower_cards_take_longer():
    samples = Samples(32_768, 8_192)
    took = [[project(size, size.depth // 5, samples, card).minutes for size in KNOWN] for card in CARDS]
    assert all(row == sorted(row) for row in took) and all(b < a for a, b in zip(*took, strict=True))
    large = project(KNOWN[2], 16, samples, CARDS[0])
    assert 8 * KNOWN[2].block < large.gpu < 80e9 < KNOWN[2].parameters * 2  # blocks stream, the model never fits


def test_the_command_says_that_it_is_a_projection(saved):
    folder, _ = saved("llama")
    run = CliRunner().invoke
    done = run(app, ["plan", str(folder), "--layers", "3", "--calibrate", "--json"])
    rows = json.loads(done.stdout)["calibrated"]
    assert len(rows) == 2 + 6 and {row["card"] for row in rows} == {card.title for card in CARDS}
    assert [row["layers"] for row in rows[::2]] == [3, 12, 24, 60]  # a quarter of each goes
    told = run(app, ["plan", str(folder), "--layers", "3", "--calibrate"]).stdout
    assert "projection" in told and "H100" in told
    assert run(app, ["plan", str(folder), "--calibrate"]).exit_code != 0


def test_a_limit_of_time_for_healing_is_foretold(saved, monkeypatch):
    """At a rate of one operation a second the local fit alone takes days; of it, an hour is foretold."""
    monkeypatch.setattr(projection, "timed", lambda ground: projection.REACHED)
    steps = plan(open_source(str(saved("gpt2")[0])), Wanted(layers="3"), calibrated=True)
    limits = {"closed": None, "none": 0.0, "hour": 3600.0, "whole": None, "enough": 1e15}
    foretold = {
        name: projection.foretell(
            Ground(steps, data("gpt2"), Options(heal="closed" if name == "closed" else "local", heal_time=limit))
        )
        for name, limit in limits.items()
    }
    closed, none, hour, whole, enough = foretold.values()
    assert whole.seconds - closed.seconds > 3600 and enough == whole
    assert none.passes == pytest.approx(closed.passes) and none.passes < hour.passes < whole.passes
    assert hour.seconds == pytest.approx(none.seconds + 3600)
