"""A process that leaves at once has done all that one does which ends by itself."""

import os
import subprocess
import sys

import pytest

SCRIPT = r"""
import atexit, concurrent.futures, sys, tempfile, threading, time
from leansurgeon.ending import leave

folder = tempfile.TemporaryDirectory()
with open(sys.argv[1], "w") as file:
    file.write(folder.name)
concurrent.futures.ThreadPoolExecutor().submit(lambda: time.sleep(0.2) or sys.stdout.write("pool\n"))
threading.Thread(target=lambda: time.sleep(0.4) or sys.stdout.write("thread\n")).start()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
atexit.register(sys.stdout.write, "handler\n")
print("work")
leave(int(sys.argv[2]))
"""


BUFFERED = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("code", [0, 75])
def test_threads_are_waited_for_handlers_run_and_everything_is_written(code, tmp_path):
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "folder"), str(code)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=BUFFERED)
    assert done.returncode == code and done.stderr == ""
    said = done.stdout.split()
    assert sorted(said[:-1]) == ["pool", "thread", "work"] and said[-1] == "handler"
    assert not os.path.exists((tmp_path / "folder").read_text())


def test_a_closed_pipe_at_the_end_is_no_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "folder"), "3"]
    done = subprocess.run(run, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, env=BUFFERED)
    os.close(write)
    assert done.returncode == 3 and done.stderr == ""


@pytest.mark.parametrize("closed", [1, 2], ids=["stdout", "stderr"])
def test_a_process_without_a_stream_keeps_its_code(closed, tmp_path):
    for arguments, code in ((["paper", "--help"], 0), (["inspect", str(tmp_path / "nowhere")], 2)):
        run = [sys.executable, "-m", "leansurgeon", *arguments]
        done = subprocess.run(run, capture_output=True, preexec_fn=lambda: os.close(closed), timeout=60)
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize(("error", "code"), [("UsageError('no such thing')", 2), ("typer.Exit(3)", 3)])
def test_a_full_disk_does_not_hide_why_a_command_failed(error, code):
    script = f"""
import sys, typer
from leansurgeon.cli import main
from leansurgeon.errors import UsageError

def fail() -> None:
    print("data")
    raise {error}

failing = typer.Typer(add_completion=False)
failing.command("fail")(fail)
main.PANELS, main.load_command = {{"": {{"fail": "Fails"}}}}, lambda name: typer.main.get_command(failing)
sys.argv = ["leansurgeon", "fail"]
from leansurgeon.__main__ import run
run()
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=BUFFERED
        )
    assert done.returncode == code and ("no such thing" in done.stderr) == (code == 2)
    assert "Traceback" not in done.stderr
