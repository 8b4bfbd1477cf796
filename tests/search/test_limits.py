"""How long and how often a latency is taken, and whose memory: counted with a clock of the test's own."""

from __future__ import annotations

from statistics import median

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.costs import memory, speed
from leansurgeon.measure.data import inputs
from leansurgeon.search.outcome import Limit, latency, pick, training_memory
from leansurgeon.search.space import Candidate
from leansurgeon.surgery.requested_shape import RequestedShape


@pytest.fixture
def passes(monkeypatch):
    """What every forward pass was given: whether the model trains, and the sizes of its inputs."""
    seen = []

    def run(model, batch):
        seen.append((model.training, [tuple(entry.shape) for entry in batch.values()]))

    monkeypatch.setattr(inputs, "run", run)
    return seen


def clock(monkeypatch, *seconds: float) -> list[float]:
    """Passes last so long, in turn; what was timed stands in the list."""
    taken: list[float] = []

    def clocked(work, device):
        work()
        taken.append(seconds[len(taken) % len(seconds)])
        return taken[-1]

    monkeypatch.setattr(speed, "time_work", clocked)
    return taken


# At least ten passes, and at least 0.3 s of them: 0.3 s / (1/64 s) = 19.2.
@pytest.mark.parametrize(("seconds", "count"), [((1 / 64,), 20), ((1.0, 8.0, 2.0), 10)])
def test_a_latency_is_the_median_of_enough_passes(seconds, count, passes, monkeypatch):
    taken = clock(monkeypatch, *seconds)
    source = open_source("digits-vit")
    assert latency(source, source.shape.with_(depth=1)) == 1000 * median(taken)
    assert len(taken) == count and len(passes) > count  # some before the clock runs
    assert set(map(str, passes)) == {str((False, [(1, 1, 8, 8)]))}  # one sample, nothing is dropped


@pytest.mark.parametrize(("asked", "tokens"), [(None, 40), (7, 7)])
def test_a_text_is_as_long_as_is_asked_or_as_there_are_positions(asked, tokens, passes, monkeypatch, saved):
    clock(monkeypatch, 1.0)
    folder, _ = saved("bert")
    source = open_source(str(folder))
    latency(source, source.shape, asked)
    assert all(size == (1, tokens) for _, sizes in passes for size in sizes)


def test_the_memory_of_a_shape_is_that_of_a_model_of_this_shape(saved):
    folder, model = saved("vit", num_hidden_layers=2, num_attention_heads=6, intermediate_size=64)
    shallow, setting = open_source(str(folder)), memory.Setting(8)
    predicted = training_memory(shallow, shallow.shape, setting)
    deep = open_source(str(saved("vit")[0]))
    assert training_memory(deep, shallow.shape, setting) == predicted
    assert predicted > 4 * 4 * sum(p.numel() for p in model.parameters())  # weights, gradients, two moments in fp32


@pytest.fixture
def shapes():
    """By name: MLP widths 1 to 6, of which 2 and 5 have the old heads; a shape has as many parameters."""
    shape = open_source("digits-vit").shape
    return [Candidate(RequestedShape(), shape.with_(mlp_dim=n), n, more_heads=n not in (2, 5)) for n in range(1, 7)]


def test_places_for_the_old_heads_are_not_counted_twice(shapes):
    widths = [c.parameters for c in pick(shapes, 3, 1, [])]
    assert widths == [1, 2, 3]
    assert [c.parameters for c in pick(shapes, 4, 2, [])] == [1, 2, 3, 5]
    assert [c.parameters for c in pick(shapes, 5, 4, [])] == [1, 2, 3, 4, 5]  # there are only two with the old heads


def test_who_is_picked_keeps_every_limit(shapes):
    small, light = Limit(4, lambda c: c.parameters), Limit(30, lambda c: {4: 40, 5: 50}.get(c.parameters, 0))
    assert [c.parameters for c in pick(shapes, 6, 2, [small])] == [1, 2, 3, 4]
    assert [c.parameters for c in pick(shapes, 6, 2, [small, light])] == [1, 2, 3]
