"""Making tasks by name: cheap, and clear about what is not known."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from leansurgeon import tasks
from leansurgeon.errors import UsageError
from leansurgeon.tasks.base import TARGET, Sums
from tests.support.content import side_of

NEEDED = {"text-classification": {"train": "x.csv"}, "glue": {"task": "cola"}}
NEEDED |= {name: {"data": "x"} for name in ("imagenet", "folder", "images", "lra-retrieval")}


def test_making_tasks_imports_nothing_heavy():
    code = """
import sys
from leansurgeon import tasks
needed = {"text-classification": {"train": "x.csv"}, "glue": {"task": "cola"}}
needed |= {name: {"data": "x"} for name in ("imagenet", "folder", "images", "lra-retrieval")}
for name in tasks.TASKS:
    tasks.make(name, needed.get(name, {}))
heavy = {"torch", "transformers", "sklearn", "tokenizers", "pyarrow", "pandas", "scipy", "datasets", "timm", "PIL"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def valued(task: tasks.Task, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> float:
    """The metric of what a model says of one batch."""
    score = task.score(logits, batch)
    extra = None if score.extra is None else score.extra.double().numpy()
    return task.metric_value(Sums(*(float(part) for part in score[:4]), extra))[task.metric.key]


# Those that know their classes, their score or their texts once they are prepared are compared with scikit-learn.
@pytest.mark.parametrize("name", [n for n in tasks.TASKS if n not in ("text-classification", "glue")])
def test_a_better_answer_has_a_better_value(name):
    """Whether high is good and what is a percentage, by what a task says of right answers, half of them, and none."""
    task = tasks.make(name, NEEDED.get(name, {}))
    task._info["variance"] = 1.0
    labels = torch.arange(8) % 4
    right = 9 * torch.nn.functional.one_hot(labels.roll(-1) if task.head == "causal-lm" else labels, 4).float()
    batch = {"labels": labels}
    if task.head == "features":
        right = torch.eye(8)
        batch = {"labels": torch.zeros(8), TARGET: right}
    elif name == "d-retrieval":
        right = batch["labels"] = labels.float()[:, None]
    wrong = right + 2 if name == "d-retrieval" else right.roll(1, -1)
    answers = [right, torch.cat([right[:4], wrong[4:]]), wrong]
    if task.head.endswith("-lm"):
        batch, answers = {"labels": labels[None]}, [one[None] for one in answers]
    best, half, worst = (valued(task, one, batch) for one in answers)
    assert (best > half > worst) if task.metric.higher_is_better else (best < half < worst)
    assert task.metric.percent == (task.metric.higher_is_better and task.metric.key != "cosine")
    if task.metric.percent:
        assert (best, half, worst) == (1, 0.5, 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, r"\btask 'digit'.*'digits'"),
        ("digits", {"split_sed": 1}, r"'split_sed'.*'split_seed'.*split_seed"),
        ("digits", {"split_seed": "x"}, "option 'split_seed'.*valid integer.*'x'"),
        ("masked-lm", {"mask_prob": 1.5}, "option 'mask_prob'.*less than 1.*1.5"),
        ("causal-lm", {"tokenizer": "words"}, "option 'tokenizer'.*'char'.*'words'"),
        ("causal-lm", {"mask_prob": 0.1}, "no option 'mask_prob'"),
        ("text-classification", {}, "option 'train'.*required"),
    ],
)
def test_unknown_names_and_values_are_usage_errors(name, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        tasks.make(name, options)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


SIZES, ORIGIN = ["train_samples", "eval_samples"], ["source", "licence"]
TOKENS = ["tokenizer", "vocab_size", "seq_len"]
HELD = ["test_samples", "split"]
LINES = [f"This is sentence number {i}, which is long enough to be counted." for i in range(60)]
ROWS = [f"some words {i}" for i in range(40)]
THEIRS = "as the files' owner says"


def cut(texts: list[str]) -> tuple[int, int]:
    """How many train and choose by content."""
    sides = [side_of(text) for text in texts]
    return sides.count("train"), sides.count("eval")


TOLD = [
    ("digits", {}, [], (1437, 360, "Optical recognition of handwritten digits (Alp", "CC BY 4.0")),
    ("d-retrieval", {"train": 20, "eval": 10}, [], (20, 10, "generalised D-retrieval, generated: D 4, 16 ", "made by")),
    (
        "causal-lm",
        {"data": "a.txt", "tokenizer": "char", "seq_len": 16, "random_windows": False, "eval_fraction": 0.1},
        ["train_tokens", "eval_tokens", "characters", *TOKENS],
        (215, 24, "a.txt", THEIRS),  # (3,446 + 1) // 16 and (383 + 1) // 16: characters and the end of a document
    ),
    ("sentences", {"data": "a.txt", "tokenizer": "char"}, [*HELD, *TOKENS], (*cut(LINES), "a.txt", THEIRS)),
    (
        "text-classification",
        {"train": "t.csv", "tokenizer": "byte"},
        [*HELD, "labels", *TOKENS],
        (*cut(ROWS), "t.csv", THEIRS),
    ),
]


@pytest.mark.parametrize(("name", "options", "between", "expected"), TOLD, ids=lambda value: str(value)[:20])
def test_what_a_task_says_of_its_data(name, options, between, expected, tmp_path, monkeypatch):
    """Sizes first, source and licence last, in this order; also after a way through another process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    (tmp_path / "t.csv").write_text("\n".join(["text,label", *(f"{row},{i % 2}" for i, row in enumerate(ROWS))]))
    task = tasks.make(name, options)
    task.prepare(tmp_path / "cache", None, workers=1, say=print)
    told = task.describe()
    assert list(told) == [*SIZES, *between, *ORIGIN]
    train, evaluation, source, licence = expected
    assert (told["train_samples"], told["eval_samples"]) == (train, evaluation)
    assert told["source"].startswith(source) and told["licence"].startswith(licence)
    assert pickle.loads(pickle.dumps(task)).describe() == told
