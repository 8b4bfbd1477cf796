"""Work in a process of its own that costs no import: a fork of the tests' process, where torch is imported already."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.support.command_line import Done


def forked(work: Callable[[], None], cwd: Path) -> Done:
    """Do `work` in a forked process, in the folder `cwd`; what it prints, and its exit code."""
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        child = os.fork()
        if not child:
            code = 1
            try:
                for number, file in ((1, out), (2, err)):
                    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
                # pytest may have put something else in their place
                sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
                os.chdir(cwd)
                work()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return Done(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())
