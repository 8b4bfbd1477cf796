"""Recipes: what YAML makes of them, and that every mistake is one sentence with file, line and key."""

import re

import pytest
import yaml

from leansurgeon.errors import UsageError
from leansurgeon.training.recipe import reading
from leansurgeon.training.recipe.schema import ExperimentRecipe, TrainingRecipe

TRAINING = """\
version: 1
name: tiny
task: {name: digits}
train:
  duration: 2ep
  batch: 64
  precision: fp32
  optim:
    lr: 1e-3
    weight_decay: 0.05
  schedule: {name: cosine, warmup: 0.1}
  eval:
    every: 1ep
    at_start: off
"""
EXPERIMENT = """\
name: tiny
kind: experiment
source: digits-vit
task: {name: digits}
train: {duration: 2ep, batch: 64, optim: {lr: 2e-3}}
retrain: {optim: {lr: 1e-3}}
arms:
  original:
  lean: {heads: 2x, layers: 3, head_dim: keep}
  control: {control_of: lean}
debug:
  train: {duration: 2st}
"""


def _file(tmp_path, text):
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    return str(path)


def _error(tmp_path, text, sets=()):
    with pytest.raises(UsageError) as error:
        reading.load(_file(tmp_path, text), list(sets))
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value) and "pydantic" not in str(error.value)
    return str(error.value)


def test_numbers_and_words(tmp_path):
    recipe = reading.load(_file(tmp_path, TRAINING))
    assert isinstance(recipe, TrainingRecipe)
    assert recipe.train.optim.lr == 1e-3 and isinstance(recipe.train.optim.lr, float)
    assert isinstance(yaml.safe_load("lr: 1e-3")["lr"], str)  # the trap that this avoids
    assert recipe.train.eval.at_start is False
    assert recipe.train.micro_batch is None and recipe.measure.kappa.samples == 64


def test_set_changes_one_key(tmp_path):
    sets = ["train.optim.lr=3e-4", "train.schedule.warmup=500st", "train.optim.betas=[0.9, 0.98]", "measure.kappa=null"]
    recipe = reading.load(_file(tmp_path, TRAINING), sets)
    assert (recipe.train.optim.lr, recipe.train.schedule.warmup) == (3e-4, "500st")
    assert recipe.train.optim.betas == (0.9, 0.98) and recipe.train.optim.weight_decay == 0.05
    assert recipe.measure.kappa is None


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("    weight_decay", "    weight_dacay", 10, r"`train\.optim\.weight_dacay`.*'weight_decay'"),
        ("batch: 64", "batch: 0", 6, r"`train\.batch`: .*\b1\b.*\b0\b"),
        ("batch: 64", "batch: many", 6, r"`train\.batch`: .*'many'"),
        ("2ep", "2 fortnights", 5, r"`train\.duration`: .*\b30ep\b.*\b5000st\b"),
        ("  duration: 2ep\n", "", 4, r"`train\.duration`.*\bmissing\b"),
        ("warmup: 0.1", "warmup: 1.5", 11, r"\bwarmup\b.*\b1\b.*\b0\.1\b"),
        ("version: 1", "version: 7", 1, r"`version`: .*\b1\b.*\b7\b"),
        ("version: 1", "kind: trianing", 1, r"\bkind\b.*`training`.*`experiment`.*'trianing'"),
        ("name: digits}", "name: digit}", 3, r"\btask 'digit'.*'digits'"),
        ("name: digits}", "name: digits, split_sed: 1}", 3, r"'split_sed'.*'split_seed'"),
        ("  batch: 64", "  batch: 64\n  batch: 32", 7, r"`train\.batch`.*\bline 6\b"),
        ("name: tiny", "name: [tiny", 3, r"\bYAML\b"),
    ],
)
def test_a_mistake_is_one_sentence_with_file_line_and_key(tmp_path, old, new, line, words):
    assert TRAINING.count(old)
    error = _error(tmp_path, TRAINING.replace(old, new, 1))
    assert f"tiny.yaml, line {line}: " in error
    assert re.search(words, error)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("heads: 2x", "haeds: 2x", 9, r"`arms\.lean\.haeds`.*'heads'"),
        ("control_of: lean", "control_of: laen", 7, r"'lean-twin'|'laen'"),
        ("control_of: lean", "control_of: lean, heads: 4", 7, r"\bcontrol\b.*'lean'"),
        ("retrain: {optim: {lr: 1e-3", "retrain: {optim: {lr: -1", 6, r"`retrain\.optim\.lr`"),
        ("source: digits-vit", "sauce: digits-vit", 3, r"`sauce`.*'source'"),
    ],
)
def test_mistakes_in_experiments(tmp_path, old, new, line, words):
    error = _error(tmp_path, EXPERIMENT.replace(old, new, 1))
    assert f"tiny.yaml, line {line}: " in error
    assert re.search(words, error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.optim.lrr=1", r"--set train\.optim\.lrr=1: .*`train\.optim\.lrr`.*'lr'"),
        ("train.seed=-1", r"--set train\.seed=-1: `train\.seed`"),
        ("train.optim.lr=fast", r"--set train\.optim\.lr=fast: `train\.optim\.lr`: .*\bnumber\b"),
        ("optim.lr=1e-3", r"--set optim\.lr=1e-3: .*'train\.optim\.lr'"),
        ("train.batch", r"--set train\.batch: .*\bkey\.key=value\b"),
    ],
)
def test_mistakes_in_set(tmp_path, text, words):
    assert re.search(words, _error(tmp_path, TRAINING, [text]))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"'digits-vti'.*'digits-vit'"):
        reading.load("digits-vti")
    with pytest.raises(UsageError, match=r"nowhere\.yaml\b.*`leansurgeon recipes list`"):
        reading.load("nowhere.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        reading.load(str(tmp_path) + "/")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        reading.load(str(tmp_path / "binary.yaml"))
    assert "mapping of keys" in _error(tmp_path, "just words")
    assert "mapping of keys" in _error(tmp_path, "")


def test_experiment_merges_retrain_and_debug(tmp_path):
    path = _file(tmp_path, EXPERIMENT)
    recipe = reading.load(path)
    assert isinstance(recipe, ExperimentRecipe)
    assert recipe.training(transferred=False).train.optim.lr == 2e-3
    assert recipe.training(transferred=True).train.optim.lr == 1e-3
    assert reading.load(path, debug=True).train.duration == "2st"
    assert reading.load(path, ["train.duration=5st"], debug=True).train.duration == "5st"
    # `retrain` takes the training for transferred weights; what the user sets comes last.
    assert reading.load_training(path).train.optim.lr == 1e-3
    assert reading.load_training(path, transferred=False).train.optim.lr == 2e-3
    assert reading.load_training(path, ["train.optim.lr=7e-4"]).train.optim.lr == 7e-4
    assert recipe.arms["original"].changes_shape is False and recipe.arms["lean"].heads == "2x"
    with pytest.raises(UsageError, match="no `debug` block"):
        reading.load(_file(tmp_path, TRAINING), debug=True)


@pytest.mark.parametrize("name", reading.list_shipped())
def test_every_shipped_recipe_is_sound(name, tmp_path):
    recipe = reading.load(name)
    assert recipe.name == name
    if isinstance(recipe, ExperimentRecipe):
        assert any(arm.control_of for arm in recipe.arms.values())
        small = reading.load(name, debug=True)
        assert small.train.duration == "2st" and len(small.seeds) == 1
    comment = reading.list_shipped()[name].read_text()
    assert all(word in comment for word in ("# Data", "# Model", "# Numbers", "# Expect", "# Hardware"))
    again = tmp_path / "again.yaml"
    again.write_text(reading.dump(recipe))
    assert reading.load(str(again)) == recipe


def test_a_recipe_is_laid_upon_its_base(tmp_path):
    _file(tmp_path, EXPERIMENT)
    (tmp_path / "middle.yaml").write_text("base: tiny.yaml\nname: middle\ntrain: {batch: 32, optim: {eps: 1e-6}}\n")
    top = tmp_path / "top.yaml"
    top.write_text(
        "base: middle.yaml\nname: top\narms: {wide: {heads: 8, layers: 6}}\ndebug: {seeds: [7], train: {batch: 4}}\n"
    )
    recipe = reading.load(str(top))
    assert (recipe.name, recipe.source, recipe.train.batch, recipe.train.duration) == ("top", "digits-vit", 32, "2ep")
    assert (recipe.train.optim.lr, recipe.train.optim.eps) == (2e-3, 1e-6)
    assert list(recipe.arms) == ["original", "lean", "control", "wide"] and recipe.arms["lean"].layers == 3
    small = reading.load(str(top), ["train.batch=2"], debug=True)
    assert (small.train.duration, small.train.batch, small.seeds) == ("2st", 2, [7])
    # What a run folder gets stands alone.
    again = tmp_path / "elsewhere" / "recipe.yaml"
    again.parent.mkdir()
    again.write_text(reading.dump(recipe))
    assert "base" not in yaml.safe_load(again.read_text()) and reading.load(str(again)) == recipe


MISTAKES_WITH_A_BASE = {
    "unknown": (
        {"top": "base: imagenet-comon\nname: x"}, r"top\.yaml, line 1: `base`: .*'imagenet-comon'.*'imagenet-common'",
    ),
    "no-name": ({"top": "name: x\nbase: [a]"}, r"top\.yaml, line 2: `base`: .*\['a'\]"),
    "circle": (
        {"top": "base: other.yaml", "other": "base: top.yaml"}, r"other\.yaml, line 1: `base`: 'top\.yaml'.*\bbased\b",
    ),
    "itself": ({"top": "base: top.yaml"}, r"`base`: 'top\.yaml'.*\bitself\b"),
    # A mistake is said where it stands.
    "below": (
        {"top": "base: other.yaml\nname: x", "other": TRAINING.replace("lr:", "rl:")}, r"other\.yaml, line 9: .*\brl\b",
    ),
    "above": (
        {"top": "base: other.yaml\ntrain: {batch: 0}", "other": TRAINING},
        r"top\.yaml, line 2: `train\.batch`: .*\b1\b.*\b0\b",
    ),
    "shipped": ({"top": "base: digits-vit\narms: {lean: {heeds: 2}}"}, r"top\.yaml, line 2: .*`arms\.lean\.heeds`"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES_WITH_A_BASE)
def test_mistakes_with_a_base(tmp_path, case):
    files, words = MISTAKES_WITH_A_BASE[case]
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        reading.load(str(tmp_path / "top.yaml"))
    assert re.search(words, str(error.value)) and "\n" not in str(error.value)


def test_an_arm_may_have_a_task_of_its_own(tmp_path):
    text = EXPERIMENT.replace("layers: 3,", "layers: 3, init: fresh, task: {split_seed: 5},")
    recipe = reading.load(_file(tmp_path, text))
    assert [recipe.task_of(arm).options for arm in recipe.arms] == [{}, {"split_seed": 5}, {"split_seed": 5}]
    assert recipe.training(transferred=False, arm="control").task.options == {"split_seed": 5}
    assert re.search(r"\barm '\w+' .*\btask\b.*\boriginal\b", _error(tmp_path, text.replace("init: fresh, ", "")), re.S)
    assert "no option 'split_sed'" in _error(tmp_path, text.replace("split_seed", "split_sed"))
    matching = EXPERIMENT.replace("heads: 2x, layers: 3", "heads: 2x, match: flops")
    assert "matches flops of no arm" in _error(tmp_path, matching)  # only a control does
