"""When a command began."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace


def test_a_process_knows_how_long_it_has_been_there():
    code = "import time; time.sleep(0.4); from leansurgeon import clock; clock.mark(); print(clock.age()); "
    code += "print(time.perf_counter() - clock.began())"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole = time.monotonic() - start
    assert all(0.35 < float(line) < whole + 0.05 for line in done.stdout.split())


def test_a_command_begins_with_its_process_or_where_nothing_is_marked_when_it_is_asked(monkeypatch):
    from leansurgeon import clock

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    monkeypatch.setattr(clock, "age", lambda: 7.5)
    monkeypatch.setattr(clock, "_marked", None)
    assert clock.began() == 100.0
    clock.mark()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: 200.0))
    assert clock.began() == 92.5
