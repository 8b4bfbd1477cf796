"""The head's own objective: a score, several classes or one, each with its loss and its metric, through the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import spearmanr
from sklearn.metrics import f1_score

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data import calibration
from tests.cli.answers import document, heal, heals, read, stderr_of, stdout_of, typed, works
from tests.support.models.word_models import WORDS, words
from tests.tasks.prepared import everything, prepare

TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 8)) for i in range(160)]
NAMES = WORDS[:3]
MARKS = [[int(name in text.split()) for name in NAMES] for text in TEXTS]
SCORES = [round(sum(marks) / 3 + len(text) / 100, 3) for marks, text in zip(MARKS, TEXTS, strict=True)]


def bert(folder, cls="BertForSequenceClassification", **options):
    torch.manual_seed(3)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=61,
        max_position_embeddings=40, initializer_range=0.3, **options,
    )  # fmt: skip
    getattr(transformers, cls)(config).save_pretrained(folder)
    words(folder)
    return folder


def rows(file, labels, key="label", text=TEXTS):
    file.write_text("".join(json.dumps({"text": t, key: y}) + "\n" for t, y in zip(text, labels, strict=True)))
    return file


def trained(model, data, run):
    done = heals(model, data, run, "--set train.optim.lr=1e-12")
    return done, read(run / "summary.json")


def logits(model, split, run):
    """What plain transformers says of the held-out texts, and their labels as the task has them."""
    import yaml

    options = yaml.safe_load((run / "recipe.yaml").read_text())["task"]
    batch = everything(prepare(run / "cache", model_dir=model, **options), split)
    labels = batch.pop("labels")
    made = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        return made(**{k: v for k, v in batch.items() if k[0] != "_"}).logits, labels


@pytest.mark.parametrize("binary", [False, True])
def test_one_output_is_a_score(tmp_path, binary):
    model = bert(tmp_path / "own", num_labels=1)
    scores = [int(sum(marks) > 0) for marks in MARKS] if binary else SCORES
    data = rows(tmp_path / "a.jsonl", scores)
    done, summary = trained(model, data, tmp_path / "run")
    said, wanted = logits(model, "eval", tmp_path / "run")
    loss = torch.nn.functional.binary_cross_entropy_with_logits if binary else torch.nn.functional.mse_loss
    assert summary["task"]["metric"] == "spearman" and "new head" not in done.stderr
    assert " of loss, 95 %)" in stderr_of(done)
    assert f"label = label ({min(scores):g} to {max(scores):g})" in stderr_of(done)
    assert summary["before"]["loss"] == pytest.approx(loss(said[:, 0], wanted).item(), rel=1e-4)
    assert summary["before"]["metric"] == pytest.approx(spearmanr(said[:, 0], wanted)[0], abs=1e-4)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "run" / "model").num_labels == 1


@pytest.mark.parametrize("form", ["joined", "words"])
def test_several_classes_are_binary_cross_entropy_of_each(tmp_path, form):
    own = [NAMES[i] for i in (2, 0, 1)]
    model = bert(tmp_path / "own", problem_type="multi_label_classification", id2label=dict(enumerate(own)))
    if form == "words":  # as pandas writes get_dummies
        data = tmp_path / "a.csv"
        lines = [",".join([text, *map(str, map(bool, marks))]) for text, marks in zip(TEXTS, MARKS, strict=True)]
        data.write_text("\n".join([",".join(["text", *NAMES]), *lines]) + "\n")
    else:
        named = [[name for name, mark in zip(NAMES, marks, strict=True) if mark] for marks in MARKS]
        data = rows(tmp_path / "a.jsonl", ["|".join(names) or "none" for names in named], "labels")
    done, summary = trained(model, data, tmp_path / "run")
    assert " of loss, 95 %)" in stderr_of(done)  # F1 is no mean of what samples give
    alone = sum(tuple(marks) == (1, 0, 0) for marks in MARKS)
    assert f"{NAMES[0]} {100 * alone / len(MARKS):.0f} %" in stderr_of(done)
    said, wanted = logits(model, "eval", tmp_path / "run")
    truth = wanted.int().numpy()
    micro, macro = (f1_score(truth, (said > 0).numpy(), average=kind) for kind in ("micro", "macro"))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(said, wanted)
    assert summary["before"]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    metrics = summary["before"]["metrics"]
    assert (metrics["micro_f1"], metrics["macro_f1"]) == pytest.approx((micro, macro))
    config = read(tmp_path / "run" / "model" / "config.json")
    assert config["id2label"] == {str(i): name for i, name in enumerate(own)}


def test_scores_do_not_become_classes(tmp_path):
    model = bert(tmp_path / "own", id2label={0: "no", 1: "yes"})
    data = rows(tmp_path / "a.jsonl", [0.1 + i / 200 for i in range(160)])
    done = heal(model, data, tmp_path / "run")
    assert done.returncode == 2 and "decimals" in done.stderr and "--classes new" in stderr_of(done)


@pytest.mark.parametrize(("labels", "outputs"), [(["a", "b", "c"], 3), (None, 1)])
def test_an_encoder_without_a_head_gets_one_for_the_labels(tmp_path, labels, outputs):
    model = bert(tmp_path / "own", "BertModel")
    told = [labels[i % outputs] if labels else 0.5 + i / 100 for i in range(160)]
    done, summary = trained(model, rows(tmp_path / "a.jsonl", told), tmp_path / "run")
    made = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert made.config.num_labels == outputs and "has no head" in done.stderr and "It healed" not in done.stderr
    assert summary["task"]["metric"] == ("accuracy" if labels else "spearman")
    assert not labels or made.config.id2label[1] == labels[1]
    before = transformers.BertModel.from_pretrained(model).embeddings
    assert torch.allclose(made.bert.embeddings.word_embeddings.weight, before.word_embeddings.weight, atol=1e-4)


@pytest.mark.parametrize("kind", ["score", "marks"])
def test_cut_and_judged_the_head_is_measured_by_its_own_metric(tmp_path, kind):
    """What `shrink` and `judge` say of source and result is what plain transformers and scikit-learn make of it."""
    options = {"num_labels": 1} if kind == "score" else {"problem_type": "multi_label_classification", "num_labels": 3}
    model = bert(tmp_path / "own", **options)
    labels = {"score": SCORES, "marks": MARKS}[kind]
    data = rows(tmp_path / "a.jsonl", labels, "label" if kind == "score" else "labels")
    done = works(f"shrink {model} --layers 1 --calibrate {data} --heal none -o {tmp_path}/cut")
    by_shrink = read(tmp_path / "cut" / "surgery.json")
    held = calibration.open_calibration(str(data), open_source(str(model)), cache=tmp_path / "cache").heldout
    wanted = torch.cat([batch["labels"] for batch in held])
    compared = document(f"judge {tmp_path}/cut --data {data}")["judged"][str(data)]["scores"]
    assert compared == by_shrink["judged"]["a.jsonl"]["scores"]
    whole = document(f"heads {model} --data {data} --steps 2")["whole"]["scores"]
    assert whole == pytest.approx({name: both["source"] for name, both in compared.items()}, abs=1e-6)
    for folder, of in ((model, "source"), (tmp_path / "cut", "result")):
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        with torch.no_grad():
            said = torch.cat([plain(**{k: v for k, v in batch.items() if k != "labels"}).logits for batch in held])
        if kind == "score":
            expected = {"Spearman's correlation": spearmanr(said[:, 0], wanted)[0]}
        else:
            expected = {f"{how} F1": f1_score(wanted, said > 0, average=how) for how in ("micro", "macro")}
        assert {name: both[of] for name, both in compared.items()} == pytest.approx(expected, abs=1e-4)
        assert all(f"{name} " in stdout_of(done) for name in expected)


def test_a_recipe_makes_no_classifier_of_a_reranker(tmp_path):
    model = bert(tmp_path / "own", num_labels=1)
    data = rows(tmp_path / "a.jsonl", ["yes" if sum(marks) else "no" for marks in MARKS])
    task = {"name": "text-classification", "train": str(data), "seq_len": 16}
    train = {"duration": "2st", "batch": 16, "optim": {"name": "adamw", "lr": 1e-4}}
    recipe = {"version": 1, "name": "own", "kind": "training", "task": task, "train": train, "measure": None}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    asked = f"retrain {model} --recipe {tmp_path}/r.yaml -o {tmp_path}/run --cpu-processes 1"
    done = typed(asked)
    said = stderr_of(done)
    assert done.returncode == 2 and "predicts a score for each sample" in said and "--classes new" in said, said
    assert not (tmp_path / "run").exists()
    done = works(f"{asked} --classes new")
    assert "new head for no, yes" in stderr_of(done), done.stderr
    made = transformers.AutoConfig.from_pretrained(tmp_path / "run" / "model")
    assert made.id2label == {0: "no", 1: "yes"} and made.problem_type != "regression"
