"""Help pages: everything in its panel, 80 columns, nothing that only a library's author understands."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from leansurgeon.cli.main import app
from leansurgeon.request import PANELS


def every_command(group, path=()):
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(every_command(get_command(app)))


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_page_shows_every_option_in_80_columns_and_ends_with_an_example(path):
    text = shown(*path)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"<(int|float)>|9223372036854775807|<=x", text)
    for param in COMMANDS[path].params:
        if getattr(param, "hidden", False):
            continue
        for spelling in param.opts:
            assert spelling.startswith("-") is False or spelling in text
    places = [text.index(f"─ {title} ─") for title in PANELS if f"─ {title} ─" in text]
    assert places == sorted(places)
    assert "leansurgeon " + " ".join(path) in text.rpartition("Example")[2]


@pytest.mark.parametrize("name", ["shrink", "search", "heads", "retrain"])
def test_a_page_shows_few_options(name):
    """What it does not show is taken all the same: a refusal asks for it, or measurements need it."""
    known = [param for param in COMMANDS[(name,)].params if param.opts[0].startswith("--")]
    assert sum(not param.hidden for param in known) <= 24
    text = shown(name)
    for param in known:
        assert (param.opts[-1] in text) is not param.hidden, param.opts


EXAMPLES = {path: re.findall(r"leansurgeon .*", command.epilog) for path, command in COMMANDS.items()}


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_are_taken_by_the_command_line(line):
    words = shlex.split(line)[1:]
    command, path = get_command(app), []
    while hasattr(command, "commands"):
        path.append(words.pop(0))
        command = command.get_command(None, path[-1])
    assert command.make_context(" ".join(path), words)


def test_the_overview_has_what_people_need_first():
    text = shown()
    order = ["shrink", "retrain", "report", "run", "kappa", "paper"]
    places = [re.search(rf"│ {name} ", text).start() for name in order]
    assert places == sorted(places)
