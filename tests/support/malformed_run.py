"""Runs cases in forked processes, each with a limit of time and of memory; what fails is told with seed and number.

    python -m tests.support.malformed_run --seed 7 --cases 2000
    python -m tests.support.malformed_run --seed 7 --only 123

A process does many cases one after the other, since a fork of a process that holds torch costs as much as a case. One
that hangs, dies or grows is charged to the case that it was at, and the next process goes on behind it.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import malformed_cases
from tests.support.malformed_cases import Bases

SECONDS, MEGABYTES = 20.0, 2000.0  # of processor time, since other tests run beside
HANGS = 120.0  # seconds by the clock
EXPECTED = (0, 2, 3, 4, 5)  # exit codes; 1 is what nobody expects


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `fault` is None where it ended as it should."""

    number: int
    subject: str
    what: str
    command: str
    code: int | None
    seconds: float
    megabytes: float
    fault: str | None


@dataclass
class Told:
    """All outcomes of a run."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def faults(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.fault]

    def summary(self) -> str:
        """Counts by subject and exit code, and the slowest."""
        by = collections.Counter((o.subject, o.code) for o in self.outcomes)
        lines = [f"seed {self.seed}: {len(self.outcomes):,} cases, {len(self.faults)} faults"]
        for subject in sorted({o.subject for o in self.outcomes}):
            codes = {code: n for (s, code), n in sorted(by.items(), key=str) if s == subject}
            slowest = max((o for o in self.outcomes if o.subject == subject), key=lambda o: o.seconds)
            largest = max(o.megabytes for o in self.outcomes if o.subject == subject)
            lines.append(f"  {subject}: exit codes {codes}; at most {slowest.seconds:.1f} s, {largest:.0f} MB")
        return "\n".join(lines)


def run(seed: int, numbers: Sequence[int], bases: Bases, processes: int = 2) -> Told:
    """Run these cases of the run with `seed`."""
    told = Told(seed)
    queues = [list(numbers[i::processes]) for i in range(processes)]
    alive = [_Worker(seed, queue, bases) for queue in queues if queue]
    while alive:
        select.select([worker.answers for worker in alive], [], [], 0.2)
        for worker in list(alive):
            told.outcomes.extend(worker.heard())
            if worker.done:
                alive.remove(worker)
    return told


class _Worker:
    """A forked process at a list of cases, and the one that follows it when it is lost."""

    def __init__(self, seed: int, numbers: list[int], bases: Bases) -> None:
        self.seed, self.left, self.bases, self.done = seed, numbers, bases, False
        self._fork()

    def _fork(self) -> None:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if self.process == 0:
            os.close(read)
            os.setsid()
            code = 1
            try:
                _work(self.seed, self.left, self.bases, write)
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        os.set_blocking(read, False)
        self.answers, self.buffer, self.since = read, b"", time.monotonic()

    def heard(self) -> Iterator[Outcome]:
        """The outcomes that have come; a process that is late or dead is replaced."""
        ended = False
        with suppress(BlockingIOError):
            while piece := os.read(self.answers, 1 << 20):
                self.buffer += piece
            ended = True
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            outcome = Outcome(**json.loads(line))
            self.left.remove(outcome.number)
            self.since = time.monotonic()
            yield outcome
        late = time.monotonic() - self.since > HANGS + 2
        if not ended and not late:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        os.close(self.answers)
        if self.left:
            number = self.left.pop(0)
            why = (
                f"over {HANGS:.0f} s by the clock"
                if late
                else f"the process died ({os.waitstatus_to_exitcode(status)})"
            )
            subject, what, command = _described(self.seed, number, self.bases)
            yield Outcome(number, subject, what, command, None, time.monotonic() - self.since, 0.0, why)
        if self.left:
            self._fork()
        else:
            self.done = True


def _described(seed: int, number: int, bases: Bases) -> tuple[str, str, str]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        subject, case = malformed_cases.case(seed, number, bases, Path(scratch))
        return subject, case.what, " ".join(case.command)[:400]


def _work(seed: int, numbers: list[int], bases: Bases, answers: int) -> None:
    """The forked process: one line of JSON for every case."""
    signal.signal(signal.SIGPROF, _too_long)
    signal.signal(signal.SIGALRM, _hangs)
    # The machine must outlive it. Not the address space, of which the engine that draws charts reserves a terabyte.
    resource.setrlimit(resource.RLIMIT_DATA, (int(1e6 * _resident("VmData")) + 6 * 10**9,) * 2)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for number in list(numbers):
            scratch = Path(place) / str(number)
            scratch.mkdir()
            random.seed(number)
            outcome = _one(seed, number, bases, scratch)
            shutil.rmtree(scratch, ignore_errors=True)
            os.write(answers, json.dumps(outcome.__dict__).encode() + b"\n")


def _one(seed: int, number: int, bases: Bases, scratch: Path) -> Outcome:
    subject, case = malformed_cases.case(seed, number, bases, scratch)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of memory starts here
    before, began, code, fault = _resident("VmRSS"), time.monotonic(), None, None
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        with chdir(scratch):
            code = case.do()
        if code not in EXPECTED:
            fault = f"exit {code}"
    except BaseException as error:
        fault = f"{type(error).__name__}: {str(error)[:300]}\n{_where(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds, megabytes = time.monotonic() - began, _resident("VmHWM") - before
    if fault is None and megabytes > MEGABYTES:
        fault = f"{megabytes:.0f} MB"
    if megabytes > 100:
        gc.collect()
    return Outcome(number, subject, case.what, " ".join(case.command)[:400], code, seconds, megabytes, fault)


class TooLong(BaseException):
    """Nothing catches this."""


def _too_long(number: int, frame: object) -> None:
    raise TooLong(f"over {SECONDS:.0f} s of processor time")


def _hangs(number: int, frame: object) -> None:
    raise TooLong(f"over {HANGS:.0f} s by the clock")


def _resident(what: str) -> float:
    """Megabytes of this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{what}:")) / 1000


def _where(error: BaseException) -> str:
    """The last frames in our package, and the very last one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "leansurgeon/" in frame.filename and "/tests/" not in frame.filename]
    shown = [*ours[-3:], *frames[-1:]]
    return "\n".join(f"    {'/'.join(Path(f.filename).parts[-3:])}:{f.lineno} {f.line}" for f in shown)


def main() -> None:
    """Run cases and tell what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--all-families", action="store_true")
    parser.add_argument("--bases", type=Path, help="A folder where they are, or will be made and stay.")
    said = parser.parse_args()
    from tests import conftest

    with tempfile.TemporaryDirectory() as scratch:
        root = said.bases or Path(scratch)
        every = (*conftest.FAMILIES, *malformed_cases.UNDECLARED)
        families = every if said.all_families else malformed_cases.QUICK
        whole = (root / "data").is_dir()
        bases = Bases(root, families) if whole else malformed_cases.build(root, families)
        import torch

        torch.set_num_threads(1)
        began = time.monotonic()
        malformed_cases.warm(bases)
        gc.collect()
        gc.freeze()  # a process that looked through all of it would copy it
        told = run(said.seed, said.only or range(said.cases), bases, said.processes)
        gc.unfreeze()
    sys.stdout.reconfigure(errors="backslashreplace")  # half a surrogate is one of the inputs
    for outcome in told.faults:
        print(f"\n{outcome.number} {outcome.subject}: {outcome.what[:300]!r}\n  {outcome.command}\n  {outcome.fault}")
    print(f"\n{told.summary()}\n{time.monotonic() - began:.0f} s")
    sys.exit(bool(told.faults))


if __name__ == "__main__":
    main()
