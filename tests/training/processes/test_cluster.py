"""Several nodes: torchrun, two rendezvous on this machine, and the Slurm example with a stand-in for Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from leansurgeon.cli.main import is_mine_to_say
from leansurgeon.errors import Diverged, LeanSurgeonError, OutOfMemory, Stopped, UsageError
from leansurgeon.training.processes import launch
from leansurgeon.training.processes.agree import LostProcesses, explain_lost_processes
from tests import conftest
from tests.support import training_interrupted as cut
from tests.support.patience import working_until

ROOT = Path(__file__).parents[3]
SETTINGS = ("train.duration=150st", "train.eval.every=75st", "train.log_every=5", "measure=null")
SHORT = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.fixture
def start(tmp_path):
    """A small ViT for digits."""
    conftest.build("vit", initializer_range=0.02).save_pretrained(tmp_path / "lean")
    return tmp_path / "lean"


@pytest.fixture
def environment(tmp_path):
    """Without what this test process may itself have been started with."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    return kept | threads | {"LEANSURGEON_CACHE": str(tmp_path / "cache")}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def losses(run: Path) -> dict[int, float]:
    """Of every logged step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["type"] == "train"}


@pytest.mark.slow
def test_torchrun_on_one_machine_and_on_two_nodes_trains_the_same(start, tmp_path, environment):
    """One torchrun with two processes, and two torchruns with one each that meet; one of them speaks."""
    command = ["-m", "leansurgeon", "retrain", start, "-r", "digits-vit", *SHORT, "--json", "-o"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    one = subprocess.run(
        [*torchrun, "--standalone", "--nproc-per-node", "2", *command, tmp_path / "one"],
        capture_output=True, text=True, timeout=600, env=environment | {"ACCELERATE_MIXED_PRECISION": "fp16"},
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    summary = json.loads(one.stdout)  # one document, though there are two processes
    assert summary["world_size"] == 2 and summary["steps"] == 150
    assert one.stderr.count("ACCELERATE_MIXED_PRECISION") == 1
    assert one.stderr.count("done in") == 1
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    nodes = [subprocess.Popen([*torchrun, *meet, *command, tmp_path / "two"], env=environment) for _ in range(2)]
    assert [node.wait(600) for node in nodes] == [0, 0]
    assert losses(tmp_path / "one") == losses(tmp_path / "two")


SRUN = """#!/bin/bash
# One process per task, on one machine; a signal for the step goes to every task; ends with the highest code.
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" > "$STANDIN/tasks"
code=0
for task in "${tasks[@]}"; do
    wait "$task"
    got=$?
    ((got > code)) && code=$got
done
exit $code
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$STANDIN/scontrol"
[[ $1 == show ]] && echo localhost
exit 0
"""


def write_slurm(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """What a job of two nodes with one task each sees of Slurm."""
    folder.mkdir()
    run = f'#!/bin/bash\nexec {sys.executable} -m leansurgeon "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("leansurgeon", run)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
    job |= {"SLURM_JOB_NODELIST": "node[1-2]", "STANDIN": str(folder)}
    return environment | job | {"PATH": f"{folder}{os.pathsep}{environment['PATH']}"}


@pytest.mark.slow
def test_the_slurm_example_saves_requeues_and_goes_on(start, tmp_path, environment):
    slurm = tmp_path / "slurm"
    job = write_slurm(slurm, environment)
    script = ["bash", ROOT / "examples" / "slurm" / "retrain.sbatch", start, "digits-vit", *SHORT]
    run = tmp_path / "runs" / f"slurm-{job['SLURM_JOB_ID']}"
    log = run / "metrics.jsonl"
    first = subprocess.Popen(script, cwd=tmp_path, env=job, stderr=subprocess.PIPE, text=True)
    assert working_until(lambda: log.is_file() and '"train"' in log.read_text(), [first.pid], 300)
    for task in (slurm / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    _, said = first.communicate(timeout=200)
    assert first.returncode == 75, said
    assert len(re.findall(r"\bafter step \d+", said)) == 1 and "Traceback" not in said
    assert f"requeue {job['SLURM_JOB_ID']}" in (slurm / "scontrol").read_text()
    again = subprocess.run(script, cwd=tmp_path, env=job, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 150 and len(summary["resumed_after"]) == 1 and summary["world_size"] == 2
    assert [*losses(run)] == [*range(5, 151, 5)]


def _fail_on_one(folder) -> None:
    """Process 1 cannot read a sample of its own in the middle of an epoch."""
    left = [20]

    def before(split: str) -> None:
        left[0] -= 1
        if os.environ["RANK"] == "1" and left[0] == 0:
            raise UsageError("picture.jpg cannot be read.")

    try:
        cut.run(folder, before)
    except LeanSurgeonError as error:
        (folder / f"said-{os.environ['RANK']}").write_text(f"{type(error).__name__}: {error.message}")
        os._exit(error.exit_code)


def test_a_failure_on_one_process_ends_all_and_is_one_sentence_each(tmp_path):
    assert cut.processes(2, _fail_on_one, tmp_path) == [1, 2]
    assert (tmp_path / "said-1").read_text() == "UsageError: picture.jpg cannot be read."
    assert (tmp_path / "said-0").read_text().startswith("LostProcesses: ")


def test_of_the_processes_that_a_command_started_only_the_reason_is_told(tmp_path):
    for rank, kind, message in ((0, "LostProcesses", "Another"), (1, "UsageError", "picture.jpg cannot be read.")):
        said = {"kinds": [kind], "message": message, "hint": None, "trace": ""}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(said))
    error = launch.read_verdict(tmp_path, tmp_path / "run")
    assert isinstance(error, UsageError) and error.message == "picture.jpg cannot be read."
    (tmp_path / "rank1.json").unlink()
    killed = launch.read_verdict(tmp_path, tmp_path / "run")
    assert re.search(r"\bworker process\b.*\bmemory\b", killed.message, re.S) and "--resume auto" in killed.hint


@pytest.mark.parametrize(
    ("error", "expected"),  # who says it of: process 0; 1 on the same machine; 8, the first of a second machine
    [
        (UsageError("x"), (True, False, True)),
        (Stopped("x"), (True, False, False)),
        (Diverged("x"), (True, False, False)),
        (OutOfMemory("x"), (True, True, True)),
        (LostProcesses("x"), (True, False, False)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_says_an_error(error, expected, monkeypatch):
    for name, value in {"WORLD_SIZE": "16", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for (rank, local), says in zip([("0", "0"), ("1", "1"), ("8", "0")], expected, strict=True):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert is_mine_to_say(error) is says


def test_losing_another_process_is_one_sentence():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    assert isinstance(explain_lost_processes(RuntimeError(gloo)), LostProcesses)
    assert explain_lost_processes(RuntimeError("shapes differ")) is None
