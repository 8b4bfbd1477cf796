"""Malformed files from a seed: what damage, accident and malice make of documents, weights, tables and folders.

Every function takes a `random.Random` and something whole, and gives or leaves something that is not. Case `number`
of a run with `seed` draws from `Random(f"{seed}:{number}")` alone, so it can be had again by itself.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from leansurgeon.checkpoints.config import KINDS

LONG = "x" * 5000
DEEP = 3000
NUMBERS = [0, -1, 1, 2, 7, 10**9, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e308, -0.0, 3.0, float("nan"), float("inf")]
WORDS = [
    "",
    " ",
    "x",
    LONG,
    "../../etc/passwd",
    "a/b",
    "\0",
    "\x1b[31m",
    "é\u2028",
    "1e9",
    "-1",
    "true",
    "null",
    "None",
]
WORDS += ["NaN", "{}", "%s", "{x}", "leansurgeon_bert", "hub:a/b", "=1+1", "<script>", "auto", "/dev/zero"]
TAGS = ["timestamp 9", "float x", "int ''", "bool q", "binary x", "set {a}"]
# Keys that a library reads where it finds them, although most files have none of them.
HIDDEN = [*KINDS, "rope_type", "no_rope_layers", "bias", "quantization_config", "text_config", "summary_type"]
HIDDEN += ["attn_implementation", "_attn_implementation", "name_or_path", "transformers_version"]
HIDDEN += ["chunk_size_feed_forward", "gradient_checkpointing"]


def junk(rng: Random, depth: int = 0) -> Any:
    """A JSON value that nobody asked for."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(WORDS)
    if kind == 4:
        return rng.choice([None, True, False])
    if kind == 5:
        return [junk(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 3, 50]))]
    if kind == 6:
        return {rng.choice(WORDS): junk(rng, depth + 1) for _ in range(rng.choice([0, 1, 2]))}
    return nested(rng.choice([40, 100, DEEP]), rng.random() < 0.5) if depth == 0 else []


def nested(levels: int, lists: bool) -> Any:
    found: Any = 1
    for _ in range(min(levels, 90)):  # what PyYAML can write
        found = [found] if lists else {"a": found}
    return found


# -- documents -------------------------------------------------------------------------------------


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """The paths of all values inside a document, short ones first in each branch."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*at, key))
    return found


def mutated(rng: Random, document: Any, hidden: list[str] | None = None) -> tuple[Any, str]:
    """A document with one to three values that are missing, of another kind, or too many; and what was done."""
    document, done = copy.deepcopy(document), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        paths = places(document)
        if hidden and rng.random() < 0.4 and isinstance(document, dict):
            key, value = rng.choice(hidden), rng.choice(NUMBERS) if rng.random() < 0.5 else junk(rng)
            document[key] = value
            done.append(f"{key} = {short(value)}")
            continue
        if not paths:
            document = junk(rng)
            done.append(f"all = {short(document)}")
            continue
        # Values near the top decide more.
        path = min(rng.choices(paths, k=2), key=len)
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        action = rng.randrange(5)
        if action == 0:
            del holder[path[-1]]
            done.append(f"no {path}")
        elif action == 1 and isinstance(holder[path[-1]], int | float):
            holder[path[-1]] = near(rng, holder[path[-1]])
            done.append(f"{path} = {short(holder[path[-1]])}")
        else:
            holder[path[-1]] = junk(rng)
            done.append(f"{path} = {short(holder[path[-1]])}")
    return document, "; ".join(done)


def near(rng: Random, number: float) -> Any:
    """A number that is almost right."""
    return rng.choice(
        [number + 1, number - 1, -number, number * 2, number * 10**9, float(number), str(number), [number]]
    )


def short(value: Any) -> str:
    said = repr(value)
    return said if len(said) < 60 else f"{said[:40]}...{said[-15:]}"


def spelled(rng: Random, document: Any) -> tuple[bytes, str]:
    """A document as text that is no JSON, or JSON that says something twice, too deep or in another encoding."""
    text = json.dumps(document)
    ways: list[tuple[str, Callable[[], bytes]]] = [
        ("nothing", lambda: b""),
        ("cut off", lambda: text[: rng.randrange(len(text))].encode()),
        ("UTF-16", lambda: text.encode("utf-16")),
        ("a byte order mark", lambda: b"\xef\xbb\xbf" + text.encode()),
        ("not UTF-8", lambda: text.encode().replace(b"e", b"\xe9", 1)),
        ("bytes", lambda: rng.randbytes(rng.choice([1, 8, 1000]))),
        ("NUL", lambda: text.encode().replace(b"a", b"\0", 1)),
        ("a key twice", lambda: text.encode().replace(b"{", b'{"model_type": 5, "model_type": "bert", ', 1)),
        ("deep lists", lambda: b"[" * rng.choice([100, DEEP, 200_000])),
        ("deep objects", lambda: b'{"a":' * rng.choice([100, DEEP, 50_000]) + b"1" + b"}" * 100),
        ("many digits", lambda: text.encode().replace(b"1", b"1" * rng.choice([70, 5000, 100_000]), 1)),
        ("large", lambda: b'{"a": [' + b"[]," * 200_000 + b"[]]}"),
        ("another document", lambda: json.dumps(junk(rng)).encode()),
        ("one byte", lambda: flipped(rng, text.encode())),
        ("words of JavaScript", lambda: text.encode().replace(b": 1", b": -Infinity", 1).replace(b"0.0", b"NaN")),
        ("rubbish behind it", lambda: text.encode() + b"}{"),
    ]
    what, make = rng.choice(ways)
    return make(), what


def flipped(rng: Random, content: bytes, times: int = 1) -> bytes:
    """Some bytes of the content changed."""
    found = bytearray(content)
    for _ in range(times if found else 0):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def damage_json(rng: Random, path: Path, hidden: list[str] | None = None) -> str:
    """Damage a JSON file in its values or in its text; returns what was done."""
    document = json.loads(path.read_text())
    if rng.random() < 0.75:
        document, what = mutated(rng, document, hidden)
        path.write_text(json.dumps(document))
    else:
        content, what = spelled(rng, document)
        path.write_bytes(content)
    return f"{path.name}: {what}"


def damage_lines(rng: Random, path: Path) -> str:
    """Damage some lines of a file of JSON objects."""
    lines = path.read_text().splitlines()
    told = []
    for _ in range(rng.choice([1, 2, 5])):
        at = rng.randrange(len(lines))
        if rng.random() < 0.6 and lines[at].startswith("{"):
            try:
                document, what = mutated(rng, json.loads(lines[at]))
                lines[at] = json.dumps(document)
            except (ValueError, RecursionError):  # an earlier turn has damaged this line
                continue
        else:
            content, what = spelled(rng, {"step": 1, "loss": 2.0})
            lines[at] = content.decode("latin-1")
        told.append(f"line {at + 1}: {what}")
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    return f"{path.name}: {'; '.join(told)}"


# -- weights ---------------------------------------------------------------------------------------


def damage_safetensors(rng: Random, path: Path) -> str:
    """Damage the header of a safetensors file, its length, or its data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    way = rng.randrange(9)
    if way < 4:
        header, what = mutated(rng, header)
        encoded = json.dumps(header).encode()
        content = struct.pack("<Q", len(encoded)) + encoded + data
    elif way == 4:
        encoded, what = spelled(rng, header)
        content = struct.pack("<Q", len(encoded)) + encoded + data
    elif way == 5:
        number = rng.choice([0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1, len(content) - 8])
        what, content = f"length {number}", struct.pack("<Q", number) + content[8:]
    elif way == 6:
        extra = rng.choice([1, 8, 4096])
        what, content = f"{extra} bytes behind it", content + bytes(extra)
    elif way == 7:
        what, content = "cut off", content[: rng.randrange(len(content))]
    else:
        what, content = "bytes of data", content[: 8 + length] + flipped(rng, data, 200)
    path.write_bytes(content)
    return f"{path.name}: {what}"


def damage_pickle(rng: Random, path: Path) -> str:
    """Another object in the place of a pickle's tensors, or damaged bytes."""
    import torch

    one = torch.ones(2)
    things: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "a list": lambda: [one],
        "whole numbers": lambda: {0: one, 1: one},
        "no tensors": lambda: {"a": 1, "b": "x"},
        "nested": lambda: {"state_dict": {"model": {"a": one}}},
        "state_dict is None": lambda: {"state_dict": None, "a": one},
        "names of NUL": lambda: {"a\0": one, "": one, LONG: one},
    }
    if rng.random() < 0.5:
        what = rng.choice(list(things))
        torch.save(things[what](), path)
        return f"{path.name}: {what}"
    content = path.read_bytes()
    cut = content[: rng.randrange(len(content))] if rng.random() < 0.3 else content
    path.write_bytes(flipped(rng, cut, rng.choice([1, 20])))
    return f"{path.name}: bytes"


# -- folders ---------------------------------------------------------------------------------------


def replace_by_other(rng: Random, path: Path) -> str:
    """Something that is no regular file in the place of one."""
    kind = rng.choice(["folder", "pipe", "loop", "dangling", "zeros", "full", "empty", "endless", "parent", "gone"])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind == "endless":
        with path.open("wb") as out:
            out.truncate(10**13)  # no block of it is on the disk
    elif kind != "gone":
        target = {"loop": path.name, "dangling": "nowhere", "zeros": "/dev/zero", "full": "/dev/full", "parent": "."}
        path.symlink_to(target[kind])
    return f"{path.name}: {kind}"


# -- text, tables, images, YAML --------------------------------------------------------------------


def damage_bytes(rng: Random, path: Path) -> str:
    """Damage any file: bytes, length, encoding."""
    content = path.read_bytes()
    ways: dict[str, Callable[[], bytes]] = {
        "bytes": lambda: flipped(rng, content, rng.choice([1, 10, 100])),
        "cut off": lambda: content[: rng.randrange(len(content) + 1)],
        "nothing": lambda: b"",
        "UTF-16": lambda: content.decode("latin-1").encode("utf-16"),
        "NUL": lambda: content.replace(b" ", b"\0").replace(b",", b"\0", 1),
        "twice": lambda: content + content,
        "quotes": lambda: content.replace(b",", b'"', 3),
        "a long line": lambda: content + b"y" * 3_000_000,
        "noise": lambda: rng.randbytes(2000),
        "zeros": lambda: bytes(100_000),
        "other line ends": lambda: content.replace(b"\n", b"\r"),
        "a pickle": lambda: b"\x80\x04\x95\x0a\0\0\0\0\0\0\0}\x94\x8c\x01a\x94K\x01s.",
    }
    what = rng.choice(list(ways))
    path.write_bytes(ways[what]())
    return f"{path.name}: {what}"


def yaml_text(rng: Random, document: Any) -> tuple[str | bytes, str]:
    """A recipe as text that is no YAML, or stands for too much."""
    import yaml

    if rng.random() < 0.7:
        document, what = mutated(rng, document)
        return yaml.safe_dump(document, allow_unicode=False), what
    text = yaml.safe_dump(document)
    levels = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True))
    ways: dict[str, str | bytes] = {
        "aliases of aliases": "a: &a [1, 2]\n" + levels,
        "an alias of itself": "name: &a [*a]\n" + text,
        "deep": "train: " + "[" * rng.choice([50, 2000, 100_000]),
        "deep blocks": "- " * 1000 + "1",
        "many digits": text.replace("1", "1" * 5000, 1),
        "hexadecimal": "version: 0x" + "f" * 5000,
        "a tag": f"name: !!python/object/apply:os.system [ls]\n{text}",
        "strange tags": f"x: !!{rng.choice(TAGS)}\n{text}",
        "UTF-16": text.encode("utf-16"),
        "latin": "name: é".encode("latin-1"),
        "two documents": f"{text}\n---\n{text}",
        "control characters": "name: a\x01b",
        "half a pair": 'name: "\\ud800"',
        "large": "a: [" + "1, " * 60_000 + "1]",
        "a base of itself": "base: recipe.yaml\n",
        "a base elsewhere": f"base: {rng.choice(['/dev/zero', '../..', LONG, '.', '[a]', '/etc/passwd'])}\n",
        "tabs": "train:\n\tduration: 3ep",
        "noise": rng.randbytes(300),
    }
    what = rng.choice(list(ways))
    return ways[what], what
