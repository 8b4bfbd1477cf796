"""The README and the guide: short enough to scan, links that lead somewhere, commands that the command line takes."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "examples").rglob("*.md"))]
GUIDE = [page for page in PAGES if page.parent.name in (ROOT.name, "guide")]


def commands(page: Path) -> list[list[str]]:
    """The words of every `leansurgeon ...` in a bash block of a page, without comments."""
    text = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.S))
    lines = re.findall(r"leansurgeon [a-z].*", text)
    return [shlex.split(line, comments=True)[1:] for line in lines]


ALL = [pytest.param(words, id=" ".join(words)) for page in GUIDE for words in commands(page)]


def test_the_readme_can_be_scanned():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 160
    assert any("GPU" in line for line in lines[:30]), "limits belong on the first screen"


def test_ci_calls_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert "pip install -e . && leansurgeon run digits-vit\n" in readme
    assert re.search(r"^pip install -e '\.\[test\]' && pytest", readme, flags=re.M)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"


def test_the_guide_for_developers_names_what_there_is():
    files = [*(ROOT / "leansurgeon").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    named = re.findall(r"`([\w/.]+)`", (ROOT / "examples" / "guide" / "developing.md").read_text())
    for name in named:
        if name.endswith(".py"):
            assert "NAME" in name or any(f"/{file}".endswith(f"/{name}") for file in files), name
        else:
            assert words.issuperset(re.findall(r"\w+", name)), name


@pytest.mark.parametrize("words", ALL)
def test_the_command_line_takes_every_command_of_the_documents(words):
    """Parsed as if typed, and not carried out: unknown options, missing arguments, wrong types and values that a
    request refuses are errors.
    """
    from typer.main import get_command

    from leansurgeon.cli.main import app
    from leansurgeon.request import Names, check_request

    command = get_command(app)
    with command.make_context("leansurgeon", list(words)) as context:
        while hasattr(command, "resolve_command"):
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            context = command.make_context(name, rest, parent=context)
    if words[0] == "recipes":
        return
    given = {name: value for name, value in context.params.items() if value not in (None, [], ()) and name != "as_json"}
    given |= {name: Names(value) for name, value in given.items() if isinstance(value, list)}
    kind = import_module(f"leansurgeon.commands.{words[0]}").COMMAND.request
    request = check_request(kind, given)
    for part in ("wanted", "how"):  # a shape and a method
        if hasattr(request, part):
            getattr(request, part).check(*([True] if part == "how" else []))


def test_enough_commands_are_documented():
    named = {words[0] for page in GUIDE for words in commands(page)}
    assert len(ALL) >= 25
    assert named >= set(
        ["shrink", "retrain", "report", "run", "kappa", "heads", "plan", "search", "inspect", "diff", "undo"]
    )
