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
leave(75)
"""
FAILING = """
import sys, typer
from leansurgeon.cli import main
from leansurgeon.errors import UsageError

def fail() -> None:
    print("data")
    raise UsageError("no such thing")

failing = typer.Typer(add_completion=False)
failing.command("fail")(fail)
main.PANELS, main.load_command = {"": {"fail": "Fails"}}, lambda name: typer.main.get_command(failing)
sys.argv = ["leansurgeon", "fail"]
from leansurgeon.__main__ import run
run()
"""
BUFFERED = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}


def python(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A fresh Python with these arguments; what it prints is buffered."""
    return subprocess.run([sys.executable, *map(str, arguments)], text=True, timeout=60, env=BUFFERED, **options)


def test_threads_are_waited_for_handlers_run_and_everything_is_written(tmp_path):
    done = python("-c", SCRIPT, tmp_path / "folder", capture_output=True)
    assert done.returncode == 75 and done.stderr == ""
    said = done.stdout.split()
    assert sorted(said[:-1]) == ["pool", "thread", "work"] and said[-1] == "handler"
    assert not os.path.exists((tmp_path / "folder").read_text())


def test_a_closed_pipe_at_the_end_is_no_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = python("-c", SCRIPT, tmp_path / "folder", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 75 and done.stderr == ""


@pytest.mark.parametrize("closed", [1, 2], ids=["stdout", "stderr"])
def test_a_process_without_a_stream_keeps_its_code(closed, tmp_path):
    for arguments, code in ((["paper", "--help"], 0), (["inspect", tmp_path / "nowhere"], 2)):
        done = python("-m", "leansurgeon", *arguments, capture_output=True, preexec_fn=lambda: os.close(closed))
        assert done.returncode == code, done.stderr


def test_a_full_disk_does_not_hide_why_a_command_failed():
    with open("/dev/full", "w") as full:
        done = python("-c", FAILING, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and "no such thing" in done.stderr and "Traceback" not in done.stderr
