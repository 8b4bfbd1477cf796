"""Thousands of malformed inputs: one sentence each, an exit code that was expected, bounded time and memory.

What fails is printed with its seed and number: `python -m tests.support.malformed_run --seed S --only N` has it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED = os.environ.get("MALFORMED_SEED", "0")


def given(*arguments: object) -> None:
    command = [sys.executable, "-m", "tests.support.malformed_run", "--seed", SEED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    print(done.stdout)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def test_two_hundred_malformed_inputs():
    given("--cases", 200)


@pytest.mark.slow
def test_twenty_thousand_malformed_inputs():
    given("--cases", 20_000)
