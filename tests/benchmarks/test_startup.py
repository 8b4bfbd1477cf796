"""How long the light commands take to answer, against the least that a Typer program costs on this machine.

Run: pytest tests/benchmarks/test_startup.py -m benchmark --override-ini addopts= -s
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import pytest

LIGHT = {
    "--help": ["--help"],
    "recipes list": ["recipes", "list"],
    "usage error": ["shrink", "bert-crammed", "--heads", "7"],
    "dry run": ["shrink", "bert-crammed", "--heads", "24", "--layers", "10", "--dry-run"],
    "paper": ["paper"],
    "report": ["report", "--workspace", "nowhere"],
}
FLOOR = [sys.executable, "-c", "import typer, typer.rich_utils, pydantic, yaml"]
ROUNDS = 7


def seconds(command: list[str], cwd) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=cwd, capture_output=True)
    return time.perf_counter() - start


@pytest.mark.benchmark
def test_light_commands_answer_at_once(tmp_path):
    times: dict[str, list[float]] = {"floor": [], **{name: [] for name in LIGHT}}
    for _ in range(ROUNDS):  # interleaved, so that a slow moment of the machine meets all alike
        times["floor"].append(seconds(FLOOR, tmp_path))
        for name, arguments in LIGHT.items():
            times[name].append(seconds([sys.executable, "-m", "leansurgeon", *arguments], tmp_path))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:>14}  {1000 * value:6.0f} ms  {value / medians['floor']:4.2f} x floor")
    assert all(value <= 3 * medians["floor"] for value in medians.values())
