"""Families: test every model type of transformers, and list what may change in which."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from leansurgeon.commands.command import Answer, Command
from leansurgeon.progress import Say
from leansurgeon.reading import files, jsonfile
from leansurgeon.request import Opt, Request

if TYPE_CHECKING:
    from leansurgeon.surgery.family_check import FamilyCheck, RandomModel

LONGEST = 60  # seconds of processor time for one type
AT_ONCE = 40  # types per process


class FamiliesRequest(Request):
    """Which types to test, and how."""

    types: Annotated[
        list[str],
        Opt(
            "Types as in config.json, with flags as in 'gpt2?n_inner=64', or timm/NAME; none: all types.",
            complete="families",
            positional=True,
        ),
    ] = Field(default_factory=list)
    timm: Annotated[bool, Opt("Models of timm as well: one or more of every family.")] = False
    state: Annotated[
        Path | None,
        Opt("Keep what was found here, one JSON line a type; a rerun skips what is there.", "Output"),
    ] = None
    jobs: Annotated[int, Field(ge=1), Opt("Processes at a time.")] = 1
    seed: Annotated[int, Opt("Of the random weights and inputs.")] = 23
    # With three layers, one can be dropped and two stay.
    depth: Annotated[int, Field(ge=3), Opt("Layers of the random models, where they can be chosen.")] = 7


def families(request: FamiliesRequest, say: Say) -> Answer:
    """Show what may change in the families of transformers and timm: layers, heads, MLP.

    For every type, a small random model is made, its family is inferred unless it is declared, its layers, heads and
    MLP are changed, and the result is reloaded and compared with a cut by hand. All types take half an hour or more.
    """
    from leansurgeon.surgery.family_check import NAMES, PREFIX, FamilyCheck, RandomModel

    drawn, state = RandomModel(request.seed, request.depth), request.state
    if request.types or request.timm:
        names = [*request.types, *(PREFIX + name for name in NAMES if request.timm)]
    else:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        names = sorted(CONFIG_MAPPING_NAMES)
    known: dict[str, FamilyCheck] = {}
    if state and state.exists():
        lines = files.read_text(state, jsonfile.LIMIT).splitlines()
        rows = [FamilyCheck(**jsonfile.parse(line, str(state))) for line in lines]
        known = {row.name: row for row in rows if (row.seed, row.depth) == (drawn.seed, drawn.depth)}
    left = [name for name in names if name not in known]
    for number, row in enumerate(check_families(left, request.jobs, drawn), len(names) - len(left) + 1):
        known[row.name] = row = replace(row, seed=drawn.seed, depth=drawn.depth)
        if state:
            with state.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        say(f"{number}/{len(names)} {row.name}: {shortly(row)}")
    from leansurgeon.report.tables.families import document, markdown

    rows = [known[name] for name in names]
    return Answer(document(rows), markdown(rows))


def check_families(names: Sequence[str], jobs: int, drawn: RandomModel) -> Iterator[FamilyCheck]:
    """Yield rows as they complete. Each process does one type at a time, and some dozens in all, since what the
    libraries import stays in memory (`max_tasks_per_child` of Python 3.11 hangs after the first).
    """
    for start in range(0, len(names), AT_ONCE * jobs):
        yield from of_one_pool(names[start : start + AT_ONCE * jobs], jobs, drawn)


def of_one_pool(names: Sequence[str], jobs: int, drawn: RandomModel) -> Iterator[FamilyCheck]:
    """Yield rows of these names from new processes. If one dies (memory), the names that were lost with it are tried
    alone.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    from leansurgeon.surgery.family_check import FamilyCheck

    lost = []
    with ProcessPoolExecutor(min(jobs, len(names)), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(patiently, name, drawn): name for name in names}
        for done in as_completed(waiting):
            try:
                yield done.result()
            except BrokenProcessPool:
                lost.append(waiting[done])
    for name in lost:
        yield from of_one_pool([name], 1, drawn) if len(names) > 1 else [FamilyCheck(name, why="its process died")]


def patiently(name: str, drawn: RandomModel) -> FamilyCheck:
    """Check one type with a time limit and its own cache, so that no earlier proof counts."""
    from leansurgeon.surgery.family_check import PREFIX, FamilyCheck

    class TooLong(BaseException):
        """A BaseException, so that no `except Exception` on the way catches it."""

    def stop(*_: object) -> None:
        """Handle the timer."""
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)  # processor time, since other processes may run too
    signal.alarm(60 * LONGEST)  # for one that waits
    try:
        with tempfile.TemporaryDirectory(prefix="leansurgeon-") as cache:
            os.environ["LEANSURGEON_CACHE"] = cache
            if name.startswith(PREFIX):  # without importing the other library
                from leansurgeon.surgery.undeclared_timm import check_timm_name as check
            else:
                from leansurgeon.surgery.undeclared import check_type as check
            started = time.monotonic()
            row = check(name, drawn=drawn)
            return replace(row, seconds=round(time.monotonic() - started, 1))
    except TooLong:
        return FamilyCheck(name, why=f"it took more than {LONGEST} s")
    except BaseException as error:  # the row reports it; other types continue
        return FamilyCheck(name, why=f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.flush()


def shortly(row: FamilyCheck) -> str:
    """Describe the result of a type in a few words, for the progress line."""
    if not row.built:
        return f"not tried: {row.why[:90]}"
    able = ", ".join(what for what in ("depth", "heads", "mlp_dim") if row.can(what))
    end = f" (equal to {row.difference:.0e})" if row.difference is not None else f": {row.why[:90]}"
    return (able or "nothing") + end


EXAMPLES = ("leansurgeon families granite gptj", "leansurgeon families --timm --state rows.jsonl")
COMMAND = Command("families", FamiliesRequest, families, EXAMPLES)
