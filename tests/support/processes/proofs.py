"""Proofs without the wait: what a command asks of a fresh process is done by a fork of one that has torch, transformers
and timm imported already and has loaded a model, and nothing of ours. An import takes six seconds, a fork a hundredth.

`tests/checkpoints/test_prove.py` holds that such a fork says what a process of its own says.
"""

from __future__ import annotations

import json
import os
import socket
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
import gc, json, os, select, signal, socket, sys, tempfile, traceback
import safetensors.torch, scipy.stats, timm, torch, transformers
from transformers import AutoModel, BertConfig, BertModel, dynamic_module_utils

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

# The first model that a process makes and loads costs it a second and a half.
with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
    size = dict(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4, vocab_size=4)
    BertModel(BertConfig(**size)).save_pretrained(place)
    BertModel.from_pretrained(place)
gc.collect()
gc.freeze()  # a child that looked through all of it would copy it
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for proofs
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
while listener in select.select([listener, sys.stdin], [], [])[0]:  # until the tests' process closes its end
    connection, _ = listener.accept()
    if not os.fork():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked = json.loads(connection.makefile().readline())
        child = os.fork()
        if not child:
            try:
                become(asked)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    connection.close()
os._exit(0)
"""
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
QUIET["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # its threads would not be there in a fork
own_process = subprocess.run  # as it is without any of this


class Server:
    """A process that forks whenever a proof is asked for, by this process or one that was forked from it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.owner, self.place = os.getpid(), tempfile.TemporaryDirectory()

    def start(self) -> None:
        """Have it, from now on also in forks of this process."""
        if self.process is None and os.getpid() == self.owner:
            command = [sys.executable, "-I", "-c", SERVER, self._address]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen(command, env=os.environ | QUIET, **pipes)
            self.process.stdout.readline()

    @property
    def _address(self) -> str:
        return f"{self.place.name}/asked"

    def run(self, arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """`subprocess.run`, forked where it is a proof."""
        if list(arguments[1:2]) != ["-I"] or not arguments[2].endswith(SCRIPT):
            return own_process(arguments, **options)
        self.start()
        if self.process is None:
            return own_process(arguments, **options)
        with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as connection:
            out, err = Path(place, "out"), Path(place, "err")
            out.touch()
            err.touch()
            asked = {"arguments": arguments[2:], "env": dict(options["env"]), "cwd": os.getcwd()}
            connection.connect(self._address)
            connection.sendall((json.dumps(asked | {"out": str(out), "err": str(err)}) + "\n").encode())
            code = int(connection.makefile().read())
            return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())

    def end(self) -> None:
        """Let the process go."""
        if self.process is not None:
            self.process.terminate()
            self.process.communicate()
        self.place.cleanup()


def start() -> None:
    """Have the process before this one forks, where proofs are forked at all."""
    server = getattr(subprocess.run, "__self__", None)
    if isinstance(server, Server):
        server.start()


@contextmanager
def forked() -> Iterator[None]:
    """Proofs of this process are forked."""
    server = Server()
    try:
        with mock.patch("subprocess.run", server.run):
            yield
    finally:
        server.end()
