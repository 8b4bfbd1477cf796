"""Two processes whose clocks disagree: what the clock decides is decided by that of the first, for both."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from leansurgeon.training import evaluator, loop, observe, state
from leansurgeon.training.optimizer import Trainer
from tests.support import training_interrupted as cut

BY_CLOCK = {"eval": {"every": "1h", "batch": 2}, "checkpoint": {"every": "1h"}, "log_every": 2, "ema": None}
TIMED = {"duration": "1h", "schedule": {"name": "triangle"}, "log_every": 2, "ema": None}


def _train(folder, fast: int, factor: float, settings: dict) -> None:
    """One of two processes; on `fast` so many seconds pass in one. Leaves what it saved and where its pace stood."""
    rank = int(os.environ["RANK"])
    saves, paces, save, step = [], [], evaluator.save_checkpoint, Trainer.step
    evaluator.save_checkpoint = lambda run: (saves.append(run.history.done), save(run))

    def stepped(self, at, batches):
        paces.append(self.pace.state())
        return step(self, at, batches)

    Trainer.step = stepped
    if rank == fast:
        loop.time = evaluator.time = observe.time = state.time = SimpleNamespace(
            perf_counter=lambda: factor * time.perf_counter()
        )
    cut.run(folder, **settings)
    (folder / f"told-{rank}").write_text(json.dumps({"saves": saves, "paces": paces}))


def _told(folder) -> tuple[dict, dict]:
    return tuple(json.loads((folder / f"told-{rank}").read_text()) for rank in (0, 1))


@pytest.mark.parametrize(("fast", "steps"), [(0, [2, 4, 6, 8, 10, 12, 14]), (1, [])])
def test_the_clock_of_the_first_process_calls_for_evaluations_and_checkpoints(fast, steps, tmp_path):
    assert cut.processes(2, _train, tmp_path, fast, 1e7, BY_CLOCK, patience=20) == [0, 0]
    assert [row["step"] for row in cut.told(tmp_path) if row["type"] == "eval"] == [0, *steps, 16]
    assert [one["saves"] for one in _told(tmp_path)] == [steps, steps]


def test_processes_whose_clocks_disagree_stand_at_the_same_place_of_a_timed_schedule(tmp_path):
    """Otherwise each would step with a learning rate of its own, and two models would part without a word."""
    assert cut.processes(2, _train, tmp_path, 0, 1e4, TIMED, patience=20) == [0, 0]
    one, other = _told(tmp_path)
    assert one["paces"] == other["paces"] and one["paces"][0]["seconds"] > 0
