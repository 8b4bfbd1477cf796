"""Exit the process quickly."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit this process with `code`, without tearing down every module and object first, which takes a second once
    torch is loaded.

    Waits for threads and runs exit handlers, in Python's own order.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Nobody reads any more, or the disk is full, which was reported by now. Or there is no such stream.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
