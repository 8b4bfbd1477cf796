"""How a process of ours ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with `code`, without taking every module and object apart first: a second once torch is loaded,
    for nothing.

    Threads are waited for and exit handlers run, in Python's own order.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Nobody reads any more, or the disk is full: said by now. Or there is no such stream.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
