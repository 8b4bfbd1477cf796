"""lm-evaluation-harness on a task of local data, from start to end, through `leansurgeon judge --lm-eval`."""

from __future__ import annotations

import json

import pytest
import torch

from leansurgeon.checkpoints import record
from tests.clients.cells import kinds
from tests.clients.conftest import loaded, logits_of
from tests.support.command_line import leansurgeon
from tests.support.models.word_models import WORDS

pytestmark = pytest.mark.clients
ROWS = [
    {"text": " ".join(WORDS[i : i + 4]), "a": WORDS[i], "b": WORDS[(i + 7) % 50], "right": i % 2} for i in range(40)
]
TASK = """
task: words_again
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{[a, b]}}"
doc_to_target: right
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


@kinds("lm-evaluation-harness")
def test_a_local_task_scores_as_by_hand(kind, cut, tmp_path):
    from transformers import AutoTokenizer

    data, task = tmp_path / "rows.jsonl", tmp_path / "words_again.yaml"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    task.write_text(TASK % data)
    done = leansurgeon("judge", cut(kind), "--lm-eval", task, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["judged"].values()
    tokenizer = AutoTokenizer.from_pretrained(cut(kind))
    source = cut(kind).with_name(f"{kind}-source")
    for side, folder, own in (("source", source, "plain"), ("result", cut(kind), kind)):
        model = loaded(folder, own if side == "result" else kind.removesuffix("-own"))
        right = sum(choice(model, tokenizer, row) == row["right"] for row in ROWS)
        assert found["scores"]["acc"][side] == pytest.approx(right / len(ROWS))
    assert found["scored"] == len(ROWS)
    assert "lm-eval words_again" in record.read(cut(kind)).judged


def choice(model, tokenizer, row) -> int:
    """The likelier of two words that follow a text."""
    scores = []
    for word in (row["a"], row["b"]):
        ids = tokenizer(f"{row['text']} {word}", return_tensors="pt").input_ids
        logits = logits_of(model, {"input_ids": ids}).log_softmax(-1)
        scores.append(float(logits[0, -2, ids[0, -1]]))
    return int(torch.tensor(scores).argmax())
