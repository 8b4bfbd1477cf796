"""Making tasks by name: cheap, and clear about what is not known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from leansurgeon import tasks
from leansurgeon.errors import UsageError

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


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task_says_what_it_is(name):
    task = tasks.make(name, NEEDED.get(name, {}))
    assert task.name == name
    assert task.head in ("image-classification", "sequence-classification", "causal-lm", "masked-lm", "features")
    assert task.metric.higher_is_better == (task.metric.key not in ("perplexity", "nmse"))
    assert task.metric.percent == (task.metric.higher_is_better and task.metric.key != "cosine")
    with pytest.raises(RuntimeError, match="before prepare"):
        task.size("train")


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


def test_options_show_their_defaults():
    assert tasks.options_of("listops", {"train": 10}).model_dump() == {
        "train": 10,
        "eval": 2000,
        "test": 2000,
        "max_depth": 10,
        "max_args": 10,
        "min_length": 500,
        "max_length": 2000,
        "seed": 0,
        "seq_len": None,
    }


def test_a_folder_of_texts_is_read_file_by_file(tmp_path):
    from leansurgeon.tasks.text import files

    (tmp_path / "below" / ".hidden").mkdir(parents=True)
    for name in ("b.txt", "below/a.md", "below/.hidden/c.txt", "below/d.jsonl", "image.png", "E.TXT"):
        (tmp_path / name).write_text("text")
    found = [str(path.relative_to(tmp_path)) for path in files.find(str(tmp_path))]
    assert found == ["E.TXT", "b.txt", "below/a.md", "below/d.jsonl"]
