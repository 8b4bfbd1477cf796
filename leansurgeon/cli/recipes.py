"""`leansurgeon recipes list | show | copy | schema`: the shipped recipes."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated

import typer

from leansurgeon.cli import completion
from leansurgeon.errors import UsageError
from leansurgeon.reading.files import in_home

recipes = typer.Typer(
    help="The recipes that come with leansurgeon: list them, show one, copy one to change it; their schema.",
    no_args_is_help=True,
)


@recipes.command("list", epilog="Example: leansurgeon recipes list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """List task, length and hardware of every shipped recipe: first those for a CPU, then those for a GPU."""
    from leansurgeon.training.recipe import reading

    rows = []
    for name, path in reading.list_shipped().items():
        recipe = reading.load(name)
        experiment = recipe.kind == "experiment"
        # The beginning of its comment on hardware: `2 CPU cores`, `8 A100`.
        match = re.search(r"^# Hardware +(.*)$", reading.text_of(path), re.MULTILINE)
        rows.append(
            {
                "name": name,
                "kind": recipe.kind,
                "source": recipe.source if experiment else "",
                "task": recipe.task.name,
                "duration": recipe.train.duration,
                "hardware": re.split(r" \(|[,.;:]| with ", match[1])[0] if match else "",
                "arms": ", ".join(recipe.arms) if experiment else "",
            }
        )
    if as_json:
        print(json.dumps({"schema_version": 1, "recipes": rows}))
        return
    from tabulate import tabulate

    # Without source, kind and arms, which would make the table wider than a terminal.
    rows.sort(key=lambda row: "CPU" not in row["hardware"])
    table = [{key: row[key] for key in ("name", "task", "duration", "hardware")} for row in rows]
    print(tabulate(table, headers="keys", disable_numparse=True))


@recipes.command(epilog="Example: leansurgeon recipes show digits-vit")
def show(
    name: Annotated[
        str, typer.Argument(autocompletion=completion.recipes, help="A name from `recipes list`, or a file.")
    ],
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Merged with its base and every default: one complete recipe.")
    ] = False,
) -> None:
    """Print a recipe with its comments: expected result, hardware, where each number comes from."""
    from leansurgeon.training.recipe import reading

    base = name in reading.bases() and not resolved  # a base alone is not a complete recipe
    recipe = None if base else reading.load(name)
    text = reading.dump(recipe) if resolved else reading.text_of(reading.find(name))
    sys.stdout.write(text)


@recipes.command(epilog="Example: leansurgeon recipes copy digits-vit my-recipe.yaml")
def copy(
    name: Annotated[str, typer.Argument(autocompletion=completion.recipes, help="A name from `recipes list`.")],
    to: Annotated[
        str | None, typer.Argument(help="File or folder (made if it ends in /) to write; default: NAME.yaml here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a recipe here, to change it and use it by its path."""
    from leansurgeon.training.recipe import reading
    from leansurgeon.training.runs import folder as runfolder

    source = reading.find(name)
    target = in_home(to or source.name)
    # A Path drops the slash that marks a folder.
    target = target / source.name if target.is_dir() or (to or "").endswith("/") else target
    if target.exists() and not force:
        raise UsageError(f"{target} exists already.", "Name another file, or use --force.")
    if (to or "").endswith("/"):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"The folder {to} cannot be made: {error.strerror}.") from None
    if not target.parent.is_dir():
        raise UsageError(f"There is no folder {target.parent} to copy to.")
    runfolder.write_text(target, reading.copy_text(reading.text_of(source), target))
    print(target)


@recipes.command(epilog="Example: leansurgeon recipes schema")
def schema() -> None:
    """Print the JSON schema of recipe files, which editors use to check and complete them."""
    from leansurgeon.training.recipe.reading import json_schema

    print(json.dumps(json_schema(), indent=2))
