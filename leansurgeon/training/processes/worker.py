"""`python -m leansurgeon.training.processes.worker FOLDER`: one process of a training that `launch` has started.

Reads `FOLDER/job.json`; on failure writes `FOLDER/rank<N>.json` with the message for the user.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from leansurgeon.ending import leave
from leansurgeon.errors import in_words
from leansurgeon.rank import rank
from leansurgeon.streams import guard

_LOOK_EVERY = 2.0  # seconds


def main(folder: Path) -> int:
    """Do the job and return the exit code of the process."""
    guard()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    (folder / f"pid-{rank()}").write_text(str(os.getpid()))
    try:
        _work(folder)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        said = in_words(error)
        kinds = [kind.__name__ for kind in type(said or error).__mro__]
        message, hint = (said.message, said.hint) if said else (f"{kinds[0]}: {error}", None)
        left = {"kinds": kinds, "message": message, "hint": hint, "trace": traceback.format_exc()}
        (folder / f"rank{rank()}.json").write_text(json.dumps(left))
        return said.exit_code if said else 1
    return 0


def _work(folder: Path) -> None:
    from leansurgeon.training.processes.launch import ANSWER, JOB
    from leansurgeon.training.together import carry_out

    answer = carry_out(json.loads((folder / JOB).read_text()))
    if rank() == 0:
        (folder / ANSWER).write_text(json.dumps(answer))


def _end_with(parent: int) -> None:
    """Exit at once when the process that started this one is gone, however it ended."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os._exit(1)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
