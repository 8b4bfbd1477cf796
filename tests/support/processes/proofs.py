"""Proofs without the wait: what a command asks of a fresh process is done by a fork of one that has torch, transformers
and timm imported already, and nothing of ours. An import takes four seconds, a fork a hundredth of one.

`tests/checkpoints/test_prove.py` holds that such a fork says what a process of its own says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

SCRIPT = "reload_check.py"
SERVER = """
import gc, json, os, sys, traceback
import safetensors.torch, timm, torch, transformers
from transformers import AutoModel, dynamic_module_utils

def become(asked):
    for number, name in enumerate((os.devnull, asked["out"], asked["err"])):
        os.dup2(os.open(name, os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]  # read while it was imported
    script, *sys.argv[1:] = asked["arguments"]
    sys.argv[0] = script
    exec(compile(open(script).read(), script, "exec"), {"__name__": "__main__", "__file__": script})

gc.collect()
gc.freeze()  # a child that looked through all of it would copy it
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            become(json.loads(line))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
own_process = subprocess.run  # as it is without any of this


class Server:
    """A process that forks whenever a proof is asked for; it is started with the first one."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.owner = os.getpid()

    def run(self, arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """`subprocess.run`, forked where it is a proof of this process."""
        if list(arguments[1:2]) != ["-I"] or not arguments[2].endswith(SCRIPT) or os.getpid() != self.owner:
            return own_process(arguments, **options)
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, "-I", "-c", SERVER], env=os.environ | QUIET, **pipes)
        with tempfile.TemporaryDirectory() as place:
            out, err = Path(place, "out"), Path(place, "err")
            out.touch()
            err.touch()
            asked = {"arguments": arguments[2:], "env": dict(options["env"]), "cwd": os.getcwd()}
            self.process.stdin.write(json.dumps(asked | {"out": str(out), "err": str(err)}) + "\n")
            self.process.stdin.flush()
            code = int(self.process.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())

    def end(self) -> None:
        """Let the process go."""
        if self.process is not None:
            self.process.communicate()


@contextmanager
def forked() -> Iterator[None]:
    """Proofs of this process are forked."""
    server = Server()
    try:
        with mock.patch("subprocess.run", server.run):
            yield
    finally:
        server.end()
