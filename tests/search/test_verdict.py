"""What a search may say, on outcomes made by hand: margins in closed form, orders by scipy."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
import scipy.stats
import torch

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Diverged
from leansurgeon.intervals import binomial_variance
from leansurgeon.search import findings, heals
from leansurgeon.search.cheap import CheapScores
from leansurgeon.search.findings import find_front, list_as_good, list_changes
from leansurgeon.search.halving import Result, Rung, Score
from leansurgeon.search.outcome import SearchOutcome
from leansurgeon.search.space import Budget, Candidate, Shapes
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.tasks.base import Metric
from leansurgeon.tasks.base import Score as TaskScore
from tests.support.models.word_models import sentence_encoder

SAMPLES = 10_000
ERROR = binomial_variance(0.9, SAMPLES) ** 0.5  # 0.3 points


@pytest.fixture(scope="module")
def source():
    return open_source("digits-vit")


def candidate(source, heads: int, mlp: int, parameters: int, **more) -> Candidate:
    return Candidate(
        RequestedShape(), source.shape.with_(depth=2, heads=heads, mlp_dim=mlp), parameters, heads > 4, **more
    )


def score(value: float) -> Result:
    return Result(Score(value, "accuracy", True, True, 1 - value, SAMPLES, binomial_variance(value, SAMPLES) ** 0.5))


def outcome(
    source, tried: list[Candidate], rungs: list[list[float]], cheap: list[CheapScores], control=None
) -> SearchOutcome:
    """`rungs` are accuracies of the candidates in their order; `control` is one with its accuracy, of the winner."""
    original = Candidate(RequestedShape(), source.shape, source.parameters.total)
    results = [{c.name: score(v) for c, v in zip(tried, values, strict=False)} for values in rungs]
    names = {}
    if control:
        results[-1][control[0].name] = score(control[1])
        names = {tried[0].name: control[0].name}
    results[-1][original.name] = score(0.5)
    numbers = {c.name: n for c, n in zip(tried, cheap, strict=True)}
    numbers |= {c.name: CheapScores(c.parameters) for c in (original, *([control[0]] if control else []))}
    schedule = [Rung(i + 1, len(values), Fraction(i + 1, len(rungs))) for i, values in enumerate(rungs)]
    return SearchOutcome(
        source, Budget(200_000), Shapes(tuple(tried), 9, 0, {}), numbers, tuple(tried),
        (control[0],) if control else (), original, results, schedule, names,
    )  # fmt: skip


def test_as_good_are_those_within_one_standard_error_of_the_difference(source):
    three = [candidate(source, 8, m, 1000 * m) for m in (96, 64, 32)]
    both = 2**0.5 * ERROR
    made = outcome(
        source, three, [[0.9, 0.9 - 0.95 * both, 0.9 - 1.1 * both]], [CheapScores(c.parameters) for c in three]
    )
    assert made.winner is three[0] and list_as_good(made) == [three[1]]


@pytest.mark.parametrize(("margin", "says"), [(1.8, "not shown"), (2.2, "seem to help")])
def test_heads_seem_to_help_from_two_standard_errors_on(source, margin, says):
    lean = candidate(source, 8, 64, 100_000)
    old = candidate(source, 4, 96, 100_001, control_of=lean.name)
    made = outcome(source, [lean], [[0.9]], [CheapScores(100_000)], (old, 0.9 - margin * 2**0.5 * ERROR))
    assert says in findings.compare_with_control(made)


def test_how_the_order_changed_is_scipys_tau(source):
    four = [candidate(source, 8, m, p) for m, p in ((16, 400), (32, 300), (48, 200), (64, 100))]
    numbers, values = [CheapScores(c.parameters) for c in four], [0.8, 0.95, 0.9, 0.7]
    made = outcome(source, four, [values, values[:2]], numbers)
    (first, second) = list_changes(made)
    tau = scipy.stats.kendalltau([4, 3, 2, 1], values).statistic
    assert (first["kendall_tau"], first["candidates"]) == (pytest.approx(tau), 4)
    assert (second["kendall_tau"], second["candidates"], set(second["moved_up"].values())) == (1.0, 2, {0})
    # Moves count places among those that are left.
    made = outcome(source, four, [values], numbers)
    made.rungs[0][four[1].name] = Result(None, "failed")
    (change,) = list_changes(made)
    assert change["moved_up"] == {four[0].name: -1, four[2].name: 1, four[3].name: 0}


@pytest.mark.filterwarnings("error")
def test_a_single_candidate_has_no_order(source):
    (change,) = list_changes(outcome(source, [candidate(source, 8, 16, 400)], [[0.8]], [CheapScores(400)]))
    assert change["kendall_tau"] is None and change["candidates"] == 1


def test_the_front_compares_on_the_last_rung_that_both_saw(source):
    """Large, small, one that is worse and larger than small, and one that is as good as the large one was at first."""
    four = [candidate(source, 8, m, p) for m, p in ((16, 10), (32, 5), (48, 6), (64, 10))]
    made = outcome(source, four, [[0.9, 0.8, 0.7, 0.9], [0.95]], [CheapScores(c.parameters) for c in four])
    assert find_front(made) == [four[i].name for i in (0, 1, 3)]
    made.rungs[0][four[1].name] = made.rungs[0][four[3].name] = Result(None, "failed")
    assert find_front(made) == [four[i].name for i in (0, 2)]


def test_the_front_knows_latency_and_memory_too(source):
    """The second is worse and as large, but faster; the third is faster than neither."""
    three = [candidate(source, 8, m, 100) for m in (16, 32, 48)]
    numbers = [CheapScores(100, memory=9, latency=x) for x in (2.0, 1.0, 2.0)]
    assert find_front(outcome(source, three, [[0.9, 0.8, 0.85]], numbers)) == [c.name for c in three[:2]]
    numbers = [CheapScores(100, memory=x, latency=2.0) for x in (9, 9, 8)]
    assert find_front(outcome(source, three, [[0.9, 0.8, 0.85]], numbers)) == [three[0].name, three[2].name]


def test_several_attentions_of_a_layer_give_its_largest_kappa():
    from leansurgeon.search.evidence import merge_by_layer

    assert merge_by_layer([1.0, 5.0, None, 2.0, None, None], 3) == [5.0, 2.0, None]


def test_the_source_is_nearest_to_itself(saved, tmp_path):
    """Without labels a candidate is judged by the cosine of its outputs with the source's: 1 where nothing is cut."""
    from leansurgeon.commands.samples import sample_data
    from leansurgeon.search.heals import HealTrial

    folder, text = sentence_encoder(saved, tmp_path, 40)
    encoder = open_source(str(folder))
    bench = HealTrial(encoder, sample_data(encoder, str(text), None, None, 0, print), tmp_path / "heals")
    for result in bench.judge_folder(encoder.folder).values():
        assert result.score.value == pytest.approx(1.0) and result.score.higher and result.score.label == "cosine"


def test_a_tasks_score_is_that_of_all_batches_together():
    class Pairs:
        metric = Metric("f1", "F1", True, False)

        def score(self, labels, batch):
            count = torch.tensor(float(len(labels)))
            return TaskScore(labels.sum(), count, labels.max(), count, torch.stack([labels.sum(), count]))

        def metric_value(self, sums):
            return {"f1": float(sums.extra[0] / sums.extra[1])}

    loaded = SimpleNamespace(forward=lambda batch: batch["labels"])
    batches = [{"labels": torch.tensor(labels)} for labels in ([1.0, 2.0, 3.0], [4.0, 5.0])]
    found = heals.task_score(loaded, SimpleNamespace(task=Pairs()), batches)
    assert (found.value, found.loss, found.samples, found.error) == (3.0, 3.0, 5, None)
    with pytest.raises(Diverged):
        heals.task_score(loaded, SimpleNamespace(task=Pairs()), [{"labels": torch.tensor([float("inf")])}])
