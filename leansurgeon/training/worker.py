"""`python -m leansurgeon.training.worker FOLDER`: one process of a training that `launch` has started.

Reads `FOLDER/job.json`; on failure leaves `FOLDER/rank<N>.json` with the sentence for the person who is waiting.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from leansurgeon.errors import LeanSurgeonError


def main(folder: Path) -> int:
    """Train as the job says. Returns the exit code of the process."""
    from leansurgeon.training.launch import JOB
    from leansurgeon.training.loop import train
    from leansurgeon.training.recipe import TrainingRecipe

    (folder / f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    job = json.loads((folder / JOB).read_text())
    try:
        train(
            TrainingRecipe.model_validate(job["recipe"]),
            Path(job["model_dir"]),
            Path(job["run_dir"]),
            seed=job["seed"],
            experiment=job["experiment"],
            cpu=job["cpu"],
            **job["options"],
        )
    except KeyboardInterrupt:
        return 130
    except LeanSurgeonError as error:
        _leave(folder, type(error).__name__, error.message, error.hint)
        return error.exit_code
    except Exception as error:
        _leave(folder, type(error).__name__, f"{type(error).__name__}: {error}", None)
        return 1
    return 0


def _leave(folder: Path, kind: str, message: str, hint: str | None) -> None:
    said = {"kind": kind, "message": message, "hint": hint, "trace": traceback.format_exc()}
    (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
