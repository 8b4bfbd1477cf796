"""Trackers besides metrics.jsonl: what they are told, and what is said where one is not installed."""

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from leansurgeon.errors import UsageError
from leansurgeon.training import observe
from tests.support.training_standin import trained


class Kept:
    """Stands in for a tracker of Accelerate and keeps what it is told."""

    requires_logging_directory = True

    def __init__(self, name: str, logging_dir: str) -> None:
        self.name, self.folder, self.rows, self.settings, self.ended = name, logging_dir, [], None, 0
        made.append(self)

    def store_init_configuration(self, values: dict) -> None:
        self.settings = values

    def log(self, values: dict, step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.ended += 1


made: list[Kept] = []


def test_a_tracker_gets_the_numbers_of_metrics_jsonl(tmp_path, monkeypatch):
    monkeypatch.setattr(observe, "find_spec", lambda name: True)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Kept)
    made.clear()
    _, rows = trained(tmp_path, trackers=["tensorboard"])
    (kept,) = made
    assert kept.name == "stand-in" and kept.folder == str(tmp_path / "run" / "trackers") and kept.ended == 1
    assert kept.settings["train.optim.lr"] == 0.01 and kept.settings["train.trackers"] == "['tensorboard']"
    for (step, told), row in zip(kept.rows, rows, strict=True):
        assert step == row["step"]
        if row["type"] == "train":
            assert all(told[key] == row[key] for key in ("loss", "lr", "grad_norm")) and told["tokens/s"] > 0
        else:
            assert told == {"eval/perplexity": row["metric"], "eval/loss": row["loss"]}


def test_a_tracker_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(observe, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"\btracker wandb\b.*`pip install wandb`"):
        observe.check_trackers(("wandb",))
