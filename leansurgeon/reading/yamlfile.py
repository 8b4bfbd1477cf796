"""YAML as people mean it, with the line of every key: recipes, `--set`, options of tasks. No torch here.

Three things differ from plain YAML 1.1, for recipes: `1e-3` is a number, `no` and `off` are words (a boolean field
still accepts them), and a duplicate key in a mapping is an error instead of the last one winning silently. And one for
safety: with aliases of aliases, a short text can stand for more values than any memory holds, so they are limited.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from leansurgeon.errors import UsageError
from leansurgeon.reading import files

LIMIT = 200_000  # bytes: PyYAML reads some 100 KB per second
DEPTH = 32
DIGITS = 64
VALUES = 20_000  # with aliases expanded
_INTEGER = "tag:yaml.org,2002:int"
# What PyYAML's constructors raise, besides its own errors, for scalars that do not match their tag.
_CONSTRUCTING = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)

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
# Integers are resolved first (their rules come earlier in the lists), so `64` stays an int.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))

Lines = dict[tuple[str, ...], int]


def parse(text: str, where: str) -> tuple[Any, Lines]:
    """Parse a YAML document. Returns its value and the line (from 1) of every key, by its path of keys.

    Raises `UsageError` naming `where`, the line and the problem.
    """
    if len(text) > LIMIT:
        raise UsageError(f"{where} has {len(text):,} characters, more than the {LIMIT:,} that it may have.")
    too_deep = UsageError(f"{where} is nested more than {DEPTH} levels deep.")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = {}
        if node is not None:
            depth, values = _measure(node, {})
            if depth > DEPTH:
                raise too_deep
            if values > VALUES:
                raise UsageError(f"{where} stands for {values:,} values, more than {VALUES:,}: its aliases multiply.")
            _note_lines(node, (), lines, where)
        value = loader.construct_document(node) if node is not None else None
    except RecursionError:
        raise too_deep from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where}{line}: this is not YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: this is not YAML: {str(error).splitlines()[0]}.") from None
    except _CONSTRUCTING as error:
        raise UsageError(f"{where}: a value cannot be read: {error}.") from None
    return value, lines


def value(text: str, where: str) -> Any:
    """Parse one value as in a recipe: `1e-3` a float, `[0.9, 0.98]` a list, `30ep` a word."""
    return parse(text, where)[0]


def read(path: Path) -> tuple[Any, Lines]:
    """Parse a file; read errors become one sentence."""
    return parse(files.read_text(path, LIMIT), str(path))


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the levels and values below a node, with aliases expanded: each node is counted once and its result
    cached.

    Raises `ValueError` for a number or a text that cannot be written again.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = (DEPTH + 1, 1)  # an alias of a mapping inside itself never ends
    if isinstance(node, yaml.ScalarNode):
        if node.tag == _INTEGER and len(node.value) > DIGITS:
            raise ValueError(f"a number of {len(node.value):,} digits")
        if not files.encodable(node.value):
            raise ValueError("half of a surrogate pair, which is not text")
    inside = []
    if isinstance(node, yaml.MappingNode):
        inside = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        inside = node.value
    below = [_measure(part, known) for part in inside]
    known[id(node)] = (1 + max((d for d, _ in below), default=0), 1 + sum(n for _, n in below))
    return known[id(node)]


def _note_lines(node: yaml.Node, path: tuple[str, ...], lines: Lines, where: str) -> None:
    inside = []  # name, node whose line counts, value
    if isinstance(node, yaml.MappingNode):
        inside = [(key.value, key, child) for key, child in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inside = [(index, child, child) for index, child in enumerate(node.value)]
    for name, marked, child in inside:
        here, line = (*path, str(name)), marked.start_mark.line + 1
        if here in lines:
            raise UsageError(f"{where}, line {line}: `{'.'.join(here)}` stands twice (first in line {lines[here]}).")
        lines[here] = line
        _note_lines(child, here, lines, where)
