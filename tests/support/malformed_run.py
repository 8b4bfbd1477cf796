"""Runs cases in forked processes, each with a limit of time and of memory; what fails is told with seed and number.

    python -m tests.support.malformed_run --seed 7 --cases 2000
    python -m tests.support.malformed_run --seed 7 --only 123

A process does many cases one after the other, since a fork of a process that holds torch costs as much as a case. One
that dies is charged to the case that it was at, and the next process goes on behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path

from tests.support import malformed_cases
from tests.support.malformed_cases import Bases

SECONDS, HANGS, MEGABYTES = 20.0, 120.0, 2000.0  # of processor time, by the clock, of memory
EXPECTED = (0, 2, 3, 4, 5)  # exit codes; 1 is what nobody expects
Outcome = dict[str, object]  # `fault` is None where a case ended as it should


def run(seed: int, numbers: Sequence[int], bases: Bases, processes: int) -> list[Outcome]:
    """The outcomes of these cases of the run with `seed`."""
    begun = [(left, _begin(seed, left, bases)) for left in (list(numbers[i::processes]) for i in range(processes))]
    return [outcome for left, process in begun for outcome in _outcomes(seed, left, bases, process)]


def _begin(seed: int, numbers: list[int], bases: Bases) -> tuple[int, int]:
    """Start a process at these cases: its number, and where it says a line of JSON for every case."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    try:
        os.setsid()
        _work(seed, numbers, bases, write)
    finally:
        os._exit(0)


def _outcomes(seed: int, left: list[int], bases: Bases, process: tuple[int, int]) -> Iterator[Outcome]:
    """What a process says, and one that follows it where it died before its last case."""
    while True:
        child, read = process
        with open(read) as said:
            for line in said:
                outcome = json.loads(line)
                left.remove(outcome["number"])
                yield outcome
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not left:
            return
        yield {"number": left.pop(0), "subject": "unknown", "code": None, "fault": f"the process died ({code})"}
        process = _begin(seed, left, bases)


def _work(seed: int, numbers: list[int], bases: Bases, answers: int) -> None:
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _too_long)
    # The machine must outlive it. Not the address space, of which the engine that draws charts reserves a terabyte.
    resource.setrlimit(resource.RLIMIT_DATA, (int(1e6 * _megabytes("VmData")) + 6 * 10**9,) * 2)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for number in numbers:
            scratch = Path(place) / str(number)
            scratch.mkdir()
            random.seed(number)
            outcome = _one(seed, number, bases, scratch)
            shutil.rmtree(scratch, ignore_errors=True)
            os.write(answers, json.dumps(outcome).encode() + b"\n")


def _one(seed: int, number: int, bases: Bases, scratch: Path) -> Outcome:
    subject, case = malformed_cases.case(seed, number, bases, scratch)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of memory starts here
    before, code, fault = _megabytes("VmRSS"), None, None
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        with chdir(scratch):
            code = case.do()
        if code not in EXPECTED:
            fault = f"exit {code}"
    except BaseException as error:
        frames = "".join(traceback.format_tb(error.__traceback__)[-4:])
        fault = f"{type(error).__name__}: {str(error)[:300]}\n{frames}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = _megabytes("VmHWM") - before
    if fault is None and grown > MEGABYTES:
        fault = f"{grown:.0f} MB"
    if grown > 100:
        gc.collect()
    command = " ".join(case.command)[:400]
    return {"number": number, "subject": subject, "what": case.what, "command": command, "code": code, "fault": fault}


class TooLong(BaseException):
    """Nothing catches this."""


def _too_long(number: int, frame: object) -> None:
    raise TooLong(f"over {SECONDS:.0f} s of processor time, or {HANGS:.0f} s by the clock")


def _megabytes(what: str) -> float:
    """Of this process's memory."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{what}:")) / 1000


def main() -> None:
    """Run cases and tell what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    said = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        bases = malformed_cases.build(Path(scratch))
        malformed_cases.warm(bases)
        gc.collect()
        gc.freeze()  # a process that looked through all of it would copy it
        outcomes = run(said.seed, said.only or range(said.cases), bases, said.processes)
    sys.stdout.reconfigure(errors="backslashreplace")  # half a surrogate is one of the inputs
    faults = [outcome for outcome in outcomes if outcome["fault"]]
    for outcome in faults:
        print(*(f"{key}: {value}" for key, value in outcome.items()), "", sep="\n")
    codes = Counter((outcome["subject"], outcome["code"]) for outcome in outcomes)
    print(f"seed {said.seed}: {len(outcomes):,} cases, {len(faults)} faults; exit codes {dict(codes)}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
