"""When a command began."""

from __future__ import annotations

import subprocess
import sys
import time


def test_a_process_knows_how_long_it_has_been_there():
    code = "import time; time.sleep(0.4); from leansurgeon import clock; clock.mark(); print(clock.age()); "
    code += "print(time.perf_counter() - clock.began())"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole = time.monotonic() - start
    assert all(0.35 < float(line) < whole + 0.05 for line in done.stdout.split())


def test_where_nothing_is_marked_a_command_begins_when_it_is_asked():
    from leansurgeon import clock

    assert abs(clock.began() - time.perf_counter()) < 0.1
