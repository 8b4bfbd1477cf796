"""The comparisons of examples/results/claim.md: against scipy and statsmodels on made-up scores, and the recipes that
are to make the real ones.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.multitest import multipletests

from leansurgeon.checkpoints.source import open_source
from leansurgeon.experiment.arms import flops_of, list_wanted_shapes
from leansurgeon.surgery.planning import plan
from leansurgeon.training.recipe.reading import load
from leansurgeon.training.runs import summary
from leansurgeon.training.runs.summary import Model, Part, Scores, Summary, Task

FILE = Path(__file__).parent.parent.parent / "examples" / "claim" / "compare.py"
spec = importlib.util.spec_from_file_location("claim_compare", FILE)
compare = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = compare
spec.loader.exec_module(compare)

ARMS = ("base", "keep-4", "params-4", "split-4", "sharp", "even")
KAPPA = [
    {"type": "kappa", "step": step, "layers": [
        {"median": k + step, "centred_median": k, "output": {"median": 2 * k}, "jacobian": {"at_least": k / 2}}
        for k in (5.0, 15.0)
    ]}
    for step in (0, 60)
]  # fmt: skip
LOSSES = [{"type": "train", "step": s, "loss": 2.0 if s <= 54 else 1.9} for s in range(6, 66, 6)]


def write(workspace: Path, name: str, depth: int, arm: str, seed: int, score: float) -> None:
    """One finished run of an experiment."""
    run = workspace / name / f"{arm}-s{seed}"
    run.mkdir(parents=True)
    made = Summary(
        model=Model(shape={"stages": [{"depth": depth}]}, parameters=1000),
        task=Task("fashion-mnist", "accuracy", percent=True),
        final=Scores(0.5, score),
        experiment=Part(name=name, arm=arm, seed=seed),
    )
    summary.write(run, made)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in KAPPA + LOSSES))


def workspace(folder: Path, gains: dict[str, float]) -> tuple[Path, dict]:
    """Runs of claim-fashion at 4 and 2 layers with 8 seeds; every arm has its gain in points over a seed's level."""
    rng, said = np.random.default_rng(0), {}
    levels = 0.8 + rng.normal(0, 0.02, 8)
    for name, depth in (("claim-fashion", 4), ("claim-fashion-2", 2), ("other", 4)):
        for seed in range(8):
            level = levels[seed] + depth / 100
            for arm in ARMS:
                score = level + gains.get(arm, 0) / 100 + rng.normal(0, 0.002)
                write(folder, name, depth, arm, seed, score)
                if name != "other":
                    said[arm, depth, seed] = score
    return folder, said


def test_differences_are_paired_by_seed_and_corrected(tmp_path, capsys, monkeypatch):
    runs, said = workspace(tmp_path / "runs", {"keep-4": 2.0, "sharp": 0.01, "even": 2.0})
    found = compare.collected(runs)["claim-fashion"]
    assert {key: run.score for key, run in found.items()} == said
    one = found["base", 4, 0]
    assert (one.parameters, one.kappa) == (1000, (10.0, 70.0)) and one.falling == pytest.approx(0.05)
    made = [compare.compared("claim-fashion", said, question) for question in compare.QUESTIONS]
    for one, (name, first, second) in zip(made, compare.QUESTIONS, strict=True):
        depths = [(2, 4)] if name in compare.DEPTHS else [(2, 2), (4, 4)]
        a, b = (
            [np.mean([said[arm, d[i], s] for d in depths]) for s in range(8)] for i, arm in enumerate((first, second))
        )
        test = stats.ttest_rel(a, b)
        low, high = test.confidence_interval(0.95)
        assert one.mean == pytest.approx(100 * (np.mean(a) - np.mean(b)))
        assert one.p == pytest.approx(test.pvalue)
        assert (one.mean - one.half, one.mean + one.half) == pytest.approx((100 * low, 100 * high))
        assert one.mixed[0] == pytest.approx(one.mean, abs=0.02) and 0 < one.mixed[1] < 2 * one.half
    p = [one.p for one in made]
    # What is not run yet is no evidence.
    whole = multipletests([*p, *[1.0] * (15 - len(p))], method="holm")[1]
    assert compare.holm(p, 15) == pytest.approx(whole[: len(p)])
    says = [one.holds(corrected) for one, corrected in zip(made, compare.holm(p, 15), strict=True)]
    assert says[0] == "yes" and set(says[1:4]) == {"no"}
    monkeypatch.setattr(sys, "argv", ["compare.py", str(runs)])
    assert compare.main() == 0
    out = capsys.readouterr().out
    # five pooled, four of them at each of two depths, even and params beside few
    assert out.count("| fashion | 8 |") == 5 + 4 * 2 + 2 and f"{made[0].mean:+.2f} points" in out
    assert out.count("| 10, 10 | 20, 20 | 5, 5 |") == 2 * len(ARMS)
    assert out.count("| 1,000 | 10, 70 | -5.00 (-5.00) % |") == 2 * len(ARMS)
    # Arms with QK norm, of an experiment of their own, have a name.
    for seed in range(8):
        write(runs, "claim-fashion-2-qk", 2, "base", seed, said["base", 2, seed] - 0.02)
    assert compare.main() == 0
    out = capsys.readouterr().out
    assert "| QK norm | fashion | 8 | -2.00 points | ± 0.00 |" in out and "| fashion | 2 | base-qk | 8 |" in out
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path)])
    assert compare.main() == 2


def test_a_loss_is_better_when_it_is_lower():
    scores = {("sharp", 4, s): 0.9 + s / 100 for s in range(4)} | {("base", 4, s): 1.0 + s / 90 for s in range(4)}
    found = compare.compared("claim-text", scores, compare.QUESTIONS[2])
    ratio = [100 * (1 - (0.9 + s / 100) / (1 + s / 90)) for s in range(4)]
    assert found.mean == pytest.approx(np.mean(ratio)) and found.mean > 9
    assert compare.compared("claim-text", scores, compare.QUESTIONS[0]) is None
    points = compare.compared("claim-retrieval", scores, compare.QUESTIONS[2])
    missed = [100 * (1 + s / 90 - 0.9 - s / 100) for s in range(4)]
    assert (points.unit, points.mean) == ("points", pytest.approx(np.mean(missed)))
    answers = {"yes": ["yes", "yes", "no"], "no": ["no", "undecided", "no"], "undecided": ["yes", "no"]}
    assert {word: compare.answer(given) for word, given in answers.items()} == {word: word for word in answers}


def test_a_halved_kappa_is_compared_within_arms():
    rng, runs = np.random.default_rng(1), {}
    for number, arm in enumerate(ARMS):
        for seed in range(8):
            kappa, noise = float(np.exp(rng.normal(3 + number, 0.5))), rng.normal(0, 0.001)
            runs[arm, 4, seed] = compare.Run(0.8 - number / 50 - 0.004 * np.log2(kappa) + noise, 1, (1.0, kappa), 0.0)
    x = np.array([[-np.log2(run.kappa[-1]), *(arm == a for a in ARMS)] for (arm, *_), run in runs.items()])
    least = OLS(np.array([100 * run.score for run in runs.values()]), x).fit()
    many, slope, half = compare.halved("claim-fashion", runs)
    assert (many, slope) == (48, pytest.approx(least.params[0])) and slope == pytest.approx(0.4, abs=0.1)
    assert (slope - half, slope + half) == pytest.approx(tuple(least.conf_int()[0]))
    assert compare.halved("claim-text", runs)[1] < 0  # a loss that is higher where kappa is lower is no gain
    assert (
        compare.halved("claim-fashion", {key: compare.Run(run.score, 1, (), 0.0) for key, run in runs.items()}) is None
    )


@pytest.mark.parametrize("name", ["claim-fashion", "claim-text", "claim-retrieval", "claim-fashion-2", "claim-text-6"])
def test_controls_have_the_parameters_and_the_flops_that_they_are_to_have(name):
    recipe = load(name)
    source = open_source(recipe.source, config_changes=recipe.source_config, weights=False)
    made = {arm: plan(source, wanted, 0).target for arm, wanted in list_wanted_shapes(recipe, source).items()}
    stage = {arm: result.shape.stages[0] for arm, result in made.items()}
    for times in (2, 4):
        keep, split = stage[f"keep-{times}"], stage[f"split-{times}"]
        assert keep.heads == split.heads == times * stage["base"].heads
        assert (keep.head_dim, split.inner) == (stage["base"].head_dim, stage["base"].inner)
    parameters = {arm: result.parameters.total for arm, result in made.items()}
    assert parameters["params-4"] == pytest.approx(parameters["keep-4"], rel=0.005)
    assert parameters["keep-4"] == parameters["wide-4"]
    assert (stage["wide-4"].heads, stage["wide-4"].inner) == (stage["base"].heads, stage["keep-4"].inner)
    if "flops-4" in made:
        assert flops_of(made["flops-4"]) == pytest.approx(flops_of(made["keep-4"]), rel=0.005)
        share = 1.1 if "text" in name else 1.05  # attention costs operations that no parameter has
        assert parameters["flops-4"] > share * parameters["keep-4"]
