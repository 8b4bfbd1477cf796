"""A process that leaves at once has done all that one does which ends by itself."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, concurrent.futures, sys, tempfile, threading, time
from leansurgeon.ending import leave

folder = tempfile.TemporaryDirectory()
with open(sys.argv[1], "w") as file:
    file.write(folder.name)
concurrent.futures.ThreadPoolExecutor().submit(lambda: time.sleep(0.2) or print("pool"))
threading.Thread(target=lambda: time.sleep(0.4) or print("thread")).start()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
atexit.register(print, "handler")
print("work")
leave(int(sys.argv[2]))
"""


BUFFERED = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("code", [0, 75])
def test_threads_are_waited_for_handlers_run_and_everything_is_written(code, tmp_path):
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "folder"), str(code)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=BUFFERED)
    assert done.returncode == code and done.stderr == ""
    assert done.stdout.split() == ["work", "pool", "thread", "handler"]
    assert not os.path.exists((tmp_path / "folder").read_text())


def test_a_closed_pipe_at_the_end_is_no_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "folder"), "3"]
    done = subprocess.run(run, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, env=BUFFERED)
    os.close(write)
    assert done.returncode == 3 and done.stderr == ""
