"""What the three shells get for a word half typed, by the protocol that their scripts speak."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leansurgeon import architectures
from leansurgeon.architectures.presets import PRESETS
from leansurgeon.cli.main import app
from leansurgeon.training.recipe.shipped import list_shipped

COMPLETE = "_LEANSURGEON_COMPLETE"


def protocol(shell: str, line: str) -> dict[str, str]:
    """What a shell's script puts into the environment when the tab key is pressed at the end of `line`."""
    own = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    return {**own[shell], COMPLETE: f"complete_{shell}"}


def offered(shell: str, line: str, place: Path) -> set[str]:
    with chdir(place):
        done = CliRunner().invoke(app, [], prog_name="leansurgeon", env=protocol(shell, line))
    out = done.stdout
    if shell == "zsh":
        out = out.removeprefix("_arguments '*: :((").removesuffix("))'\n").replace('"', "")
        return {entry.partition(":")[0] for entry in out.splitlines()}
    return {entry.partition("\t")[0] for entry in out.splitlines() if entry}


@pytest.fixture
def place(tmp_path):
    """A folder with a model in it, which the shell itself offers."""
    (tmp_path / "my-model").mkdir()
    return tmp_path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_sources_recipes_and_families_in_three_shells(shell, place):
    assert offered(shell, "leansurgeon shrink ", place) == set(PRESETS)
    assert offered(shell, "leansurgeon run figure2", place) == {"figure2", "figure2-cpu"} & set(list_shipped())
    types = {kind for family in architectures.load_families().values() for kind in family.model_types}
    assert offered(shell, "leansurgeon families gpt", place) == {kind for kind in types if kind.startswith("gpt")}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("leansurgeon shrink my-", set()),  # the shell offers files
        ("leansurgeon diff my-model deit-", {name for name in PRESETS if name.startswith("deit-")}),
        ("leansurgeon retrain --recipe digits", {"digits-vit"}),
        ("leansurgeon recipes show figure5", {"figure5", "figure5-cpu"}),
        ("leansurgeon plan vit-b --gpu a100", {"a100-40", "a100-80"}),
        ("leansurgeon undo vit", set()),  # of a preset nothing can be undone; the shell offers files
        ("leansurgeon sh", {"shrink"}),
    ],
)
def test_words_mean_the_same_in_every_command(line, wanted, place):
    assert offered("bash", line, place) == wanted


def test_the_tab_key_loads_nothing_heavy(place):
    """In a process of its own, as the shell starts it."""
    code = (
        "import sys, os; leave = os._exit\n"
        "def told(code): sys.stderr.write(' '.join(sys.modules)); sys.stderr.flush(); leave(code)\n"
        "os._exit = told; sys.argv[0] = 'leansurgeon'; from leansurgeon.__main__ import run; run()"
    )
    env = {**os.environ, **protocol("bash", "leansurgeon shrink "), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=place, env=env, capture_output=True, text=True)
    assert set(done.stdout.split()) == set(PRESETS)
    assert "leansurgeon.cli.main" in done.stderr.split()
    heavy = {"torch", "transformers", "timm", "pandas", "sklearn"} & set(done.stderr.split())
    assert not heavy
