"""`python -m leansurgeon` is the same as `leansurgeon`."""

import os

from leansurgeon import clock
from leansurgeon.cli.main import main
from leansurgeon.ending import leave
from leansurgeon.streams import ensure_descriptors


def run() -> None:
    """Entry point: run the command line and exit the process."""
    clock.mark()
    ensure_descriptors()
    try:
        main()
    except SystemExit as end:
        if os.environ.get("LEANSURGEON_DEBUG"):
            raise
        leave(end.code or 0)


if __name__ == "__main__":
    run()
