"""Text classification: three file formats, labels, padding, pairs, and rows that are wrong."""

from __future__ import annotations

import csv
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from transformers import AutoTokenizer, BertTokenizer

from leansurgeon import progress, tasks
from leansurgeon.errors import UsageError
from leansurgeon.tasks.text import vocab
from tests.support.models.word_models import crammed_words

ROWS = [
    {"text": f'row {i}, "quoted"\nand a second line' + " word" * (i % 7), "other": f"pair {i}", "label": 3 * (i % 3)}
    for i in range(60)
]


def quiet(line: str) -> None:
    pass


def write(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".tsv":
        path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [rows[0], *(r.values() for r in rows)]))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(cache, model_dir=None, **options):
    task = tasks.make("text-classification", {"tokenizer": "byte", **options})
    task.prepare(cache, model_dir, workers=1, say=quiet)
    return pickle.loads(pickle.dumps(task))


def everything(task, split="train"):
    return task.batch(split, np.arange(task.size(split)), seed=0, epoch=0)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_all_formats_hold_the_same_rows(tmp_path, suffix):
    # Quotation marks mean themselves between tabs, so that no line end can be quoted there.
    rows = [row | {"text": row["text"].replace("\n", " ")} for row in ROWS] if suffix == ".tsv" else ROWS
    train, evaluation = write(tmp_path / f"train{suffix}", rows), write(tmp_path / f"eval{suffix}", rows[:9])
    task = prepared(tmp_path / "cache", train=train, eval=evaluation, hold_out=False)
    assert (task.size("train"), task.size("eval")) == (60, 9)
    batch = everything(task)
    assert batch["labels"].tolist() == [i % 3 for i in range(60)]  # 0, 3, 6 are numbered 0, 1, 2
    assert task.describe()["labels"] == ["0", "3", "6"]
    assert task.model_overrides() | {"id2label": 0} == {"num_labels": 3, "vocab_size": 261, "id2label": 0}
    assert sorted(task.model_overrides()["id2label"]) == [0, 1, 2]
    for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
        assert task.tokenizer().decode(ids, skip_special_tokens=True) == row["text"]
        assert ids[mask.sum() - 1] == task.tokenizer().sep_token_id and not ids[mask.sum() :].any()
        assert mask.sum() == len(row["text"]) + 2
    assert torch.equal(task.token_mask(batch), batch["attention_mask"] == 1)


def test_tokens_are_those_of_the_models_tokenizer(tmp_path):
    vocab.make("wordpiece", 300, [row["text"] for row in ROWS]).save_pretrained(tmp_path / "model")
    train = write(tmp_path / "train.jsonl", ROWS)
    for pad in ("longest", "max"):
        task = prepared(
            tmp_path / "cache",
            tmp_path / "model",
            train=train,
            eval=train,
            hold_out=False,
            tokenizer="model",
            seq_len=20,
            pad=pad,
        )
        assert task.model_overrides()["num_labels"] == 3
        texts = [row["text"] for row in ROWS]
        reference = AutoTokenizer.from_pretrained(tmp_path / "model")(
            texts, truncation=True, max_length=20, padding="max_length", return_tensors="pt"
        )
        batch = everything(task)
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(batch[name], reference[name][:, : batch[name].shape[1]])
        short = task.batch("train", np.array([0, 7]), seed=0, epoch=0)["input_ids"].shape[1]
        assert short == (20 if pad == "max" else 16)
        assert "token_type_ids" not in batch


@pytest.mark.parametrize("marked", [True, False])
def test_pairs_are_marked_where_the_model_wants_it(tmp_path, marked):
    made = vocab.make("wordpiece", 300, [row["text"] + row["other"] for row in ROWS])
    if marked:
        made = BertTokenizer(vocab=made.get_vocab())
    made.save_pretrained(tmp_path / "model")
    train = write(tmp_path / "train.csv", ROWS)
    options = {"train": train, "eval": train, "hold_out": False, "text_pair": "other", "pad": "max"}
    task = prepared(tmp_path / "c", tmp_path / "model", tokenizer="model", **options)
    texts, others = [row["text"] for row in ROWS], [row["other"] for row in ROWS]
    reference = AutoTokenizer.from_pretrained(tmp_path / "model")(
        texts, others, max_length=128, padding="max_length", return_tensors="pt"
    )
    assert ("token_type_ids" in reference) is marked
    batch = everything(task)
    assert set(batch) == {*reference, "labels"}
    assert all(torch.equal(batch[name], reference[name]) for name in reference)


def test_named_labels_are_numbered_by_the_alphabet(tmp_path):
    rows = [{"text": "x", "label": name} for name in ("spam", "ham", "spam", "eggs")]
    path = write(tmp_path / "rows.csv", rows)
    task = prepared(tmp_path / "cache", train=path, eval=path, hold_out=False)
    assert everything(task)["labels"].tolist() == [2, 1, 2, 0]
    flags = write(tmp_path / "flags.jsonl", [{"text": "x", "label": flag} for flag in (True, False, True)])
    assert everything(prepared(tmp_path / "cache", train=flags, eval=flags, hold_out=False))["labels"].tolist() == [
        1,
        0,
        1,
    ]


def test_a_sample_is_the_same_in_every_batch(tmp_path):
    path = write(tmp_path / "rows.csv", ROWS)
    task = prepared(tmp_path / "cache", train=path, eval=path, hold_out=False, pad="max")
    whole, some = everything(task), task.batch("train", np.array([9, 4]), seed=3, epoch=2)
    assert all(torch.equal(some[name], whole[name][[9, 4]]) for name in whole)


def test_bad_rows_are_one_sentence(tmp_path):
    def file(name, content):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(tmp_path / name)

    good = write(tmp_path / "good.csv", ROWS)
    cases = [
        (file("a.csv", "text,lable\nx,1\n"), r"'label'.*'lable'.*'text', 'lable'"),
        (file("b.csv", "text,label\nx,1\nx,1,2\n"), r"b\.csv, line 3: .*\b3\b.*\b2\b"),
        (file("c.csv", 'text,label\n"x,1\n'), r"c\.csv, line 2: "),
        (file("d.csv", "text,label\n"), "no rows"),
        (file("e.csv", ""), r"'text'.*\bnone\b"),
        (file("f.csv", "text,label\nx,0\ny,\n"), "one label only, '0'"),  # the row without one is left out
        (file("g.csv", "text,label\nx,0\ny,0\n"), "one label only, '0'"),
        (file("h.csv", b"text,label\n\xff,0\n"), "h.csv is not UTF-8 text"),
        (file("i.jsonl", '{"text": "x", "label": 1}\n{"text": \n'), r"i\.jsonl, line 2\b.*\bJSON\b"),
        (file("j.jsonl", "[1]\n"), r"j\.jsonl, line 1: .*\blist\b"),
        (file("k.jsonl", '{"text": null, "label": 1}\n'), r"k\.jsonl: no rows with text and label"),
        (file("l.jsonl", '{"text": "x", "label": 0.5}\n'), r"l\.jsonl.*numbers with decimals"),
        (file("q.jsonl", '{"text": 7, "label": 1}\n'), r"q\.jsonl, row 1: 'text' is 7\b"),
        (file("m.parquet", b"PAR1 no"), r"m\.parquet\b.*\bparquet file\b"),
        (write(tmp_path / "n.parquet", [{"texts": "x", "label": 1}]), r"'text'.*'texts'"),
        (file("o.xlsx", "x"), r"o\.xlsx\b"),
        (str(tmp_path / "none.csv"), "No data file"),
    ]
    for path, message in cases:
        with pytest.raises(UsageError, match=message) as caught:
            prepared(tmp_path / "cache", train=path, eval=good, hold_out=False)
        assert "\n" not in str(caught.value), path
    with pytest.raises(UsageError, match=r"\bevaluation\b.*'9'"):
        prepared(tmp_path / "cache", train=good, eval=file("p.csv", "text,label\nx,9\n"))
    assert not list((tmp_path / "cache").iterdir())


def test_a_tokenizer_that_marks_pairs_alone_reads_a_text_with_an_empty_one(tmp_path):
    crammed_words(tmp_path / "tokenizer")
    table = tmp_path / "rows.csv"
    table.write_text("text,label\n" + "".join(f"w{i} w{i + 1},{i % 2}\n" for i in range(40)))
    task = tasks.make("text-classification", {"train": str(table), "tokenizer": f"{tmp_path}/tokenizer", "seq_len": 16})
    task.prepare(tmp_path / "cache", None, workers=1, say=lambda line: None)
    ids = task.batch("train", np.arange(task.size("train")), seed=0, epoch=0)["input_ids"]
    assert ids[:, :1].unique().tolist() == [2] and (ids[:, 3:5] == 3).all()  # <cls> w w <sep> <sep>


def test_tokenising_shows_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0)
    table, told = tmp_path / "rows.csv", []
    table.write_text("text,label\n" + "".join(f"row {i},{i % 2}\n" for i in range(4000)))
    with progress.show_on(progress.Screen(told.append)):
        prepared(tmp_path / "cache", train=str(table))
    assert any(line.startswith("tokenising: 1/") and "texts/s" in line for line in told)
