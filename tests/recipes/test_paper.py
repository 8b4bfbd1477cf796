"""The recipes of the paper's rows: their arms are the paper's models to the integer, their settings those of its Table
6, and each trains for two steps on made-up data in the real format, with tiny models and the loaders as they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import timm
import torch
from PIL import Image

from leansurgeon import experiment
from leansurgeon.architectures.presets import PRESETS
from leansurgeon.checkpoints.model import initialise
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.experiment.arms import base_arm, list_wanted_shapes
from leansurgeon.experiment.jobs import make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import carry_out_job
from leansurgeon.tasks.text import vocab
from leansurgeon.training import regularize
from leansurgeon.training.loop import train as train_one
from leansurgeon.training.recipe import reading
from tests.paper.test_counts import AS_PRINTED, UPSTREAM
from tests.support.report.report_fixtures import experiment_table
from tests.tasks.test_glue import write_hub
from tests.tasks.test_image_folder import write as write_images
from tests.tasks.test_language import write_stories
from tests.tasks.test_lra import write_cifar, write_pairs, write_reviews

# Recipe -> table and model of the paper.
ROWS = {
    "crammed-bert": ("1", "Crammed BERT"),
    "tinystories-gpt": ("2", "GPT-2"),
    "listops-nystromformer": ("3", "ListOps"),
    "lra-text": ("3", "Text"),
    "lra-retrieval": ("3", "Retrieval"),
    "lra-image": ("3", "Image"),
    "lra-pathfinder": ("3", "Pathfinder"),
    "imagenet-vit-b": ("4", "ViT-B"),
    "imagenet-deit-b": ("4", "DeiT-B"),
    "imagenet-xcit-m": ("4", "XCiT-M"),
    "imagenet-tnt-b": ("4", "TNT-B"),
    "imagenet-volo-d3": ("4", "VOLO-d3"),
    "imagenet-davit-b": ("4", "DaViT-B"),
    "imagenet-vit-l": ("5", "ViT-L"),
    "imagenet-deit-l": ("5", "DeiT-L"),
    "imagenet-xcit-l": ("5", "XCiT-L"),
    "imagenet-volo-d4": ("5", "VOLO-d4"),
    "imagenet-davit-l": ("5", "DaViT-L"),
}
IMAGENET = [name for name in ROWS if name.startswith("imagenet-")]


# -- counts and settings ---------------------------------------------------------------------------

COUNT = """
import json, sys
from leansurgeon.checkpoints.source import open_source
from leansurgeon.experiment.arms import list_wanted_shapes
from leansurgeon.surgery.planning import plan
from leansurgeon.training.recipe.reading import load
found = {}
for name in sys.argv[1:]:
    recipe = load(name)
    source = open_source(recipe.source, weights=False)
    wanted = list_wanted_shapes(recipe, source)
    found[name] = {arm: plan(source, w).parameters_after.total for arm, w in wanted.items()}
    for arm, said in recipe.expected.items():
        assert said["parameters"] == found[name][arm], (name, arm)
assert "torch" not in sys.modules
print(json.dumps(found))
"""


def test_every_row_of_the_tables_has_a_recipe_and_its_arms_are_the_papers_models():
    assert sorted(ROWS.values()) == sorted(UPSTREAM)
    done = subprocess.run([sys.executable, "-c", COUNT, *ROWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, counts in json.loads(done.stdout).items():
        original, lean = UPSTREAM[ROWS[name]]
        assert counts["original"] == original
        # Where the paper's heads and its count contradict each other, `lean` has its heads and `as-counted` its count.
        assert counts["lean"] == (AS_PRINTED[(*ROWS[name], "lean")] if "as-counted" in counts else lean)
        assert counts.get("as-counted", lean) == lean
        assert counts["control"] == pytest.approx(counts["lean"], rel=2e-3)
        assert PRESETS[reading.load(name).source].recipe == name


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_recipes_are_table_six_and_prepare_pixels_as_timm_does(name):
    recipe = reading.load(name)
    train, options, large = recipe.train, recipe.task.options, ROWS[name][0] == "5"
    assert (train.batch, train.duration, train.schedule.warmup) == (512 if large else 1024, "300ep", "20ep")
    assert (train.optim.name, train.optim.lr, train.schedule.warmup_lr) == ("adamw", 3e-3, 1e-5)
    assert (train.optim.weight_decay, train.label_smoothing, train.drop_path) == (0.3, 0.1, 0.1)
    assert (train.mixup, train.cutmix, options["auto_augment"]) == (0.8, 1.0, "rand-m9-mstd0.5")
    assert train.ema is None and train.batch % (8 * train.micro_batch) == 0
    known = timm.get_pretrained_cfg(PRESETS[recipe.source].config["architecture"]).to_dict()
    assert [options[key] for key in ("crop_pct", "interpolation")] == [known["crop_pct"], known["interpolation"]]
    assert options["image_size"] == known["input_size"][-1]
    if name != "imagenet-deit-l":  # timm's own has other means than its paper
        for key in ("mean", "std"):
            assert options[key] == pytest.approx(list(known[key])), key


# -- two steps of each -----------------------------------------------------------------------------


def train(name, folder, monkeypatch, sets=(), arms=("lean",)):
    """These arms of a recipe's debug variant, trained in this process; summaries by arm."""
    monkeypatch.setenv("LEANSURGEON_CACHE", str(folder / "cache"))
    recipe = reading.load(name, list(sets), debug=True)
    source = open_source(recipe.source, config_changes=recipe.source_config or None, weights=False)
    wanted = list_wanted_shapes(recipe, source)
    prepare_data(recipe, lambda line: None)
    jobs = make_jobs(recipe, folder / "runs", wanted, base_arm(recipe), parallel=1)
    jobs = {arm: replace(jobs[arm, recipe.seeds[0]], prove=False, quiet=True, threads=1) for arm in arms}
    done = {arm: carry_out_job(job).as_dict() for arm, job in jobs.items()}
    for arm, summary in done.items():
        assert (summary["status"], summary["steps"]) == ("done", 2), arm
        assert np.isfinite(summary["final"]["metric"]) and summary["final"]["loss"] > 0
        # The run folder's recipe stands alone: it names no base, and reads back to what was trained.
        assert "base:" not in (jobs[arm].run / "recipe.yaml").read_text().splitlines()
        assert summary["recipe"]["train"]["optim"]["lr"] == reading.load(name).train.optim.lr
    return done


def jpegs(root) -> str:
    """ImageNet's own layout: train/WNID/*.JPEG and val/WNID/*.JPEG, of sizes that differ."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 8)):
        for i in range(count):
            path = root / split / f"n0{1440764 + i % 4}" / f"{split}_{i}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40 + i, 48, 3), dtype=np.uint8)).save(path, "JPEG")
    return str(root)


FORMATS = {"imagenet-xcit-m": "tar", "imagenet-davit-b": "parquet"}
QUICK = ("imagenet-vit-b", "imagenet-xcit-m", "imagenet-volo-d3", "imagenet-davit-b")  # others differ in sizes only


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in IMAGENET])
def test_imagenet_trains(name, tmp_path, monkeypatch):
    kind, data = FORMATS.get(name), tmp_path / "data"
    place = write_images(data, kind) if kind else jpegs(data)
    done = train(name, tmp_path, monkeypatch, [f"task.data={place}"])
    assert done["lean"]["final"]["metrics"]["top5"] >= done["lean"]["final"]["metrics"]["accuracy"]


def test_crammed_bert_trains_on_packed_rows_and_is_tuned_on_glue(tmp_path, monkeypatch):
    words = ["the cat sat on the mat and said that it was so"] * 20
    tokenizer = vocab.make("wordpiece", 200, words)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [np.random.default_rng(i).integers(5, len(tokenizer), 32).tolist() for i in range(200)]
    parquet.write_table(pa.table({"input_ids": rows}), tmp_path / "packed.parquet")
    sets = [f"task.data={tmp_path / 'packed.parquet'}", "task.text=input_ids", "task.eval_fraction=0.1"]
    sets += [f"task.tokenizer={tmp_path / 'tokenizer'}", "task.vocab_size=null"]
    done = train("crammed-bert", tmp_path, monkeypatch, sets, ("lean", "control"))
    lean, control = (done[arm]["model"]["shape"]["stages"][0] for arm in ("lean", "control"))
    assert lean["depth"] == control["depth"] and lean["heads"] > control["heads"]
    data = write_hub(tmp_path / "glue", "mrpc")
    sets = [f"task.data={data}", "task.task=mrpc", "task.seq_len=32", "train.duration=2st", "train.precision=fp32"]
    recipe = reading.load_training("crammed-bert-glue", [*sets, "measure.kappa.samples=2"])
    summary = train_one(recipe, tmp_path / "runs/crammed-bert/lean-s0/model", tmp_path / "tuned", say=lambda line: None)
    assert set(summary.final.metrics) == {"f1", "accuracy"} and summary.steps == 2
    config = json.loads((tmp_path / "tuned/model/config.json").read_text())
    assert config["hidden_dropout_prob"] == 0.1  # pretraining without dropout has not changed it


@pytest.mark.parametrize("preset", ["bert-crammed", "gpt2-tinystories", "lra/listops"])
def test_dropout_is_off_where_the_recipe_says_so(preset):
    tiny = {"num_hidden_layers": 2, "vocab_size": 32, "hidden_size": 64}
    source = open_source(preset, config_changes=tiny)
    model = initialise(source.config, source.architecture, 0).train()
    ids = torch.arange(24).reshape(2, 12)
    for rate in (None, 0.0, 0.5):
        if rate is not None:
            regularize.set_dropout(model, rate, preset)
        assert torch.equal(model(ids).logits, model(ids).logits) == (rate == 0.0)
    assert model.config.hidden_dropout_prob > 0  # what is saved still says what the model was made with
    with pytest.raises(UsageError, match=r"\bLinear\b.*train\.dropout\b"):
        regularize.set_dropout(torch.nn.Linear(2, 2), 0.1, "Linear")


def test_tinystories_train(tmp_path, monkeypatch):
    data = write_stories(tmp_path / "train-00000.parquet")
    done = train(
        "tinystories-gpt", tmp_path, monkeypatch, [f"task.data={data}", "task.documents=40", "task.seq_len=32"]
    )
    assert done["lean"]["final"]["metric"] == pytest.approx(np.exp(done["lean"]["final"]["loss"]), rel=1e-3)


LRA = {
    "listops-nystromformer": lambda root: "",
    "lra-text": write_reviews,
    "lra-retrieval": lambda root: write_pairs(root)[0],
    "lra-image": write_cifar,
    "lra-pathfinder": lambda root: "",
}


@pytest.mark.parametrize("name", LRA)
def test_the_long_range_arena_trains(name, tmp_path, monkeypatch):
    data = LRA[name](tmp_path / "data")
    done = train(name, tmp_path, monkeypatch, ["measure=null", *([f"task.data={data}"] if data else [])])
    assert done["lean"]["recipe"]["train"]["schedule"]["name"] == "one-cycle"


def test_d_retrieval_has_tasks_and_tables_of_its_own(tmp_path, monkeypatch):
    done = train("d-retrieval", tmp_path, monkeypatch, arms=("D2-h1", "D2-h2", "D2-control", "D4-h1", "D4-h4"))
    assert done["D2-control"]["recipe"]["task"]["dimension"] == 2 and done["D4-h4"]["recipe"]["task"]["dimension"] == 4
    table = experiment_table(list(done.values()), format="table")
    two, four = sorted(table.split("d-retrieval, dimension ")[1:])
    assert "D2-h2 vs D2-h1" in two and "D4" not in two and "D4-h4 vs D4-h1" in four and "D2" not in four


@pytest.mark.slow
def test_the_error_of_d_retrieval_falls_where_the_heads_reach_five(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    recipe = reading.load("d-retrieval-5", ["seeds=[1]"])
    recipe = recipe.model_copy(update={"arms": {name: recipe.arms[name] for name in ("D5-h1", "D5-h4", "D5-h5")}})
    done = experiment.run(recipe, tmp_path / "runs")
    errors = {one.experiment.arm: one.final.metric for one in done}
    assert errors["D5-h1"] > 2 * errors["D5-h4"] and errors["D5-h4"] > 4 * errors["D5-h5"]
