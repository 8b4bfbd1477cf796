"""Sentences for encoders: what comes with the package beside the user's own."""

from __future__ import annotations

from leansurgeon import tasks
from leansurgeon.tasks.text import corpus, files


def test_prose_of_the_package_trains_and_chooses_and_is_never_reported_on(tmp_path):
    novel = corpus.find("austen", "text").texts()
    mine = [f"A sentence of mine, which has the number {i}." for i in range(180)] + novel[:20]
    (tmp_path / "mine.txt").write_text("\n".join(mine))
    found = {}
    for prose in (False, True):
        task = tasks.make("sentences", {"data": str(tmp_path / "mine.txt"), "tokenizer": "byte", "prose": prose})
        task.prepare(tmp_path / "cache", None, workers=1, say=lambda _: None)
        tokenizer = task.tokenizer()
        found[prose] = {
            side: [
                tokenizer.decode(row, skip_special_tokens=True)
                for row in task.batch(side, range(task.size(side)), seed=0, epoch=0)["input_ids"]
            ]
            for side in task.splits
        }
    alone, both = ({side: len(lines) for side, lines in one.items()} for one in found.values())
    assert found[True]["test"] == found[False]["test"] and both["eval"] == 2 * alone["eval"]
    every = {line for name in files.PROSE for line in corpus.find(name, "text").texts()}
    assert 0.75 * len(every) < both["train"] - alone["train"] < 0.85 * len(every)
    assert f"{both['train'] - alone['train']:,} sentences that come with leansurgeon" in task.held_out
    assert not set(found[True]["train"]) & {*found[True]["test"], *found[True]["eval"]}
