"""Streams that nobody reads, that are full, or that are closed cost neither the result nor the exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from leansurgeon import __main__, streams
from tests.support.command_line import leansurgeon
from tests.support.processes.forks import forked
from tests.support.report.report_workspace import workspace

COMMAND = [sys.executable, "-m", "leansurgeon"]


def closed_pipe() -> int:
    """The end of a pipe to write to that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def test_nobody_reads_the_data(tmp_path):
    workspace(tmp_path / "runs")
    for arguments, buffered in ((["recipes", "list"], ""), (["report", str(tmp_path / "runs")], "1")):
        pipe = closed_pipe()
        env = os.environ | {"PYTHONUNBUFFERED": buffered}
        done = subprocess.run([*COMMAND, *arguments], stdout=pipe, stderr=subprocess.PIPE, timeout=60, env=env)
        os.close(pipe)
        assert (done.returncode, done.stderr) == (0, b""), arguments


@pytest.mark.parametrize("stderr", ["closed", "full", "unread"])
def test_nobody_hears_the_talk(stderr, tmp_path):
    """The data of a command that says much, and the exit code of one that fails."""
    wanted = leansurgeon("recipes", "list").stdout.encode()
    for arguments, code, data in ((["recipes", "list"], 0, wanted), (["inspect", "./nowhere"], 2, b"")):
        ends = {"closed": None, "full": os.open("/dev/full", os.O_WRONLY), "unread": closed_pipe()}
        close = (lambda: os.close(2)) if stderr == "closed" else None
        streams_of_it = {"stdout": subprocess.PIPE, "stderr": ends[stderr], "preexec_fn": close}
        done = subprocess.run([*COMMAND, *arguments], **streams_of_it, timeout=60, cwd=tmp_path)
        os.close(ends["full"])
        os.close(ends["unread"])
        assert (done.returncode, done.stdout) == (code, data)


def test_a_full_disk_under_the_data_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "recipes", "list"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and b"disk is full" in done.stderr and b"Traceback" not in done.stderr


def test_a_cut_model_is_kept_though_nobody_hears_of_it(saved, tmp_path):
    folder, _ = saved("llama")

    def shrink() -> None:
        for stream in (1, 2):
            os.dup2(closed_pipe(), stream)
        sys.argv = ["leansurgeon", "shrink", str(folder), "--layers", "2", "--uncalibrated", "--no-proof", "-o", "out"]
        __main__.run()

    assert forked(shrink, tmp_path).returncode == 0
    assert (tmp_path / "out" / "surgery.json").is_file()


def test_the_descriptors_are_there_before_a_file_takes_their_place(tmp_path):
    code = (
        "import os, sys; from leansurgeon.streams import ensure_descriptors, guard; ensure_descriptors(); guard()\n"
        "file = open(sys.argv[1], 'wb'); os.write(2, b'talk'); print('talk', file=sys.stderr); print('data')\n"
        "sys.exit(file.fileno() < 3)"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(run, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), timeout=60)
    assert (done.returncode, done.stdout) == (0, b"data\n") and (tmp_path / "model").read_bytes() == b""


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "\x1b[2J", "a\rb", "\x9b2J", "\x00", "\x08"])
def test_what_somebody_else_wrote_steers_no_terminal(text, monkeypatch):
    out, talk = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", talk)
    with streams.guarding():
        print(text)
        print(text, file=sys.stderr)  # talk: progress moves the cursor, and messages are cleaned where they are made
    assert out.getvalue().rstrip("\n").isprintable() and talk.getvalue() == text + "\n"


def test_colours_tabs_and_line_ends_stay_and_a_document_says_the_same():
    text = "\x1b[1;31mred\x1b[0m\ta\r\nb\n"
    assert streams.harmless(text) == text
    document = json.dumps({"a\x9b": "b\x7f\x1b"}, ensure_ascii=False)
    assert json.loads(streams.harmless(document)) == json.loads(document)


def test_what_an_encoding_lacks_is_escaped():
    raw = io.BytesIO()
    outlet = streams.Outlet(io.TextIOWrapper(raw, encoding="latin-1"), BrokenPipeError)
    print("ä", "→", "\ud800", file=outlet, flush=True)
    assert raw.getvalue() == b"\xe4 \\u2192 \\ud800\n"
