"""What one command fits or chooses by, no other reports on: the samples that were really read, through the commands."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import f1_score

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.heads import document as ranking
from leansurgeon.reading import modelcard
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.search.heals import HealTrial
from leansurgeon.tasks.images.folder import ImageFolder
from leansurgeon.tasks.text.classification import TextClassification
from leansurgeon.tasks.text.language import CausalLM
from leansurgeon.training.recipe import reading
from tests.cli.answers import document, heals, read, stderr_of, stdout_of, works
from tests.support.content import side_of
from tests.support.models import strangers
from tests.support.models.word_models import WORDS
from tests.tasks.prepared import everything, prepare

PIECE = 6  # tokens that are content of their own: windows of two commands begin in different places


def pieces(batch) -> set[bytes]:
    """What stands for the samples of a batch: their tokens in pieces, or pictures."""
    rows = batch.get("input_ids", batch.get("pixel_values")).numpy()
    if rows.ndim > 2:
        return {row.tobytes() for row in rows}
    return {row[i : i + PIECE].tobytes() for row in rows for i in range(max(1, len(row) - PIECE + 1))}


@pytest.fixture
def samples(monkeypatch, tmp_path):
    """What the commands have read, by split: pieces of token ids, or pictures."""
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    seen: dict[str, set[bytes]] = {}
    for cls in (TextClassification, CausalLM, ImageFolder):

        def batch(self, split, indices, *, seed, epoch, known=cls.batch):
            made = known(self, split, indices, seed=seed, epoch=epoch)
            seen.setdefault(split, set()).update(pieces(made))
            return made

        monkeypatch.setattr(cls, "batch", batch)
    return seen


@pytest.fixture
def said(tmp_path):
    """A model and data for it, by kind."""

    def made(kind):
        if kind == "text":
            return strangers.model(tmp_path / "source", "llama"), strangers.texts(tmp_path / "texts", 300)
        if kind == "table":
            source = strangers.classifier(tmp_path / "source", ("good", "bad"))
            return source, strangers.reviews(tmp_path / "reviews.csv", 200, ("good", "bad"))
        source = strangers.model(
            tmp_path / "source", "vit", num_channels=3, image_size=8, num_labels=2, id2label={0: "ant", 1: "bee"}
        )
        return strangers.processor(source, 8, 3), strangers.pictures(tmp_path / "images", each=60)

    return made


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_no_command_reports_on_what_another_fitted_on(kind, said, samples, tmp_path):
    source, data = said(kind)
    lean, run = tmp_path / "lean", tmp_path / "run"
    for command in (
        f"shrink {source} --layers 2 --calibrate {data} --heal none -o {lean}",
        f"retrain {lean} --data {data} -o {run} --set train.duration=3st",
        f"judge {run} --data {data}",
        f"judge {lean} --data {data}",
    ):
        done = works(command)
        assert samples["test"] and not samples["test"] & (samples["train"] | samples["eval"]), command[0]
        assert "Held out: " in done.stderr
    # And the records say by what: the same rule and the same samples for the cut and for the training.
    made = record.read(run / "model")
    assert made.fitted[0] in made.all_fitted[1:]
    assert {one.data for one in made.judged.values()} == {"held-out data"}
    summary = read(run / "summary.json")
    assert summary["test"]["before"]["metric"] is not None and summary["task"]["data"]["split"] == made.fitted[0]


def test_what_search_and_heads_choose_by_no_other_reports_on(said, samples, tmp_path, monkeypatch):
    """The samples by which candidates are ranked and heads are pruned, and those on which `judge` reports."""
    source, data = said("table")
    chose: set[bytes] = set()
    scored, ranked = HealTrial.score, ranking.importance

    def score(self, loaded, part, batches):
        if part == "choosing":
            chose.update(*map(pieces, batches))
        return scored(self, loaded, part, batches)

    def importance(judge, places, batches, **how):
        chose.update(*map(pieces, batches))
        return ranked(judge, places, batches, **how)

    monkeypatch.setattr(HealTrial, "score", score)
    monkeypatch.setattr(ranking, "importance", importance)
    most = int(0.75 * open_source(str(source)).parameters.total)
    quick = "--samples 32 --judge-samples 16 --no-curve"
    for number, command in enumerate((
        f"search {source} --params {most} --tries 2 --samples 16 --workspace {tmp_path}/runs",
        f"heads {source} {quick} --prune 50%",
    )):  # fmt: skip
        chose.clear()
        made = tmp_path / f"made{number}"
        done = works(f"{command} --data {data} -o {made}")
        assert chose, done.stderr
        samples.clear()
        done = works(f"judge {made} --data {data}")
        assert samples["test"] and not samples["test"] & chose
        assert "held-out" in stdout_of(done)


def test_other_data_that_was_trained_on_is_not_called_held_out(said, tmp_path, samples):
    """A model that was trained on the first nine tenths of a file, whatever stands in them."""
    source, data = said("text")
    lean, run = strangers.halved(tmp_path / "lean", source), tmp_path / "run"
    done = heals(lean, data, run, "--set task.eval_fraction=0.1")
    done = works(f"judge {run} --data {data}")
    assert "held-out" not in done.stdout.replace("\n", " "), done.stderr
    assert "may have been trained on" in stdout_of(done)
    assert "may have been trained on" in " ".join((run / "model" / "README.md").read_text().split())
    # Nor is it by a cut of that model, in its own record.
    again = tmp_path / "again"
    done = works(f"shrink {run} --layers 1 --calibrate {data} --heal none -o {again}")
    assert record.read(run / "model").fitted[0] in record.read(again).fitted
    assert record.read(again).proof.compared.data == "data that it may have been trained on"
    assert "texts + own, held out" not in (again / "README.md").read_text()
    done = works(f"judge {again} --data {data} --against {source}")
    assert "may have been trained on" in stdout_of(done), done.stderr


def test_reviews_that_come_three_times_with_coins_for_labels_are_not_healed(said, tmp_path, samples):
    source, _ = said("table")
    rng = random.Random(0)
    texts = [f"{WORDS[i % 10]} {' '.join(rng.choices(WORDS, k=7))}" for i in range(80)]
    rows = [f"{text},{rng.choice(('good', 'bad'))}" for text in texts * 3]
    (tmp_path / "coins.csv").write_text("\n".join(["review,stars", *rows]) + "\n")
    lean = strangers.halved(tmp_path / "lean", source)
    # Nothing but coins decides here, so the order of the classes is said.
    longer = "--set train.duration=20ep --set train.optim.lr=3e-3 --set train.eval.every=10ep"
    done = heals(lean, tmp_path / "coins.csv", tmp_path / "run", f"--classes good,bad {longer}")
    assert "It healed" not in done.stderr and "160 rows that repeat others" in done.stderr
    assert not samples["test"] & (samples["train"] | samples["eval"])


def test_a_rare_class_is_held_out_too(tmp_path):
    positives = 10
    texts = [f"case {i} {' '.join(np.random.default_rng(i).choice(WORDS, 4))}" for i in range(1_000)]
    rows = [f"{text},{int(i < positives)}" for i, text in enumerate(texts)]
    found = []
    for name, lines in (("a", rows), ("b", rows[::-1])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
        table = str(tmp_path / f"{name}.csv")
        task = prepare(tmp_path / "cache", "text-classification", train=table, tokenizer="byte")
        found.append(task.identity)
        for split in ("eval", "test"):
            labels = everything(task, split)["labels"]
            by_content = sum(side_of(text) == split for text in texts[:positives])
            assert int(labels.sum()) == max(1, by_content), split
    assert found[0] == found[1]  # whatever the order of the rows


def test_rows_of_one_table_were_judged_on_the_same_samples(said, tmp_path, samples):
    """However many samples chose on the way; another length of the texts is another table."""
    source, data = said("table")
    lean = strangers.halved(tmp_path / "lean", source)
    runs = tmp_path / "runs"
    changes = {"few": "train.eval.samples=4", "more": "train.eval.samples=9", "short": "task.seq_len=6"}
    for name, change in changes.items():
        heals(lean, data, runs / name, f"--set {change}")
    shown = document("report few more short", cwd=runs)
    tables = [sorted(row["name"] for row in section["rows"]) for section in shown["sections"]]
    assert sorted(tables) == [["few", "more"], ["short"]]
    for name in ("few", "more"):
        test = read(runs / name / "summary.json")["test"]
        row = next(row for section in shown["sections"] for row in section["rows"] if row["name"] == name)
        figures = (row["metric"]["mean"], row["before"]["mean"])
        assert figures == pytest.approx((test["best"]["metric"], test["before"]["metric"]))
        card = " ".join((runs / name / "model" / "README.md").read_text().split())
        assert f"of {test['samples']} held-out samples" in card


def held_out_answers(run, model=None):
    """(N,) classes of a run's held-out samples, and what its model, or another, takes them for by transformers."""
    chosen = reading.load_training(str(run / "recipe.yaml")).task
    batch = everything(prepare(cache_folder(), chosen.name, run / "model", **chosen.options), "test")
    real = batch.pop("labels").numpy()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model or run / "model").eval()
    with torch.no_grad():
        return real, model(**batch).logits.argmax(-1).numpy()


def test_source_cut_and_healed_model_are_three_rows_of_one_table(said, tmp_path, samples):
    """Each with what transformers finds of it on the same held-out samples; at first the cut that was judged.

    Macro F1 stands beside accuracy, since one class is large.
    """
    source, data = said("table")
    lines = data.read_text().splitlines()
    good = [line for line in lines if line.startswith("good")]
    data.write_text("\n".join([lines[0], *good, *[line for line in lines if line.startswith("bad")][:20]]) + "\n")
    lean, run = strangers.halved(tmp_path / "lean", source), tmp_path / "healed"
    works(f"judge {lean} --data {data}")
    (section,) = document(f"report {source} {lean}")["sections"]
    assert [row["name"] for row in section["rows"]] == ["source", "lean"]
    judged = [row["metric"]["mean"] for row in section["rows"]]
    told = stdout_of(works(f"report {source} {lean}"))
    assert "held-out samples" in told and "is no result" not in told and "last step" not in told
    done = heals(lean, data, run)
    (section,) = document(f"report {source} {lean} {run}")["sections"]
    assert [row["name"] for row in section["rows"]] == ["source", "lean", "healed"]
    for row, folder in zip(section["rows"], (source, lean, run / "model"), strict=True):
        real, answers = held_out_answers(run, folder)
        assert row["metric"]["mean"] == pytest.approx(np.mean(real == answers)), row["name"]
    assert judged == pytest.approx([row["metric"]["mean"] for row in section["rows"][:2]])
    assert section["rows"][0]["parameters"] > section["rows"][1]["parameters"] == section["rows"][2]["parameters"]
    # The card has the healed model's figure, and no other.
    index = modelcard.front_matter(run / "model")["model-index"]
    figures = [one["value"] for result in index[0]["results"] for one in result["metrics"] if one["type"] == "accuracy"]
    assert figures == [pytest.approx(np.mean(real == answers), abs=1e-6)]
    share, macro = max(np.mean(real == each) for each in (0, 1)), f1_score(real, answers, average="macro")
    assert share > 0.7 and section["rows"][2]["macro_f1"]["mean"] == pytest.approx(macro)
    told = stdout_of(works(f"report {run}"))
    assert f"The largest class has {100 * share:.1f} % of the samples" in told and f"{100 * macro:.1f} %" in told
    assert f"and {100 * macro:.2f} %; the largest class has {100 * share:.1f} %)" in stderr_of(done)
    # What is empty says how it is filled, in words that can be typed.
    works(f"kappa {run} --probes 0")
    for name in ("source", "lean"):
        told = stdout_of(works(f"report {source} {lean} {run} --wide"))
        command = re.search(f"kappa of {name}: `leansurgeon ([^`]+)`", told)[1]
        works(f"{command} --probes 0")
    (section,) = document(f"report {source} {lean} {run}")["sections"]
    assert all(row["kappa"] for row in section["rows"]) and not (source / "kappa.json").exists()
    # Nobody judged another model there: it stands apart, and why is said.
    other = strangers.classifier(tmp_path / "other", ("good", "bad", "fair"))
    first, second = document(f"report {source} {lean} {run} {other}")["sections"]
    assert [row["name"] for row in second["rows"]] == ["other"] and len(first["rows"]) == 3
    assert "no run here began with it" in " ".join(second["notes"])


def test_an_embedder_stands_in_the_table_of_its_cut_and_healed_model(own_cache, tmp_path):
    """Beside itself its cosine is 1; the others have what transformers finds on the same held-out sentences."""
    source, data = strangers.encoder(tmp_path / "source"), strangers.texts(tmp_path / "texts")
    lean, run = strangers.halved(tmp_path / "lean", source), tmp_path / "healed"
    heals(lean, data, run)
    (section,) = document(f"report {source} {lean} {run}")["sections"]
    assert [row["name"] for row in section["rows"]] == ["source", "lean", "healed"]
    figures = [row["metric"]["mean"] for row in section["rows"]]
    assert figures[0] == pytest.approx(1.0, abs=1e-5)
    test = read(run / "summary.json")["test"]
    assert figures[1:] == [test["before"]["metric"], test["best"]["metric"]] and max(figures[1:]) < 1
