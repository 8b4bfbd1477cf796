"""What stops a training, or keeps it going: no gain, a loss that is no number, too little memory; and what is advised
there is tried.
"""

import re

import pytest
import torch
from torch import nn

from leansurgeon.errors import Diverged, OutOfMemory, UsageError
from leansurgeon.training import distributed, guards
from leansurgeon.training.loop import train
from leansurgeon.training.recipe import reading
from tests.support import training_interrupted as cut
from tests.support.training_standin import (
    StandIn,
    Words,
    losses,
    recipe,
    run_training,
    trained,
    word_model,
)


def test_rolling_back_has_an_end(tmp_path):
    settings = {"optim": {"lr": 1e30}, "clip_grad": 0.0, "duration": "40st", "checkpoint": {"every": "1st"}}
    with pytest.raises(Diverged, match="last of 3 rollbacks"):
        run_training(tmp_path, nan="rollback", **settings)


class Greedy(nn.Module):
    """A model for which only so many samples fit in memory, in training or in evaluation, and fewer beside its
    gradients.
    """

    def __init__(self, most: int, *, beside: int = 99, training: bool = True) -> None:
        super().__init__()
        self.most, self.inner, self.beside, self.needs = most, word_model().model, beside, training

    def forward(self, x):
        gradients = any(parameter.grad is not None for parameter in self.parameters())
        if self.training is self.needs and len(x) > (min(self.most, self.beside) if gradients else self.most):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.inner(x)


@pytest.fixture
def probed(monkeypatch):
    """Whether a step fits is tried before the first one, as on a GPU."""
    monkeypatch.setattr(guards, "PROBED", ("cpu",))


def test_the_micro_batch_shrinks_and_the_global_batch_stays(probed, tmp_path):
    _, plain = trained(tmp_path / "plain")
    said = []
    summary, rows = trained(tmp_path / "greedy", loaded=StandIn(Greedy(5)), say=said.append)
    assert summary["micro_batch"] == 4 and any(re.search(r"\b8\b.*\bmemory; 4 x 4\b", line, re.S) for line in said)
    assert losses(rows) == pytest.approx(losses(plain), abs=1e-5)
    # The second micro batch of a step has to fit beside the gradients of the first.
    assert run_training(tmp_path / "beside", loaded=StandIn(Greedy(5, beside=2))).micro_batch == 2


def test_a_model_that_never_fits_is_one_sentence_and_advice_that_a_recipe_takes(probed, tmp_path):
    with pytest.raises(OutOfMemory, match="micro batch of 1") as error:
        run_training(tmp_path, loaded=StandIn(Greedy(0)))
    assert error.value.exit_code == 4 and not (tmp_path / "run").exists()
    sets = advised(error.value.hint)
    assert set(sets) == {"train.precision=bf16", "train.activation_checkpointing=true"}
    assert all(with_set(recipe(), text) != recipe() for text in sets)
    pictures = nn.Sequential(nn.Flatten(), Greedy(0))
    with pytest.raises(OutOfMemory, match="micro batch of 2"):  # pairs that are mixed
        run_training(tmp_path, loaded=StandIn(pictures, "pixel_values"), task=cut.Pictures(), mixup=0.4)


# -- advice that is followed -----------------------------------------------------------------------


def advised(hint: str) -> list[str]:
    """Every `A.B=C` behind a `--set`, of which each is to be tried."""
    return [text.rstrip(".,:") for text in re.findall(r"--set (\S+)", hint)]


def with_set(made, text):
    return reading.check_recipe(reading.plain(made), [text], "own")


@pytest.mark.parametrize(("training", "sizes"), [(True, (8, 4, 2)), (False, (6, 3))])
def test_too_little_memory(training, sizes, tmp_path):
    """Room for three samples of sixteen: advice after advice leads there."""
    made, key = recipe(eval={"every": "4st", "batch": 13}), "train.micro_batch" if training else "train.eval.batch"
    options = {"task": Words(), "cpu": True, "say": lambda text: None}
    for size in sizes:
        with pytest.raises(OutOfMemory) as error:
            train(made, tmp_path, tmp_path / str(size), loaded=StandIn(Greedy(3, training=training)), **options)
        assert advised(error.value.hint) == [f"{key}={size}"]
        made = with_set(made, f"{key}={size}")
    loaded = StandIn(Greedy(3, training=training))
    assert train(made, tmp_path, tmp_path / "run", loaded=loaded, **options).steps == 8


@pytest.mark.parametrize(
    "settings", [{"lora": {"rank": 2}}, {"precision": "fp16"}, {"optim": {"name": "lamb", "lr": 1e-3}}], ids=str
)
def test_fsdp2_with_what_it_does_not_bear(settings):
    made = recipe(parallel="fsdp2", **settings)
    with pytest.raises(UsageError, match="fsdp2") as caught:
        distributed.check_parallel(made.train, 2, lambda text: None)
    sets = advised(caught.value.hint)
    assert "train.parallel=ddp" in sets
    for text in sets:
        distributed.check_parallel(with_set(made, text).train, 2, lambda text: None)
