"""YAML as people mean it, with the line of every key. No torch here.

Three things that plain YAML 1.1 gets wrong for recipes: `1e-3` is a number, `no` and `off` are words (a boolean field
still understands them), and a key that stands twice in a mapping is an error instead of a silent last one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from leansurgeon.errors import UsageError

_FLOAT = re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the number and boolean rules of YAML 1.2."""


_TAGS_OF_OURS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in _TAGS_OF_OURS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
# Integers are resolved first (their rules stand earlier in the lists), so `64` stays an int.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))

Lines = dict[tuple[str, ...], int]


def parse(text: str, where: str) -> tuple[Any, Lines]:
    """The value of a YAML document and the line (from 1) of every key, by its path of keys.

    Raises `UsageError` naming `where`, the line and the problem.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: Lines = {}
        if node is not None:
            _note_lines(node, (), lines, where)
        return (loader.construct_document(node) if node is not None else None), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where}{line}: this is not YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: this is not YAML: {str(error).splitlines()[0]}.") from None
    finally:
        loader.dispose()


def value(text: str, where: str) -> Any:
    """One value as a recipe would read it: `1e-3` a float, `[0.9, 0.98]` a list, `30ep` a word."""
    return parse(text, where)[0]


def read(path: Path) -> tuple[Any, Lines]:
    """`parse` of a file; an unreadable file is a `UsageError` in one sentence."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"There is no recipe file {path}.", "`leansurgeon recipes list` shows the shipped ones."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"The recipe {path} cannot be read: {reason}.") from None
    return parse(text, str(path))


def _note_lines(node: yaml.Node, path: tuple[str, ...], lines: Lines, where: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            here = (*path, str(key.value))
            line = key.start_mark.line + 1
            if here in lines:
                name = ".".join(here)
                raise UsageError(f"{where}, line {line}: `{name}` stands twice (first in line {lines[here]}).")
            lines[here] = line
            _note_lines(child, here, lines, where)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            here = (*path, str(index))
            lines[here] = child.start_mark.line + 1
            _note_lines(child, here, lines, where)
