"""The examples at the end of the help pages, carried out in one folder as somebody would type them."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.cli.answers import read, typed, works
from tests.cli.test_help import EXAMPLES
from tests.support.models import strangers
from tests.test_documents import GUIDE, commands

# What cannot run here (tasks that a harness fetches, minutes for every type), or does in tests/experiment and search.
ELSEWHERE = ("--lm-eval", "families", "leansurgeon run", "leansurgeon search")
# `my-model` is tiny here, and time is short: what these words are exchanged for, or what stands behind the example.
SHORTER = {
    "--layers 24": "--layers 3",
    "--time 20m": "--set train.duration=2st",
    "vit-b --heads 16 --layers 7 --gpu a100-40": "digits-vit --heads 8",
}
BEHIND = {
    "retrain runs/digits-vit": "--set train.duration=2st",
    "bench": "--batch 2 --rounds 2",
    "heads": "--samples 8 --judge-samples 8 --no-curve",
    "kappa": "--samples 2 --probes 0",
}
FIRST = ["shrink", "retrain", "report"]  # what others look at


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `my-model` and `texts`, and what examples take for granted."""
    place = tmp_path_factory.mktemp("place")
    strangers.model(place / "my-model", "llama", num_hidden_layers=5)
    strangers.texts(place / "texts")
    works("shrink my-model --heads 8 --uncalibrated --no-proof -o runs/wide", cwd=place)
    return place


def shortened(line: str) -> str:
    """An example as it is typed here."""
    words = line.removeprefix("leansurgeon ")
    more = next((more for start, more in BEHIND.items() if words.startswith(start)), "")
    for long, short in SHORTER.items():
        words = words.replace(long, short)
    return f"{words} {more}"


def test_examples_run_as_they_are_typed(place):
    """In one go, since each builds on those before it."""
    ordered = sorted(EXAMPLES, key=lambda path: FIRST.index(path[0]) if path[0] in FIRST else len(FIRST))
    lines = [line for path in ordered for line in EXAMPLES[path] if not re.search("|".join(ELSEWHERE), line)]
    assert len(lines) >= 18
    for line in lines:
        done = typed(shortened(line), cwd=place)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout.strip(), line
    assert (place / "report.html").is_file() and (place / "back" / "config.json").is_file()
    assert read(place / "runs/lean/config.json")["num_hidden_layers"] == 3
    assert (place / "my-recipe.yaml").is_file() and (place / "runs/pruned/surgery.json").is_file()


# Lines of the pages that cost little here; what they cut is there by then.
CHEAP = ("plan ", "paper", "recipes list", "shrink digits-vit", "shrink my-model --layers 3", "diff", "undo", "kappa")
CUTS = ("--heads 8 --layers 4 -o runs/my-model-h8-l4", "--heads 16 -o runs/my-model-h24")


def test_lines_of_the_pages_run_as_they_are_typed(place):
    lines = {shlex.join(words): words for page in GUIDE for words in commands(page)}
    lines = {line: words for line, words in lines.items() if line.startswith(CHEAP) and "my-clip" not in line}
    assert {words[0] for words in lines.values()} >= {"plan", "paper", "recipes", "shrink", "diff", "undo", "kappa"}
    for cut in CUTS:
        works(f"shrink my-model {cut} --uncalibrated --no-proof --force", cwd=place)
    for line in lines:
        again = "--force" if line.startswith(("shrink", "undo")) else ""
        done = typed(f"{shortened(line)} {again}", cwd=place)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout.strip(), line
