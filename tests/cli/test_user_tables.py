"""What people have as tables, through the commands: what is said of it, and figures recomputed by the libraries."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support.command_line import leansurgeon
from tests.support.models import strangers


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANSURGEON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
    done = leansurgeon("shrink", model, "--layers", 2, "--calibrate", table, "--heal", "none", "-o", tmp_path / "lean")
    text = said(done)
    assert (
        "Reviews.CSV: 92 rows; text = Review; label = mood (bad 33 %, good 67 %); 1 without text left out; "
        "1 without label left out; id left out. Held out: " in text
    )
    assert text.index("Held out: ") < text.index("Classes: bad is output 0")
    assert text.count("92 rows") == 1
    healed = strangers.healed(tmp_path / "lean", table, tmp_path / "run")
    assert said(healed).count("92 rows; text = Review; label = mood") == 1
    with_columns = leansurgeon(
        "shrink", model, "--layers", 2, "--calibrate", table, "--columns", "text=review,label=mood", "--dry-run"
    )
    assert "text = Review; label = mood" in said(with_columns)
    wrong = leansurgeon("kappa", model, "--data", table, "--columns", "text=reviews")
    assert wrong.returncode == 2 and "there is no column 'reviews'" in " ".join(wrong.stderr.split())


def test_both_texts_of_a_pair_are_judged(tmp_path):
    model = strangers.classifier(tmp_path / "model", ("no", "yes"))
    rows = [(line(i), line(i, 3), ["no", "yes"][i % 2]) for i in range(120)]
    table = write(tmp_path / "pairs.csv", ("sentence1", "sentence2", "label"), rows)
    done = leansurgeon("shrink", model, "--layers", 2, "--calibrate", table, "--heal", "none", "-o", tmp_path / "lean")
    assert "text = sentence1, sentence2; label = label" in said(done)
    judged = json.loads((tmp_path / "lean" / "surgery.json").read_text())["judged"]["pairs.csv"]
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        logits = network(
            **tokenizer([a for a, _, _ in rows], [b for _, b, _ in rows], padding=True, return_tensors="pt")
        )
    right = [int(p) == i % 2 for i, p in enumerate(logits.logits.argmax(1))]
    # The held-out rows are some of these: the share of right ones is a whole number of them.
    count = int(said(done).split("Held out: ")[1].split(" ")[0])
    assert judged["accuracy"]["source"] * count == pytest.approx(round(judged["accuracy"]["source"] * count))
    assert sum(right) >= round(judged["accuracy"]["source"] * count)


@pytest.mark.parametrize("header", [("anchor", "positive", "negative"), ("sentence1", "sentence2", "score")])
def test_every_text_of_a_row_is_a_sentence_for_an_embedder(tmp_path, header):
    model = strangers.encoder(tmp_path / "model")
    rows = [[line(i), line(i + 200), 0.5 if header[2] == "score" else line(i + 400)] for i in range(60)]
    table = write(tmp_path / "rows.csv", header, rows)
    texts = {cell for row in rows for cell in row if isinstance(cell, str)}
    done = leansurgeon("shrink", model, "--layers", 2, "--calibrate", table, "--heal", "none", "-o", tmp_path / "lean")
    assert f"60 rows; texts = {', '.join(name for name in header if name != 'score')}; {len(texts)} different" in said(
        done
    )


def test_a_chat_is_read_by_the_models_template(tmp_path):
    from leansurgeon import tasks

    model = strangers.model(tmp_path / "model", "llama")
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    rows = [{"prompt": line(i), "completion": line(i, 2), "id": f"x{i}"} for i in range(300)]
    table = tmp_path / "chat.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for written in (False, True):
        if written:
            (model / "chat_template.jinja").write_text(template)
        task = tasks.make(
            "causal-lm", {"data": str(table), "text": ["prompt", "completion"], "chat": True, "seq_len": 8}
        )
        task.prepare(tmp_path / "cache", model, workers=1, say=print)
        found[written] = task
    assert "chat (joined, as the tokenizer has no template) = " in found[False].was_read
    assert "chat (by the model's template) = prompt, completion" in found[True].was_read
    assert "id left out" in found[True].was_read
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [
        [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"]}] for r in rows
    ]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    ended = tokenizer.eos_token_id is not None or tokenizer.sep_token_id is not None
    tokens = sum(len(ids) + ended for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    assert sum(found[True].describe()[f"{split}_tokens"] for split in found[True].splits) == tokens
