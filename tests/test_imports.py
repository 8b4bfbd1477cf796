"""Who may import whom (the picture in the guide of developers), and what the light commands must not import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
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


FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def module_of(path: Path) -> str:
    parts = ("leansurgeon", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """What a file imports, also inside of functions: modules of ours by their whole names, packages as they stand."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def allowed_rooms(room: str, path: Path) -> set[str]:
    if room == "models":  # a copy of each file but timm's travels alone
        return {"models"} if path.stem.startswith("timm_") else set()
    if room in GROUND:
        return GROUND[room] | {room}
    below = set(ORDER[ORDER.index(room) :]) | USES_GROUND.get(room, set())
    return below - {b for a, b in NOT_EACH_OTHER if a == room}


def test_imports_point_downwards():
    upwards = {}
    for path in FILES:
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("leansurgeon.")}
        if rooms := rooms - allowed_rooms(room, path) - {"__init__"}:
            upwards[module_of(path)] = rooms
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
    "checkpoints/proof/reload_check.py",
    "checkpoints/proof/prove.py",
    "experiment/side_by_side.py",
}


def test_files_of_others_are_read_in_one_room():
    read = []
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if room_of(path) == "reading" or name in BETWEEN_OURS:
            continue
        calls = [node.func for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)]
        calls = [f for f in calls if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)]
        read += [(name, f"{f.value.id}.{f.attr}") for f in calls if f.attr in READERS.get(f.value.id, ())]
    assert not read


LIGHT = [
    ["--help"],
    ["shrink", "--help"],
    ["recipes", "list"],
    ["report", "--workspace", "nowhere"],
    ["shrink", "bert-cramed"],
    ["shrink", "bert-crammed", "--heads", "24", "--layers", "10", "--dry-run"],
    ["retrain", "--recipe", "digits-vitt"],
    ["run", "digits-vit", "--set", "train.durration=3ep"],
    ["search", "vit-b", "--params", "60M", "--dry-run"],
    ["paper"],
    ["diff", "vit-b", "deit-b"],
    ["plan", "vit-b", "--heads", "16", "--layers", "7"],
    ["bench", "vit-b", "--sweep-heads", "x"],
    ["undo", "no-such-folder/at/all", "-o", "out"],
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


def test_no_circle_ties_files_to_each_other():
    """Every import counts, also one for types alone; the standard library finds the circles."""
    graph = {name: (imports(path) & set(MODULES)) - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


# What a package is called where that is not what is imported of it.
CALLED = {"yaml": "pyyaml", "sklearn": "scikit-learn", "PIL": "pillow", "lm_eval": "lm-eval"}


def test_every_import_is_declared_and_every_declared_package_is_imported():
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    core = {re.match(r"[\w.-]+", line)[0].lower() for line in project["dependencies"]}
    asked = {re.match(r"[\w.-]+", line)[0].lower() for extra in ("lora", "lm-eval") for line in optional[extra]}
    imported = {name.split(".")[0] for path in FILES for name in imports(path)}
    own = {"leansurgeon"}
    foreign = {name for name in imported if name not in sys.stdlib_module_names} - own
    packages = {CALLED.get(name, name).lower() for name in foreign}
    assert sorted(packages - core - asked) == []
    assert sorted(core - packages) == ["vl-convert-python"]  # altair imports it


def test_files_and_modules_that_a_comment_names_are_there():
    """`room/file.py` and `room.module.Name` in backticks; recipe keys and files of results look alike."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    modules = {name.removeprefix("leansurgeon.") for name in MODULES}
    for path in FILES:
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
