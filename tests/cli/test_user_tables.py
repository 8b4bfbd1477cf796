"""What people have as tables, through the commands: what is said of it, and figures recomputed by the libraries."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.cli.answers import heal, typed
from tests.support.content import side_of
from tests.support.models import strangers


def write(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def said(done) -> str:
    assert done.returncode == 0, done.stderr
    return " ".join(done.stderr.split())


WORDS = ["the", "a", "and", "of", "to", "in"]


def line(i: int, k: int = 0) -> str:
    return " ".join(WORDS[(i // 6**n + k) % 6] for n in range(4)) + " " + WORDS[(i + k) % 6]


def test_three_lines_say_what_was_read(tmp_path):
    """Counts and shares are those of the file; rows without text or label are left out, and counted."""
    model = strangers.classifier(tmp_path / "model", ("bad", "good"))
    rows = [(f"R{i}", line(i), ["good", "bad", "good"][i % 3]) for i in range(90)]
    table = write(tmp_path / "Reviews.CSV", ("id", "Review", "mood"), [*rows, ("R", "", "bad"), ("R", line(7), "")])
    done = typed(f"shrink {model} --layers 2 --calibrate {table} --heal none -o {tmp_path}/lean")
    text = said(done)
    assert (
        "Reviews.CSV: 92 rows; text = Review; label = mood (bad 33 %, good 67 %); 1 without text left out; "
        "1 without label left out; id left out. Held out: " in text
    )
    assert text.index("Held out: ") < text.index("Classes: bad is output 0")
    assert text.count("92 rows") == 1
    healed = heal(tmp_path / "lean", table, tmp_path / "run")
    assert said(healed).count("92 rows; text = Review; label = mood") == 1
    kappa = f"kappa {model} --data {table} --samples 2 --probes 0 --columns"
    assert "text = Review; label = mood" in said(typed(f"{kappa} text=review,label=mood"))
    wrong = typed(f"{kappa} text=reviews")
    assert wrong.returncode == 2 and "there is no column 'reviews'" in " ".join(wrong.stderr.split())


def test_both_texts_of_a_pair_are_judged(tmp_path):
    model = strangers.classifier(tmp_path / "model", ("no", "yes"))
    rows = [(line(i), line(i, 3), ["no", "yes"][i % 2]) for i in range(120)]
    table = write(tmp_path / "pairs.csv", ("sentence1", "sentence2", "label"), rows)
    done = typed(f"judge {model} --against {model} --data {table} --json")
    assert "text = sentence1, sentence2; label = label" in said(done)
    (judged,) = json.loads(done.stdout)["judged"].values()
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    losses = []
    for i, (first, second, _) in enumerate(rows):
        if side_of(first, second) == "test":
            with torch.no_grad():
                given = tokenizer(first, second, return_tensors="pt")
                losses.append(network(**given, labels=torch.tensor([i % 2])).loss.item())
    assert judged["loss"]["source"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.parametrize("header", [("anchor", "positive", "negative"), ("sentence1", "sentence2", "score")])
def test_every_text_of_a_row_is_a_sentence_for_an_embedder(tmp_path, header):
    model = strangers.encoder(tmp_path / "model")
    rows = [[line(i), line(i + 200), 0.5 if header[2] == "score" else line(i + 400)] for i in range(60)]
    table = write(tmp_path / "rows.csv", header, rows)
    texts = {cell for row in rows for cell in row if isinstance(cell, str)}
    done = typed(f"kappa {model} --data {table} --samples 2 --probes 0")
    names = ", ".join(name for name in header if name != "score")
    assert f"60 rows; texts = {names}; {len(texts)} different" in said(done)
