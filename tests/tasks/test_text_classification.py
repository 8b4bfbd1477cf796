"""Text classification: three file formats, labels, padding, pairs, and rows that are wrong."""

from __future__ import annotations

import csv
import json
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from transformers import AutoTokenizer, BertTokenizer

from leansurgeon.errors import UsageError
from leansurgeon.tasks.text import vocab
from tests.tasks.prepared import everything, prepare

prepared = partial(prepare, name="text-classification", tokenizer="byte")

ROWS = [
    {"text": f'row {i}, "quoted"\nand a second line' + " word" * (i % 7), "other": f"pair {i}", "label": 3 * (i % 3)}
    for i in range(60)
]


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
    texts = [row["text"] for row in ROWS]
    vocab.make("wordpiece", 300, texts).save_pretrained(tmp_path / "model")
    train = write(tmp_path / "train.jsonl", ROWS)
    reference = AutoTokenizer.from_pretrained(tmp_path / "model")(
        texts, truncation=True, max_length=20, padding="max_length", return_tensors="pt"
    )
    options = {"train": train, "eval": train, "hold_out": False, "tokenizer": "model", "seq_len": 20}
    for pad, short in (("longest", 16), ("max", 20)):
        task = prepared(tmp_path / "cache", model_dir=tmp_path / "model", pad=pad, **options)
        batch = everything(task)
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(batch[name], reference[name][:, : batch[name].shape[1]])
        assert task.batch("train", np.array([0, 7]), seed=0, epoch=0)["input_ids"].shape[1] == short


@pytest.mark.parametrize("marked", [True, False])
def test_pairs_are_marked_where_the_model_wants_it(tmp_path, marked):
    made = vocab.make("wordpiece", 300, [row["text"] + row["other"] for row in ROWS])
    if marked:
        made = BertTokenizer(vocab=made.get_vocab())
    made.save_pretrained(tmp_path / "model")
    train = write(tmp_path / "train.csv", ROWS)
    options = {"train": train, "eval": train, "hold_out": False, "text_pair": "other", "pad": "max"}
    task = prepared(tmp_path / "c", model_dir=tmp_path / "model", tokenizer="model", **options)
    texts, others = [row["text"] for row in ROWS], [row["other"] for row in ROWS]
    reference = AutoTokenizer.from_pretrained(tmp_path / "model")(
        texts, others, max_length=128, padding="max_length", return_tensors="pt"
    )
    assert ("token_type_ids" in reference) is marked
    batch = everything(task)
    assert set(batch) == {*reference, "labels"}
    assert all(torch.equal(batch[name], reference[name]) for name in reference)


def test_named_labels_are_numbered_by_the_alphabet(tmp_path):
    for name, labels, numbers in (
        ("rows.csv", ["spam", "ham", "spam", "eggs"], [2, 1, 2, 0]),
        ("flags.jsonl", [True, False, True], [1, 0, 1]),
    ):
        path = write(tmp_path / name, [{"text": "x", "label": label} for label in labels])
        task = prepared(tmp_path / "cache", train=path, eval=path, hold_out=False)
        assert everything(task)["labels"].tolist() == numbers


def test_bad_rows_are_one_sentence(tmp_path):
    good = write(tmp_path / "good.csv", ROWS)
    cases = {
        "a.csv": ("text,lable\nx,1\n", r"'label'.*'lable'.*'text', 'lable'"),
        "b.csv": ("text,label\nx,1\nx,1,2\n", r"b\.csv, line 3: .*\b3\b.*\b2\b"),
        "c.csv": ('text,label\n"x,1\n', r"c\.csv, line 2: "),
        "d.csv": ("text,label\n", "no rows"),
        "e.csv": ("", r"'text'.*\bnone\b"),
        "f.csv": ("text,label\nx,0\ny,\n", "one label only, '0'"),  # the row without one is left out
        "h.csv": (b"text,label\n\xff,0\n", "h.csv is not UTF-8 text"),
        "i.jsonl": ('{"text": "x", "label": 1}\n{"text": \n', r"i\.jsonl, line 2\b.*\bJSON\b"),
        "j.jsonl": ("[1]\n", r"j\.jsonl, line 1: .*\blist\b"),
        "k.jsonl": ('{"text": null, "label": 1}\n', r"k\.jsonl: no rows with text and label"),
        "l.jsonl": ('{"text": "x", "label": 0.5}\n', r"l\.jsonl.*numbers with decimals"),
        "q.jsonl": ('{"text": 7, "label": 1}\n', r"q\.jsonl, row 1: 'text' is 7\b"),
        "m.parquet": (b"PAR1 no", r"m\.parquet\b.*\bparquet file\b"),
        "o.xlsx": ("x", r"o\.xlsx\b"),
        "none.csv": (None, "No data file"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UsageError, match=message) as caught:
            prepared(tmp_path / "cache", train=str(tmp_path / name), eval=good, hold_out=False)
        assert "\n" not in str(caught.value), name
    (tmp_path / "p.csv").write_text("text,label\nx,9\n")
    with pytest.raises(UsageError, match=r"\bevaluation\b.*'9'"):
        prepared(tmp_path / "cache", train=good, eval=str(tmp_path / "p.csv"))
    assert not list((tmp_path / "cache").iterdir())
