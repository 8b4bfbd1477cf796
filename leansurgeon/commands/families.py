"""Families: test every model type of transformers, and list what may change in which."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Annotated

from pydantic import Field

from leansurgeon.commands.command import Answer, Command
from leansurgeon.errors import plural
from leansurgeon.progress import Say
from leansurgeon.reading import files, jsonfile
from leansurgeon.request import Opt, Request
from leansurgeon.surgery.family_check import NAMES, PREFIX, FamilyCheck, RandomModel

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
    drawn, state = RandomModel(request.seed, request.depth), request.state
    if request.types or request.timm:
        names = [*request.types, *(PREFIX + name for name in NAMES if request.timm)]
    else:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        names = sorted(CONFIG_MAPPING_NAMES)
    known = {}
    if state and state.exists():
        lines = files.read_text(state, jsonfile.LIMIT).splitlines()
        rows = [FamilyCheck(**jsonfile.parse(line, str(state))) for line in lines]
        known = {row.name: row for row in rows if (row.seed, row.depth) == (drawn.seed, drawn.depth)}
    left, many = [name for name in names if name not in known], AT_ONCE * request.jobs
    # Each process does one type at a time, and some dozens in all, since what the libraries import stays in memory
    # (`max_tasks_per_child` of Python 3.11 hangs after the first).
    pools = (of_one_pool(left[start : start + many], request.jobs, drawn) for start in range(0, len(left), many))
    for number, row in enumerate(chain.from_iterable(pools), len(names) - len(left) + 1):
        known[row.name] = row = replace(row, seed=drawn.seed, depth=drawn.depth)
        if state:
            with state.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        say(f"{number}/{len(names)} {row.name}: {shortly(row)}")
    rows = [known[name] for name in names]
    shown = [{key: value for key, value in asdict(row).items() if key != "defect"} for row in rows]
    return Answer({"versions": versions(), "counts": counts(rows), "rows": shown}, markdown(rows))


def of_one_pool(names: Sequence[str], jobs: int, drawn: RandomModel) -> Iterator[FamilyCheck]:
    """Yield rows of these names from new processes. If one dies (memory), the names that were lost with it are tried
    alone.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

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
    able = ", ".join(what for what in NUMBERS if row.can(what))
    end = f" (equal to {row.difference:.0e})" if row.difference is not None else f": {row.why[:90]}"
    return (able or "nothing") + end


# -- the page and the document --------------------------------------------------------------------

NUMBERS = ("depth", "heads", "mlp_dim")


def counts(rows: Sequence[FamilyCheck]) -> Mapping[str, int]:
    """Return how many types can be tried, and how many allow each change."""
    built = [row for row in rows if row.built]
    return {
        "types": len(rows),
        "tried": len(built),
        **{number: sum(row.can(number) for row in built) for number in NUMBERS},
        "all three": sum(all(row.can(number) for number in NUMBERS) for row in built),
        "heads by our modelling file": sum(row.can("heads") and row.decoupled for row in built),
        "wrong": sum(row.difference is not None and not row.right for row in built),
        "defects": sum(row.defect for row in built),
    }


def versions() -> Mapping[str, str]:
    """Return the versions of leansurgeon and of the libraries that the families come from."""
    return {name: version(name) for name in ("leansurgeon", "transformers", "timm", "torch")}


def markdown(rows: Sequence[FamilyCheck]) -> str:
    """Return the whole page, with a table row for every type, and one for every timm model."""
    said = ", ".join(f"{name} {number}" for name, number in versions().items())
    of_timm = [row for row in rows if row.name.startswith("timm/")]
    types = [row for row in rows if row not in of_timm]
    lines = ["# Families", "", f"`leansurgeon families`, {said}."]
    lines += part(types, TYPES) if types else []
    lines += ["", "## timm", *part(of_timm, OF_TIMM)] if of_timm else []
    return "\n".join(lines) + "\n"


TYPES = (
    "A small random model of every type, with the flags of its default config (or those after `?`), was saved,",
    "cut by `shrink` (two layers fewer a stage, twice the heads of the same size, a wider MLP: whatever is not",
    "refused), loaded by its plain library or the modelling file that travels, and compared with the same cut by",
    "hooks in memory.",
)
OF_TIMM = (
    "A small random model of every name (fewer layers, narrower, smaller images where its constructor takes them) was",
    "saved by timm's `save_for_hf`, cut by `shrink` in the same way, loaded by `timm.create_model` (heads beyond the",
    "width: behind our entry point), and compared with the same cut by hooks in memory.",
)


def part(rows: Sequence[FamilyCheck], said: Sequence[str]) -> list[str]:
    """Return counts, method, the table, and what was not tried."""
    count = counts(rows)
    told = (
        f"{count['tried']} of {plural(count['types'], 'type')} could be tried. Layers can be dropped in "
        f"{count['depth']}; heads can change in {count['heads']}, in {count['heads by our modelling file']} of them by "
        f"the modelling file that travels; the MLP can change in {count['mlp_dim']}, all three in "
        f"{count['all three']}. Results that differ from a cut by hand: {count['wrong']}; defects: {count['defects']}."
    )
    lines = ["", told, "", *said, ""]
    lines.append("| name | class | layers | heads | MLP | difference | what stands in the way |")
    lines.append("|---|---|---|---|---|---|---|")
    for row in (row for row in rows if row.built):
        can = {number: "yes" if row.can(number) else "no" for number in NUMBERS}
        heads = "by modelling file" if row.can("heads") and row.decoupled else can["heads"]
        difference = f"{row.difference:.0e}" if row.difference is not None else "–"
        reasons = "; ".join(dict.fromkeys(plain(r)[:140] for r in row.refused.values() if r))
        why = "; ".join(text for text in (plain(row.why)[:160], reasons) if text)
        name = row.name + (" (declared)" if row.declared else "")
        cells = (name, row.cls, can["depth"], heads, can["mlp_dim"], difference, why)
        lines.append(f"| {' | '.join(cells)} |")
    left = [f"- {row.name}: {plain(row.why)[:160]}" for row in rows if not row.built]
    return [*lines, *(("", "No small model of these runs on text, images or sound alone:", "", *left) if left else ())]


def plain(text: str) -> str:
    """Return text on one line, safe in a Markdown cell."""
    return " ".join(text.split()).replace("|", "/")


EXAMPLES = ("leansurgeon families granite gptj", "leansurgeon families --timm --state rows.jsonl")
COMMAND = Command("families", FamiliesRequest, families, EXAMPLES)
