"""A task and its options as one word of the command line: `task:imagenet,data=/images,crop_pct=0.9`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from leansurgeon.errors import UsageError
from leansurgeon.reading import yamlfile

PREFIX = "task:"


def parse_task(word: str, flag: str = "--calibrate") -> tuple[str, dict[str, Any]]:
    """The name and the options of a word that begins with `PREFIX`, the value of `flag`. Raises `UsageError` for what
    is no `key=value`.
    """
    name, *pairs = re.split(r",(?![^\[]*\])", word.removeprefix(PREFIX))  # a list stands in brackets
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{flag} {word}: '{pair}' is no option; write key=value.")
        try:
            options[key] = yamlfile.value(value, key)
        except UsageError:
            options[key] = value  # a glob such as *.txt is no YAML
    return name, options


def spell_task(name: str, options: Mapping[str, Any]) -> str:
    """The word that `parse_task` reads so."""
    pairs = (f"{key}={'null' if value is None else value}" for key, value in options.items())
    return ",".join([f"{PREFIX}{name}", *pairs])
