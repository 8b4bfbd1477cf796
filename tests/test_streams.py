"""Streams that nobody reads, that are full, or that are closed cost neither the result nor the exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from functools import cache

import pytest

from leansurgeon import streams
from tests.support.command_line import leansurgeon
from tests.support.report.report_workspace import workspace

COMMAND = [sys.executable, "-m", "leansurgeon"]


def closed_pipe() -> int:
    """The end of a pipe to write to that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def test_nobody_reads_the_data(tmp_path):
    workspace(tmp_path / "runs")
    for arguments, buffered in (
        (["recipes", "list"], ""),
        (["report", str(tmp_path / "runs")], "1"),
        (["--help"], "1"),
    ):
        pipe = closed_pipe()
        env = os.environ | {"PYTHONUNBUFFERED": buffered}
        done = subprocess.run([*COMMAND, *arguments], stdout=pipe, stderr=subprocess.PIPE, timeout=60, env=env)
        os.close(pipe)
        assert (done.returncode, done.stderr) == (0, b""), arguments


@cache
def whole(*arguments: str) -> bytes:
    """What a command gives where everything is heard."""
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=60, cwd=empty).stdout


@pytest.mark.parametrize("stderr", ["closed", "full", "unread"])
@pytest.mark.parametrize(
    ("arguments", "code"), [(["recipes", "list"], 0), (["inspect", "./nowhere"], 2), (["plan", "--heads"], 2)]
)
def test_nobody_hears_the_talk(stderr, arguments, code, tmp_path):
    ends = {"closed": None, "full": os.open("/dev/full", os.O_WRONLY), "unread": closed_pipe()}
    close = (lambda: os.close(2)) if stderr == "closed" else None
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=ends[stderr], preexec_fn=close, timeout=60, cwd=tmp_path
    )
    os.close(ends["full"])
    os.close(ends["unread"])
    assert (done.returncode, done.stdout) == (code, whole(*arguments))


def test_a_full_disk_under_the_data_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "recipes", "list"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and b"disk is full" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("place", ["full", "unread"])
def test_a_cut_model_is_kept_though_nobody_hears_of_it(place, saved, tmp_path, monkeypatch):
    folder, _ = saved("llama")
    handle = os.open("/dev/full", os.O_WRONLY) if place == "full" else closed_pipe()
    with open(handle, "w", buffering=1) as deaf:
        monkeypatch.setattr("tests.support.command_line.redirect_stderr", lambda _: _Put("stderr", deaf))
        if place == "unread":
            monkeypatch.setattr("tests.support.command_line.redirect_stdout", lambda _: _Put("stdout", deaf))
        done = leansurgeon("shrink", folder, "--layers", 2, "--uncalibrated", "-o", tmp_path / "out")
    assert done.returncode == 0 and (tmp_path / "out" / "surgery.json").is_file()
    assert place == "unread" or done.stdout


class _Put:
    def __init__(self, name, stream):
        self.name, self.stream = name, stream

    def __enter__(self):
        self.before = getattr(sys, self.name)
        setattr(sys, self.name, self.stream)

    def __exit__(self, *_):
        setattr(sys, self.name, self.before)


def test_the_descriptors_are_there_before_a_file_takes_their_place(tmp_path):
    code = (
        "import os, sys; from leansurgeon.streams import ensure_descriptors, guard; ensure_descriptors(); guard()\n"
        "file = open(sys.argv[1], 'wb'); os.write(2, b'talk'); print('talk', file=sys.stderr); print('data')\n"
        "sys.exit(file.fileno() < 3)"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(run, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), timeout=60)
    assert (done.returncode, done.stdout) == (0, b"data\n") and (tmp_path / "model").read_bytes() == b""


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "\x1b[2J", "a\rb", "\x9b2J", "\x00", "\x1b[8;9H", "\x08"])
def test_what_somebody_else_wrote_steers_no_terminal(text, monkeypatch):
    out, talk = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", talk)
    with streams.guarding():
        print(text)
        print(text, file=sys.stderr)  # talk: progress moves the cursor, and messages are cleaned where they are made
    assert out.getvalue().rstrip("\n").isprintable() and talk.getvalue() == text + "\n"


def test_a_document_says_the_same():
    document = json.dumps({"a\x9b": "b\x7f\x1b"}, ensure_ascii=False)
    assert json.loads(streams.harmless(document)) == json.loads(document)


def test_colours_tabs_and_line_ends_stay():
    text = "\x1b[1;31mred\x1b[0m\ta\r\nb\n"
    assert streams.harmless(text) == text


def test_what_an_encoding_lacks_is_escaped():
    raw = io.BytesIO()
    outlet = streams.Outlet(io.TextIOWrapper(raw, encoding="latin-1"), BrokenPipeError)
    print("ä", "→", "\ud800", file=outlet, flush=True)
    assert raw.getvalue() == b"\xe4 \\u2192 \\ud800\n"
