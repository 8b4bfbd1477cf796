"""Who may import whom (the picture in the guide of developers), and what the light commands must not import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "leansurgeon"
# Each room may import itself and every room that stands after it.
ORDER = [
    "cli",
    "commands",
    "search",
    "experiment",
    "report",
    "paper",
    "training",
    "surgery",
    "measure",
    "checkpoints",
    "architectures",
    "shape",
    "reading",
    "request",
    "intervals",
    "errors",
    "progress",
    "words",
    "ending",
    "hooks",
    "rank",
    "streams",
    "version",
    "clock",
]
GROUND = {"models": set(), "tasks": {"errors", "reading", "version", "progress"}}
USES_GROUND = {
    "measure": {"tasks"},
    "training": {"tasks"},
    "experiment": {"tasks"},
    "search": {"tasks"},
    "commands": {"tasks"},
    "api": {"tasks"},
    "cli": {"tasks"},
    "checkpoints": {"models"},
    "architectures": {"models"},
}
NOT_EACH_OTHER = {("training", "surgery"), ("report", "experiment"), ("paper", "training")}


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "leansurgeon" else [f"leansurgeon.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        rooms |= {n.split(".")[1] for n in names if n.startswith("leansurgeon.")}
    return {r for r in rooms if (PACKAGE / r).is_dir() or (PACKAGE / f"{r}.py").exists()}


def test_imports_point_downwards():
    upwards = {}
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        if room in GROUND:
            allowed = GROUND[room] | {room}
        else:
            allowed = set(ORDER[ORDER.index(room) :]) | USES_GROUND.get(room, set())
            allowed -= {b for a, b in NOT_EACH_OTHER if a == room}
        if room == "models":
            allowed = {"models"} if path.stem.startswith("timm_") else set()  # a copy of each other file travels alone
        if room == "cli":
            allowed |= {"tasks"}
        if rooms := imported_rooms(path) - allowed:
            upwards[str(path.relative_to(PACKAGE))] = rooms
    assert not upwards


# Files of others are read in the room `reading` alone. What is left are words between processes of ours, and the
# account of a program that stands by itself.
READERS = {"json": ("load", "loads"), "yaml": ("load", "safe_load"), "torch": ("load",), "pickle": ("load", "loads")}
READERS |= {"Image": ("open",), "tarfile": ("open",), "gzip": ("open",), "zipfile": ("ZipFile",)}
READERS |= {"parquet": ("ParquetFile", "read_schema", "read_table")}
BETWEEN_OURS = {
    "training/processes/worker.py",
    "training/processes/launch.py",
    "training/together.py",
    "tasks/long_range/makers.py",
    "checkpoints/proof/reload_check.py",
    "checkpoints/proof/prove.py",
    "experiment/side_by_side.py",
}


def test_files_of_others_are_read_in_one_room():
    read = []
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if room_of(path) == "reading" or name in BETWEEN_OURS:
            continue
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        calls = [f for f in calls if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)]
        read += [(name, f"{f.value.id}.{f.attr}") for f in calls if f.attr in READERS.get(f.value.id, ())]
    assert not read


LIGHT = [
    ["--help"],
    ["shrink", "--help"],
    ["recipes", "list"],
    ["report", "--workspace", "nowhere"],
    ["shrink", "bert-crammed", "--heads", "0"],
    ["shrink", "bert-cramed"],
    ["shrink", "bert-crammed", "--heads", "24", "--layers", "10", "--dry-run"],
    ["shrink", "lra/listops", "--heads", "4", "--layers", "1", "--dry-run"],
    ["shrink", "digits-vit", "--layers", "99"],
    ["retrain", "--recipe", "digits-vitt"],
    ["run", "digits-vit", "--set", "train.durration=3ep"],
    ["search", "vit-b", "--params", "60M", "--dry-run"],
    ["search", "digits-vit", "--params", "1k"],
    ["paper", "--count", "formula"],
    ["paper", "--table", "6"],
    ["inspect", "lra/listops"],
    ["diff", "vit-b", "deit-b"],
    ["plan", "vit-b", "--heads", "16", "--layers", "7"],
    ["plan", "vit-b", "--gpu", "h1000"],
    ["bench", "vit-b", "--sweep-heads", "x"],
    ["undo", "no-such-folder/at/all", "-o", "out"],
    ["inspect", "no-such-presett"],
    ["no-such-command"],
]


EACH = """
import json, os, sys
from leansurgeon.cli.main import main
for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv[1:] = arguments
        try: main()
        except SystemExit: pass
        heavy = {"torch", "transformers", "timm", "accelerate", "sklearn", "datasets"} & set(sys.modules)
        sys.stdout.flush(); sys.stderr.flush()
        os._exit(bool(heavy))
    if os.waitpid(child, 0)[1]:
        sys.exit(" ".join(arguments))
"""


def test_light_commands_do_not_import_torch(tmp_path):
    """Each in a fork of one process, which has imported what all of them do."""
    run = [sys.executable, "-c", EACH, json.dumps(LIGHT)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert "Traceback" not in done.stderr


def module_of(path: Path) -> str:
    parts = ("leansurgeon", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_circle_ties_files_to_each_other():
    """Every import counts, also one inside a function or for types alone; the standard library finds the circles."""
    from graphlib import CycleError, TopologicalSorter

    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in modules else node.module)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = (found & set(modules)) - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_most_types_are_named_and_most_of_what_is_public_is_explained():
    functions = [f for path in PACKAGE.rglob("*.py") for f in functions_of(path)]
    returns = [ast.unparse(f.returns) for f in functions if f.returns]
    assert sum(r.startswith(("dict", "Dict")) for r in returns) < 0.04 * len(functions)
    given = [a for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    types = [a.annotation and ast.unparse(a.annotation) for a in given if a.arg not in ("self", "cls")]
    assert sum(t in ("Any", "object") for t in types) < 0.015 * len(types)
    public = [f for f in functions if not f.name.startswith("_")]
    assert sum(bool(ast.get_docstring(f)) for f in public) >= 0.85 * len(public)


# What a package is called where that is not what is imported of it.
CALLED = {"yaml": "pyyaml", "sklearn": "scikit-learn", "PIL": "pillow"}
CALLED |= {"lm_eval": "lm-eval"}


def test_every_import_is_declared_and_every_declared_package_is_imported():
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    core = {re.match(r"[\w.-]+", line)[0].lower() for line in project["dependencies"]}
    asked = {re.match(r"[\w.-]+", line)[0].lower() for extra in ("lora", "lm-eval") for line in optional[extra]}
    imported: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                imported.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
    own = {"leansurgeon", "trackio"}  # a tracker that the user names in the recipe is the user's to install
    foreign = {name for name in imported if name not in sys.stdlib_module_names} - own
    packages = {CALLED.get(name, name).lower() for name in foreign}
    assert sorted(packages - core - asked) == []
    assert sorted(core - packages) == ["vl-convert-python"]  # altair imports it


def test_files_and_modules_that_a_comment_names_are_there():
    """`room/file.py` and `room.module.Name` in backticks; recipe keys and files of results look alike."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"`([\w./-]+)`", path.read_text()):
            room = re.split(r"[./]", name)[0]
            others = ("architectures/attention.py", "surgery.json")
            if room not in rooms or name.startswith(others):
                continue
            if name.endswith(".py"):
                assert (PACKAGE / name).is_file(), f"{path}: {name}"
            elif "." in name:
                whole = any(module == name or module.startswith(f"{name}.") for module in modules)
                assert whole or name.rpartition(".")[0] in modules, f"{path}: {name}"
