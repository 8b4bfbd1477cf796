"""GLUE: the files of the hub, and metrics equal to scikit-learn's and scipy's however batches are cut."""

from __future__ import annotations

import json
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics
from transformers import AutoTokenizer

from leansurgeon import tasks
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.tasks.text import glue
from tests.support.models.word_models import crammed_words
from tests.tasks.prepared import everything, prepare

prepared = partial(prepare, name="glue", tokenizer="byte")

NLI = ["entailment", "neutral", "contradiction"]


def rows(task: str, part: str) -> list[tuple]:
    """Made-up rows (texts and label number); quotation marks mean themselves."""
    count = {"train": 24, "eval": 13, "matched": 11, "mismatched": 7}[part]
    rng = np.random.default_rng([len(task), len(part)])
    kind, made = glue.KINDS[task], []
    for i in range(count):
        texts = [f"{part} {i} \"{name} it's, said\x85 he" for name in kind.texts]
        label = i % len(kind.labels) if kind.labels else round(float(rng.uniform(0, 5)), 3)
        made.append((*texts, label))
    return made


def parts_of(task: str) -> dict[str, str]:
    return {"train": "train", **({"matched": "", "mismatched": ""} if task == "mnli" else {"eval": ""})}


def hub_set(task: str, part: str) -> datasets.Dataset:
    kind = glue.KINDS[task]
    label = datasets.ClassLabel(names=list(kind.labels)) if kind.labels else datasets.Value("float32")
    features = datasets.Features({**dict.fromkeys(kind.texts, datasets.Value("string")), "label": label})
    columns = dict(zip([*kind.texts, "label"], map(list, zip(*rows(task, part), strict=True)), strict=True))
    return datasets.Dataset.from_dict(columns, features=features)


def write_hub(root, task: str) -> str:
    """Parquet files as the hub has them."""
    (root / task).mkdir(parents=True)
    for part in parts_of(task):
        name = {"train": "train", "eval": "validation"}.get(part, f"validation_{part}")
        hub_set(task, part).to_parquet(root / task / f"{name}-00000-of-00001.parquet")
    return str(root)


@pytest.mark.parametrize("task", glue.KINDS)
def test_all_forms_hold_the_same_rows(tmp_path, task):
    made = [prepared(tmp_path / "cache", task=task, data=write(tmp_path / write.__name__, task)) for write in WRITERS]
    kind = glue.KINDS[task]
    for split in ("train", "eval"):
        expected = [
            row for part in parts_of(task) if (part == "train") == (split == "train") for row in rows(task, part)
        ]
        first, *others = (everything(t, split) for t in made)
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first) and set(first) == set(other)
        assert first["labels"].tolist() == pytest.approx([row[-1] for row in expected])
        assert first["labels"].dtype == (torch.int64 if kind.labels else torch.float32)
        for ids, (*texts, _) in zip(first["input_ids"], expected, strict=True):
            assert made[0].tokenizer().decode(ids, skip_special_tokens=True) == "".join(texts)
    assert made[0].model_overrides()["num_labels"] == max(1, len(kind.labels))


def write_converted(root, task: str) -> str:
    """Parquet files as the hub converts them: a folder for each part."""
    write_hub(root, task)
    for path in (root / task).iterdir():
        part = root / task / path.name.split("-")[0]
        part.mkdir()
        path.rename(part / "0000.parquet")
    return str(root)


WRITERS = (write_hub, write_converted)


def summed(task, logits: torch.Tensor, parts: int) -> dict[str, float]:
    """Metrics over the evaluation split, its batches cut in `parts` and padded as the last of a process may be."""
    sums, extra = np.zeros(4), np.zeros(task.extra_sums)
    for chosen in np.array_split(np.arange(task.size("eval")), parts):
        score = task.score(logits[chosen], task.batch("eval", chosen, seed=0, epoch=0))
        sums += [float(value) for value in score[:4]]
        if score.extra is not None:
            extra += score.extra.double().numpy()
    return task.metric_value(tasks.Sums(*sums.tolist(), extra))


@pytest.mark.parametrize("task", glue.KINDS)
def test_metrics_are_those_of_the_libraries_however_batches_are_cut(tmp_path, task):
    made = prepared(tmp_path / "cache", task=task, data=write_hub(tmp_path / "data", task))
    torch.manual_seed(1)
    logits = torch.randn(made.size("eval"), max(1, len(glue.KINDS[task].labels)))
    labels = everything(made, "eval")["labels"].numpy()
    best, numbers = logits.argmax(1).numpy(), logits[:, 0].double().numpy()
    if task == "stsb":
        pearson, spearman = stats.pearsonr(numbers, labels), stats.spearmanr(numbers, labels)
        expected = {"pearson": pearson.statistic, "spearman": spearman.statistic}
    elif task == "mnli":
        right = best == labels
        expected = {"accuracy": right[:11].mean(), "accuracy_mismatched": right[11:].mean()}
    else:
        every = {
            "accuracy": metrics.accuracy_score(labels, best),
            "f1": metrics.f1_score(labels, best),
            "matthews": metrics.matthews_corrcoef(labels, best),
        }
        expected = {name: every[name] for name in glue.KINDS[task].metrics}
    for parts in (1, 5):
        assert summed(made, logits, parts) == pytest.approx(expected, rel=1e-6)


def test_predictions_that_are_all_alike_give_nought(tmp_path):
    for task in ("stsb", "cola", "mrpc"):
        made = prepared(tmp_path / "cache", task=task, data=write_hub(tmp_path / "data", task))
        logits = torch.zeros(made.size("eval"), max(1, len(glue.KINDS[task].labels)))
        assert summed(made, logits, 2)[made.metric.key] == 0


def test_regression_is_the_mean_squared_error(tmp_path):
    made = prepared(tmp_path / "cache", task="stsb", data=write_hub(tmp_path / "data", "stsb"))
    labels = made.batch("train", np.arange(24), seed=0, epoch=0)["labels"]
    logits = torch.randn(26, 1)
    padded = torch.cat([labels, torch.full((2,), -100.0)])
    score = made.score(logits, {"labels": padded})
    mean = torch.nn.MSELoss()(logits[:24, 0], labels)
    assert float(score.loss_sum / score.loss_count) == pytest.approx(float(mean), rel=1e-5)


def test_missing_and_bad_files_are_one_sentence(tmp_path):
    with pytest.raises(LeanSurgeonError, match=r"nyu-mll/glue"):
        prepared(tmp_path / "cache", task="rte")
    with pytest.raises(UsageError, match=r"GLUE.*cola/train"):
        prepared(tmp_path / "cache", task="cola", data=str(tmp_path))
    with pytest.raises(UsageError, match=r"option 'task'.*'cola'"):
        tasks.make("glue", {"task": "wnli"})
    pair = {"sentence1": "a", "sentence2": "b"}
    for task, row, message in (
        ("rte", pair | {"label": "maybe"}, r"train\.jsonl, row 1: .*'maybe'"),
        ("rte", {"sentence1": "a", "label": "entailment"}, r"train\.jsonl\b.*'sentence2'"),
        ("rte", None, "no rows"),
        ("stsb", pair | {"label": 5.1}, r"train\.jsonl, row 1: .*0 to 5"),
        ("stsb", pair | {"label": "nan"}, "0 to 5"),
        ("sst2", {"sentence": "a", "label": "1e999"}, r"train\.jsonl, row 1: .*0, 1"),
    ):
        for name in ("train", "validation"):
            (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) if row else "")
        with pytest.raises(UsageError, match=message):
            prepared(tmp_path / "cache", task=task, data=str(tmp_path))


@pytest.mark.parametrize("task", ["sst2", "rte"])
def test_a_text_alone_is_paired_with_an_empty_one_where_the_tokenizer_marks_pairs_only(tmp_path, task):
    """As Crammed BERT's own code does it, whose tokenizer has a `<cls>` in the template of pairs alone."""
    crammed_words(tmp_path / "tokenizer")
    data = write_hub(tmp_path / "data", task)
    made = prepared(tmp_path / "cache", task=task, data=data, tokenizer=f"{tmp_path}/tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    texts = [[*row[:-1], ""][:2] for row in rows(task, "train")]
    batch = made.batch("train", np.arange(24), seed=0, epoch=0)
    real = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    assert [ids[mask.bool()].tolist() for ids, mask in real] == tokenizer(texts)["input_ids"]
    assert (batch["input_ids"][:, 0] == tokenizer.cls_token_id).all()


def test_an_encoder_whose_tokenizer_marks_no_text_is_refused(tmp_path):
    crammed_words(tmp_path / "model", pair=False)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    task = tasks.make("glue", {"task": "sst2", "data": write_hub(tmp_path / "data", "sst2")})
    with pytest.raises(UsageError, match=r"reads the token <cls>.*does not add it to texts"):
        task.prepare(tmp_path / "cache", tmp_path / "model", workers=1, say=lambda line: None)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')  # reads the last token
    task.prepare(tmp_path / "cache", tmp_path / "model", workers=1, say=lambda line: None)
