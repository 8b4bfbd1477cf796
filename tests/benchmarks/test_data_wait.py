"""The share of a training that is spent waiting for data, on the shipped recipes whose data is made here or lies here.

Every recipe's own original, batch and precision (fp32 where the recipe wants a GPU's), 20 steps of it; of d-retrieval,
whose steps take 3 ms, all 1,000, since of 20 the first one, which reads the files, would weigh as much as the rest. The
share is the one that `summary.json` tells. Generated data sets are made smaller, which changes no batch. Run with

    OMP_NUM_THREADS=1 pytest -o addopts= -m benchmark -s tests/benchmarks/test_data_wait.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.experiment.arms import base_arm, list_wanted_shapes
from leansurgeon.experiment.jobs import make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import carry_out_job
from leansurgeon.training.recipe.reading import load

CLAIM = 0.03
SHORT = ["train.duration=20st", "train.eval.every=20st", "train.eval.at_start=false", "train.log_every=5"]
SHORT += ["measure=null", "train.precision=fp32", "train.schedule.warmup=0.1", "train.eval.test=false"]
RECIPES = {
    "digits-vit": [],
    "fashion-vit": [],
    "austen-gpt": [],
    "crammed-bert-small": [],
    "d-retrieval": ["train.duration=1000st", "train.eval.every=1000st"],
    "listops-nystromformer": ["train.duration=6st", "task.train=400", "task.eval=32", "task.test=0"],
}


@pytest.mark.benchmark
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_hardly_waits_for_data(name, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    recipe = load(name, [*SHORT, *RECIPES[name]])
    try:
        prepare_data(recipe, lambda line: None)
    except UsageError as error:
        pytest.skip(str(error))
    source = open_source(recipe.source, config_changes=recipe.source_config or None, weights=False)
    first = base_arm(recipe)
    jobs = make_jobs(recipe, tmp_path / "runs", list_wanted_shapes(recipe, source), first, parallel=1)
    job = replace(jobs[first, recipe.seeds[0]], prove=False, quiet=True, threads=1)
    summary = carry_out_job(job).as_dict()
    share = summary["data_wait"]
    print(f"\n{name}: {100 * share:.2f} % of {summary['step_ms']:.0f} ms a step is spent waiting for data")
    assert share < CLAIM
