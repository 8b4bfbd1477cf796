"""`retrain MODEL --data PATH`: a stranger's model heals on his own data, without a recipe."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.commands.retrain import recipe_of
from leansurgeon.measure.data import own
from leansurgeon.report.collect import resume_line
from leansurgeon.training import data_loader
from leansurgeon.training.optimizer import Trainer
from leansurgeon.training.recipe.from_model import RecipeInputs
from tests.cli.answers import heal, heals, read, works
from tests.support.models import strangers
from tests.tasks.prepared import prepare


def recipe(run: Path) -> dict:
    return yaml.safe_load((run / "recipe.yaml").read_text())


def summary(run: Path) -> dict:
    return read(run / "summary.json")


def rows(run: Path, kind: str) -> list[dict]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["type"] == kind]


def weights(folder: Path) -> dict:
    return checkpoints.load(folder).model.state_dict()


def language(place: Path, family: str = "llama") -> tuple[Path, Path]:
    """A language model that is cut to half its layers, and texts."""
    lean = strangers.halved(place / "lean", strangers.model(place / "source", family))
    return lean, strangers.texts(place / "texts")


def prepared(run: Path, cache: Path, model: Path):
    """The task of a run."""
    return prepare(cache, model_dir=model, **recipe(run)["task"])


def test_a_decoder_learns_the_logits_of_the_model_it_was_cut_from(tmp_path):
    """The loss of the first step by hand, from transformers' own outputs of both models."""
    lean, data = language(tmp_path)
    heals(lean, data, tmp_path / "run", "--set train.log_every=1")
    made = recipe(tmp_path / "run")
    assert made["name"] == "lean-texts" and made["measure"] is None
    assert (made["task"]["name"], made["task"]["seq_len"]) == ("causal-lm", 64)  # the positions that it has
    assert made["task"].get("tokenizer", "model") == "model"
    taught = {"teacher": "source", "logits": 1.0, "hidden": 0.0, "relative": False, "temperature": 1.0}
    assert made["train"]["distill"] == taught
    task = prepared(tmp_path / "run", tmp_path / "cache", lean)
    size, batch = task.size("train"), made["train"]["batch"]
    given = task.batch("train", data_loader.epoch_order(0, 0, size)[:batch], seed=0, epoch=0)["input_ids"]
    with torch.no_grad():
        student, teacher = (
            torch.log_softmax(AutoModelForCausalLM.from_pretrained(p).eval()(given).logits[:, :-1].double(), -1)
            for p in (lean, tmp_path / "source")
        )
    answers = torch.nn.functional.nll_loss(student.flatten(0, 1), given[:, 1:].flatten())
    taught = (teacher.exp() * (teacher - student)).sum(-1).mean()
    assert rows(tmp_path / "run", "train")[0]["loss"] == pytest.approx((answers + taught).item(), rel=1e-4)
    # Every token of the tokenizer stays where it was.
    own, kept = (read(p / "tokenizer.json")["model"]["vocab"] for p in (lean, tmp_path / "run/model"))
    assert own == kept


def test_an_encoder_without_a_head_learns_embeddings(tmp_path):
    data = strangers.texts(tmp_path / "texts")
    lean = strangers.halved(tmp_path / "lean", strangers.encoder(tmp_path / "source"))
    longer = "--set train.duration=30st --set train.optim.lr=2e-3"
    done = heals(lean, data, tmp_path / "run", longer)
    assert recipe(tmp_path / "run")["task"]["name"] == "sentences"
    assert recipe(tmp_path / "run")["train"]["dropout"] == 0.0  # the model's config says 0.1
    assert "It healed" in done.stderr
    found = summary(tmp_path / "run")
    before, after = found["before"]["metric"], found["final"]["metric"]
    assert found["task"]["metric"] == "cosine" and before < 0.999 and after > before + 0.2 * (1 - before)
    # The metric by hand: sentences one by one through transformers, means over all their tokens.
    task = prepared(tmp_path / "run", tmp_path / "cache", lean)
    models = [AutoModel.from_pretrained(p).eval() for p in (lean, tmp_path / "source")]
    cosines = []
    for index in range(task.size("eval")):
        batch = task.batch("eval", [index], seed=0, epoch=0)
        ids = batch["input_ids"][:, batch["attention_mask"][0].bool()]
        with torch.no_grad():
            a, b = (made(ids).last_hidden_state.mean(1) for made in models)
        cosines.append(torch.nn.functional.cosine_similarity(a, b).item())
    assert before == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)


def test_prose_of_the_package_is_healed_on_where_the_tokenizer_reads_it(tmp_path, monkeypatch):
    data = str(strangers.texts(tmp_path / "texts"))
    lean = strangers.halved(tmp_path / "lean", strangers.encoder(tmp_path / "source"))

    def made(**asked) -> tuple[dict, list[str]]:
        told: list[str] = []
        return recipe_of(lean, RecipeInputs(data, **asked), told.append).model_dump(), told

    alone, _ = made()
    assert not alone["task"].get("prose")  # its words are w1, w2, ...
    monkeypatch.setattr(own, "prose", lambda _: True)
    both, told = made()
    assert both["task"]["prose"] and any("sentences that come with leansurgeon train" in line for line in told)
    assert both["train"]["distill"]["hidden"] == 3.0 and both["train"]["batch"] > alone["train"]["batch"]
    without, told = made(sets=("task.prose=false",))
    assert not without["task"].get("prose") and without["train"]["batch"] == alone["train"]["batch"]


def test_an_encoder_without_a_source_has_nothing_to_learn_from(tmp_path):
    done = heal(strangers.encoder(tmp_path / "own"), strangers.texts(tmp_path / "texts"), tmp_path / "run")
    assert done.returncode == 2 and "train.distill.teacher=" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["hf", "timm"])
def test_class_folders_are_read_as_the_models_processor_does(tmp_path, kind):
    names = ("ant", "bee")
    data = strangers.pictures(tmp_path / "images", names)
    if kind == "hf":
        # The model numbers its classes the other way round, as its own names say.
        source = strangers.model(
            tmp_path / "source", "vit", num_channels=3, image_size=8, id2label={0: "Bee", 1: "Ant"}, num_labels=2
        )
        strangers.processor(source, 8, 3)
    else:
        source = strangers.timm_vit(tmp_path / "source", 2)
    lean = strangers.halved(tmp_path / "lean", source)
    heals(lean, data, tmp_path / "run")
    task = recipe(tmp_path / "run")["task"]
    assert task["name"] == "folder" and task["image_size"] == {"hf": 8, "timm": 16}[kind]
    assert recipe(tmp_path / "run")["train"]["distill"]["logits"] == 1.0
    if kind == "hf":
        assert task["mean"] == pytest.approx([0.3] * 3) and task["class_names"] == ["bee", "ant"]
        made = prepared(tmp_path / "run", tmp_path / "cache", lean)
        batch = made.batch("eval", range(made.size("eval")), seed=0, epoch=0)
        bright = batch["pixel_values"].mean((1, 2, 3)) > 0.5
        assert batch["labels"].tolist() == [0 if is_bee else 1 for is_bee in bright.tolist()]
    else:
        assert task["mean"] == pytest.approx([0.5] * 3)  # timm's own for this model, and not ImageNet's


def test_images_without_classes_teach_a_backbone(tmp_path):
    data = strangers.pictures(tmp_path / "images", ("only",), each=40) / "only"
    source = strangers.model(tmp_path / "source", "clip_vision_model", num_channels=3)
    lean = strangers.halved(tmp_path / "lean", strangers.processor(source, 8, 3))
    heals(lean, data, tmp_path / "run")
    assert recipe(tmp_path / "run")["task"]["name"] == "images"
    assert summary(tmp_path / "run")["task"]["metric"] == "cosine"


def test_columns_of_a_table_are_found(tmp_path):
    """Neither is called text or label: one holds words, the other few values again and again."""
    table = strangers.reviews(tmp_path / "reviews.csv", names=("BAD", "good"))
    lean = strangers.halved(tmp_path / "lean", strangers.classifier(tmp_path / "source", ("good", "bad")))
    heals(lean, table, tmp_path / "run")
    task = recipe(tmp_path / "run")["task"]
    assert (task["text"], task["label"], task["class_names"]) == ("review", "stars", ["good", "BAD"])
    assert recipe(tmp_path / "run")["train"]["distill"]["teacher"] == "source"
    config = read(tmp_path / "run" / "model" / "config.json")
    assert config["id2label"] == {"0": "good", "1": "bad"}


def test_other_classes_get_a_new_head_and_no_teacher(tmp_path):
    table = strangers.reviews(tmp_path / "reviews.csv", names=("one", "two", "three"))
    lean = strangers.halved(tmp_path / "lean", strangers.classifier(tmp_path / "source", ("good", "bad")))
    heals(lean, table, tmp_path / "run", "--columns text=review,label=stars")
    assert "distill" not in recipe(tmp_path / "run")["train"]
    assert AutoConfig.from_pretrained(tmp_path / "run" / "model").num_labels == 3
    wrong = heal(lean, table, tmp_path / "other", "--columns text=words")
    assert wrong.returncode == 2 and "review" in wrong.stderr and not (tmp_path / "other").exists()


def test_a_source_that_is_gone_is_said(tmp_path, own_cache):
    lean, data = language(tmp_path)
    shutil.rmtree(tmp_path / "source")
    done = heals(lean, data, tmp_path / "run")
    assert "data alone" in done.stderr
    assert "distill" not in recipe(tmp_path / "run")["train"]


def test_the_recipe_that_is_kept_trains_the_same(tmp_path):
    lean, data = language(tmp_path, "gpt2")
    assert heal(lean, data, tmp_path / "run").returncode == 0
    works(f"retrain {lean} -r {tmp_path}/run/recipe.yaml -o {tmp_path}/again")
    losses = [[row["loss"] for row in rows(tmp_path / name, "train")] for name in ("run", "again")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("family", "data"), [("llama", "images"), ("vit", "texts"), ("llama", "nowhere/at/all"), ("t5", "texts")]
)
def test_what_does_not_go_together_is_refused(tmp_path, family, data):
    strangers.texts(tmp_path / "texts")
    strangers.pictures(tmp_path / "images")
    done = heal(strangers.model(tmp_path / "own", family), tmp_path / data, tmp_path / "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("sets", "kept"), [("", True), ("--set train.checkpoint.keep_start=false", False)])
def test_a_healing_that_hurts_keeps_the_model_as_it_was(tmp_path, sets, kept):
    """A rate at which everything gets worse: model/ is the start, weight for weight, and last/ is not."""
    lean, data = language(tmp_path)
    done = heals(lean, data, tmp_path / "run", f"--set train.optim.lr=5 {sets}")
    assert "did not help" in done.stderr and "It healed" not in done.stderr
    before, after, last = map(weights, (lean, tmp_path / "run" / "model", tmp_path / "run" / "last"))
    assert all(torch.equal(before[name], after[name]) for name in before) == kept
    assert not all(torch.equal(before[name], last[name]) for name in before)
    assert (summary(tmp_path / "run")["best"]["step"] == 0) == kept


def test_a_perplexity_beyond_all_numbers_is_a_divergence(tmp_path):
    lean, data = language(tmp_path)
    done = heal(lean, data, tmp_path / "run", "--set train.optim.lr=50")
    assert done.returncode == 5 and "Traceback" not in done.stderr
    assert not (tmp_path / "run/summary.json").exists()


def test_a_recipe_takes_a_time_whatever_its_warm_up(tmp_path):
    lean = strangers.model(tmp_path / "own", "vit")
    said = []
    wish = ("train.schedule.warmup=3st", "train.duration=9st")
    made = recipe_of(lean, RecipeInputs(recipe="digits-vit", time="5m", sets=wish), said.append)
    assert (made.train.duration, made.train.schedule.warmup) == ("5m", 0.1) and "3st" in said[0]
    assert recipe_of(lean, RecipeInputs(recipe="digits-vit", sets=wish), said.append).train.schedule.warmup == "3st"


def test_a_single_class_is_refused_before_a_head_is_spoken_of(tmp_path):
    data = strangers.pictures(tmp_path / "images", ("ant",))
    model = strangers.processor(strangers.model(tmp_path / "own", "vit", num_channels=3, image_size=8), 8, 3)
    done = heal(model, data, tmp_path / "run")
    assert done.returncode == 2 and "ant" in done.stderr and "new head" not in done.stderr


def test_a_dry_run_says_that_a_tokenizer_is_refused_and_nothing_of_data(tmp_path):
    data = strangers.texts(tmp_path / "texts")
    own = strangers.model(tmp_path / "own", "llama")
    done = heal(own, data, tmp_path / "run", "--set task.tokenizer=char --dry-run")
    assert done.returncode == 2 and "--new-tokenizer" in done.stderr and "not there" not in done.stderr


def test_a_healing_that_is_resumed_says_whether_it_helped(tmp_path, monkeypatch):
    """By the line that `report` prints, which names the run's own recipe and no data."""
    lean, data = language(tmp_path)
    real = Trainer.step

    def interrupted(self, at, batches):
        if at == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, at, batches)

    with monkeypatch.context() as changed:
        changed.setattr(Trainer, "step", interrupted)
        stopped = heal(lean, data, tmp_path / "run", "--set train.duration=6st")
    assert stopped.returncode == 130, stopped.stderr
    line = resume_line(tmp_path / "run")
    assert "--data" not in line and line.startswith("leansurgeon retrain ")
    done = works(line.removeprefix("leansurgeon "))
    assert summary(tmp_path / "run")["resumed_after"] == [3]
    assert any(word in done.stderr for word in ("It healed", "did not help", "Not shown to help"))
