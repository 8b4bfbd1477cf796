"""Nothing is replaced that came into being meanwhile, a writer holds its name, and the dead leave nothing for long."""

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from leansurgeon.checkpoints.publish import durable, output
from leansurgeon.checkpoints.publish.durable import claim_name, write_durably
from leansurgeon.checkpoints.publish.output import output_folder
from leansurgeon.checkpoints.weights import TensorOut, write_file
from leansurgeon.errors import LeanSurgeonError, UsageError
from tests.support.command_line import leansurgeon

OURS = '{"source": {"name": "x"}, "files": ["surgery.json"]}'


@pytest.fixture(params=["system", "portable"])
def renames(request, monkeypatch):
    """With the system's own renames, which replace nothing and exchange, and without them."""
    if request.param == "portable":
        monkeypatch.setattr(durable, "_system", lambda: None)


def fill(folder: Path, text: str = OURS) -> None:
    (folder / "surgery.json").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("what", ["folder", "empty folder", "file", "link to nowhere"])
def test_what_came_meanwhile_is_not_replaced(what, renames, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UsageError) as error, output_folder(out) as aside:
        fill(aside)
        if what == "file":
            out.write_text("theirs")
        elif what == "link to nowhere":
            out.symlink_to("nowhere")
        else:
            out.mkdir()
        if what == "folder":
            (out / "thesis").write_text("theirs")
    assert error.value.exit_code == 2 and "--force" in error.value.hint
    assert names(tmp_path) == ["out"]
    assert not out.is_file() or out.read_text() == "theirs"
    assert not out.is_dir() or names(out) == ["thesis"][: what == "folder"]


@pytest.mark.parametrize("there", ["from the start", "meanwhile"])
def test_force_replaces_what_is_ours(there, renames, tmp_path):
    out = tmp_path / "out"
    if there == "from the start":
        out.mkdir()
        fill(out)
    with output_folder(out, force=True) as aside:
        fill(aside, '{"source": {"name": "new"}, "files": ["surgery.json"]}')
        if there == "meanwhile":
            out.mkdir()
            fill(out)
    assert "new" in (out / "surgery.json").read_text() and names(tmp_path) == ["out"]


def test_force_looks_again(renames, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    fill(out)
    with pytest.raises(UsageError), output_folder(out, force=True) as aside:
        fill(aside, "new")
        (out / "thesis").write_text("theirs")
    assert names(out) == ["surgery.json", "thesis"] and (out / "surgery.json").read_text() == OURS
    assert names(tmp_path) == ["out"]


def test_force_puts_back_what_changed_at_the_last_moment(tmp_path, monkeypatch):
    out, real = tmp_path / "out", output.exchange
    out.mkdir()
    fill(out)

    def exchange(one: Path, other: Path) -> bool:
        if not (one / "thesis").exists():
            (out / "thesis").write_text("theirs")
        return real(one, other)

    monkeypatch.setattr(output, "exchange", exchange)
    with pytest.raises(UsageError), output_folder(out, force=True) as aside:
        fill(aside, "new")
    assert names(out) == ["surgery.json", "thesis"] and names(tmp_path) == ["out"]


def test_a_failed_swap_leaves_the_old_one(tmp_path, monkeypatch):
    """Without an exchange there is a moment with nothing at the name: what fails then goes back."""
    monkeypatch.setattr(durable, "_system", lambda: None)
    out = tmp_path / "out"
    out.mkdir()
    fill(out)
    real, times = output.rename_new, []

    def fails(old: Path, new: Path) -> None:
        times.append(new)
        if len(times) == 2:
            raise OSError(28, "No space left on device")
        real(old, new)

    monkeypatch.setattr(output, "rename_new", fails)
    with pytest.raises(LeanSurgeonError), output_folder(out, force=True) as aside:
        fill(aside, "new")
    assert (out / "surgery.json").read_text() == OURS and names(tmp_path) == ["out"]


# -- a writer holds its name -----------------------------------------------------------------------

HOLDS = """
import sys, time
from pathlib import Path
from leansurgeon.checkpoints.publish.output import output_folder
with output_folder(Path(sys.argv[1])) as aside:
    (aside / "half").write_text("x")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    """Another process that is writing `out`."""
    with ExitStack() as stack:
        process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "out")], stdout=subprocess.PIPE)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout.readline() == b"ready\n"
        yield process


def test_the_second_is_told_who_has_it(writer, saved, tmp_path):
    folder, _ = saved("vit")
    left = names(tmp_path)
    done = leansurgeon("shrink", folder, "--layers", "2", "--uncalibrated", "-o", tmp_path / "out")
    assert done.returncode == 2 and str(writer.pid) in done.stderr and "since" in done.stderr
    assert set(names(tmp_path)) == {*left, "source-vit"}  # a living one's folder is left alone


def test_the_name_of_a_killed_writer_is_free_and_its_folder_goes(writer, tmp_path):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert len(names(tmp_path)) == 2  # .out.writing and .out.unfinished-...
    with output_folder(tmp_path / "another") as aside:  # any command that writes here
        fill(aside)
    assert names(tmp_path) == [".out.writing", "another"]
    with output_folder(tmp_path / "out") as aside:
        fill(aside)
    assert names(tmp_path) == ["another", "out"]


def test_without_locks_number_and_start_of_the_process_decide(writer, tmp_path, monkeypatch):
    import fcntl

    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(UsageError), claim_name(tmp_path / "out"):
        pass
    durable.sweep(tmp_path)
    assert len(names(tmp_path)) == 2
    writer.kill()
    writer.wait()
    with claim_name(tmp_path / "out"):
        durable.sweep(tmp_path)
    assert names(tmp_path) == []


def test_a_claim_of_another_machine_stands(tmp_path):
    said = {"host": "0" * 8, "boot": "0" * 8, "pid": 1, "start": 1, "where": "node7", "since": "noon"}
    (tmp_path / ".out.writing").write_text(json.dumps(said))
    foreign = tmp_path / ".out.unfinished-00000000-00000000-1-1-abcd"
    foreign.mkdir()
    with pytest.raises(UsageError) as error, claim_name(tmp_path / "out"):
        pass
    assert "node7" in error.value.message and ".out.writing" in error.value.hint
    durable.sweep(tmp_path)
    assert foreign.exists()


def test_a_number_that_came_back_is_another_process():
    mine = durable.me()
    assert not mine.dead and durable.of_name(f".x.unfinished{mine.tag}") == mine
    assert durable.Owner(mine.host, mine.boot, mine.pid, mine.start + 1).dead
    assert durable.Owner(mine.host, "0" * 8, mine.pid, mine.start).dead  # before a restart
    assert not durable.Owner("0" * 8, "0" * 8, mine.pid, mine.start).dead
    assert durable.of_name(f"x-{mine.host}-{mine.boot}-{mine.pid}-{mine.start}-beef") == mine  # as it was until 2026-11


def test_what_was_moved_out_of_the_way_goes_back(tmp_path):
    """Killed between two renames: the old folder stands aside, and nothing at its name."""
    dead = durable.Owner(durable.host(), durable.boot(), 2**22 + 1, 1)
    (tmp_path / f".out.replaced{dead.tag}" / "old").mkdir(parents=True)
    (tmp_path / f".out.unfinished{dead.tag}").mkdir()
    (tmp_path / f".other.replaced{dead.tag}").mkdir()
    (tmp_path / "other").mkdir()
    durable.sweep(tmp_path)
    assert names(tmp_path) == ["other", "out"]


def test_what_a_killed_writer_of_a_file_left_goes_with_the_next(tmp_path):
    """A living one's, one that is locked and what only looks like one stay."""
    dead = durable.Owner(durable.host(), durable.boot(), 2**22 + 1, 1)
    left, locked = (tmp_path / f".{name}{durable.PART}{dead.tag}" for name in ("summary.json", "locked"))
    stay = [f".x{durable.PART}{durable.me().tag}", "x.part", f"x.other{dead.tag}", f".link{durable.PART}{dead.tag}"]
    for path in (left, locked, *(tmp_path / name for name in stay[:3])):
        path.write_text("half")
    (tmp_path / stay[3]).symlink_to("nowhere")
    handle = durable.take_lock(locked)[0]
    write_durably(tmp_path / "recipe.yaml", "whole")
    os.close(handle)
    assert names(tmp_path) == sorted([*stay, locked.name, "recipe.yaml"])
    write_durably(tmp_path / "recipe.yaml", "again")
    assert names(tmp_path) == sorted([*stay, "recipe.yaml"])


def test_what_is_published_is_brought_to_the_disk_and_what_is_thrown_away_is_not(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))

    def written(folder):
        synced.clear()
        with output_folder(folder) as aside:
            write_file(aside / "model.safetensors", [TensorOut("w", "F32", (2,), make=lambda: np.ones(2, np.float32))])
            write_durably(aside / "config.json", "{}")
        return {Path(name).name for name in synced}, aside.name

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    brought, aside = written(tmp_path / "out")
    assert brought >= {"model.safetensors", "config.json", aside, tmp_path.name}
    with durable.scratch() as place:
        assert written(place / "out")[0] == set() and (place / "out" / "config.json").read_text() == "{}"
        assert written(tmp_path / "other")[0]  # beside it is not in it


def test_scratch_of_the_dead_goes_and_of_the_living_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / f"leansurgeon-scratch{durable.Owner(durable.host(), durable.boot(), 2**22 + 1, 1).tag}"
    dead.mkdir()
    (dead / "file").write_text("x")
    (tmp_path / "leansurgeon-of-somebody").mkdir()
    with durable.scratch() as first:
        assert not dead.exists() and stat.S_IMODE(first.stat().st_mode) == 0o700
        with durable.scratch() as second:
            assert first.exists() and first != second
    assert names(tmp_path) == ["leansurgeon-of-somebody"]


def test_a_claim_follows_no_link(tmp_path):
    """In a folder of somebody else it would empty the file that the link leads to."""
    (tmp_path / "mine").write_text("thesis")
    (tmp_path / ".out.writing").symlink_to("mine")
    with pytest.raises(UsageError), output_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "mine").read_text() == "thesis" and names(tmp_path) == [".out.writing", "mine"]


def test_a_claim_leaves_nothing_and_may_be_made_again(tmp_path):
    with claim_name(tmp_path / "a" / "b" / "out"), claim_name(tmp_path / "a" / "b" / "out"):
        assert names(tmp_path / "a" / "b") == [".out.writing"]
    assert names(tmp_path) == []


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_modes_are_those_of_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        with output_folder(tmp_path / "out") as aside:
            fill(aside)
            (aside / "surgery.json").chmod(0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "surgery.json").stat().st_mode) == 0o666 & ~mask


DIES = """
import os, signal, sys
from leansurgeon.checkpoints.publish import durable
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
durable.write_durably(__import__("pathlib").Path(sys.argv[1]) / "summary.json", "text")
"""


def test_a_file_is_whole_or_absent_and_the_half_one_is_known_as_dead(tmp_path):
    (tmp_path / "summary.json").write_text("old")
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL and len(names(tmp_path)) == 2
    assert (tmp_path / "summary.json").read_text() == "old"
    write_durably(tmp_path / "summary.json", "new")
    assert names(tmp_path) == ["summary.json"] and (tmp_path / "summary.json").read_text() == "new"


def _write(out: str, start: float, answers) -> None:
    time.sleep(max(0.0, start - time.time()))
    try:
        with output_folder(Path(out)) as aside:
            fill(aside, str(os.getpid()))
            time.sleep(0.05)
        answers.put((os.getpid(), "won"))
    except UsageError as error:
        answers.put((os.getpid(), error.message))


@pytest.mark.parametrize("locks", [True, False], ids=["claim", "rename alone"])
def test_of_several_at_once_one_wins(locks, tmp_path, monkeypatch):
    """Also where claims fail altogether, the rename decides."""
    if not locks:
        monkeypatch.setattr(durable, "take_claim", lambda file, path: os.open(tmp_path, os.O_RDONLY))
    context = multiprocessing.get_context("fork")
    for turn in range(3):
        answers, out = context.Queue(), tmp_path / f"out{turn}"
        at = time.time() + 0.1
        jobs = [context.Process(target=_write, args=(str(out), at, answers)) for _ in range(4)]
        for job in jobs:
            job.start()
        said = [answers.get(timeout=30) for _ in jobs]
        for job in jobs:
            job.join()
        winners = [pid for pid, word in said if word == "won"]
        assert len(winners) == 1 and (out / "surgery.json").read_text() == str(winners[0]), said
    assert names(tmp_path) == [f"out{turn}" for turn in range(3)]
