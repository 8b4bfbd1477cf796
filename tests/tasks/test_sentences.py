"""Sentences for encoders: what comes with the package beside the user's own."""

from __future__ import annotations

import pytest

from leansurgeon import tasks
from leansurgeon.tasks.text import corpus, files
from leansurgeon.tasks.text.sentences import packaged_prose
from tests.tasks.prepared import everything, prepare


def read(tmp_path, **options) -> tuple[tasks.Task, dict[str, list[str]]]:
    """The task, and the texts of every split."""
    task = prepare(tmp_path / "cache", "sentences", tokenizer="byte", seq_len=4_096, **options)
    return task, {
        side: [task.tokenizer().decode(row, skip_special_tokens=True) for row in everything(task, side)["input_ids"]]
        for side in task.splits
    }


def test_prose_of_the_package_trains_and_chooses_and_is_never_reported_on(tmp_path):
    (tmp_path / "mine.txt").write_text("\n".join(f"A sentence of mine, which has the number {i}." for i in range(200)))
    data = str(tmp_path / "mine.txt")
    _, alone = read(tmp_path, data=data)
    task, both = read(tmp_path, data=data, prose=True)
    assert both["test"] == alone["test"] and len(both["eval"]) == 2 * len(alone["eval"])
    more = set(both["train"]) - set(alone["train"])
    every = packaged_prose()
    assert more == set(every["train"]) and set(both["eval"]) - set(alone["eval"]) <= set(every["eval"])
    sources = [set(corpus.find(name, "text").texts()) for name in files.PROSE]
    assert all(len(set(both["eval"]) & one) > 3 for one in sources)  # old and new
    assert f"{len(more):,} sentences that come with leansurgeon train" in task.held_out and "prose" in task.source


@pytest.mark.parametrize("joined", [1, 3], ids=["sentences", "cells of several"])
def test_what_the_user_holds_out_never_trains_by_another_name(joined, tmp_path):
    learned = [
        line for line in packaged_prose()["train"] if len(line) < 200 and line.endswith(".") and line[0].isalpha()
    ]
    held = [" ".join(learned[i : i + joined]) for i in range(0, 60, joined)]
    (tmp_path / "mine.csv").write_text(
        "text\n" + "\n".join(f"A sentence of mine with the number {i}." for i in range(99))
    )
    (tmp_path / "held.csv").write_text("text\n" + "\n".join('"' + line.replace('"', '""') + '"' for line in held))
    options = {"data": str(tmp_path / "mine.csv"), "test_data": str(tmp_path / "held.csv")}
    _, found = read(tmp_path, prose=True, **options)
    assert len(found["test"]) == len(held) and len(found["train"]) > 3_000
    assert not [line for line in found["train"] for text in found["test"] if line in text]
