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
import time
from pathlib import Path

import pytest

from leansurgeon.cli.main import is_mine_to_say
from leansurgeon.errors import Diverged, LeanSurgeonError, OutOfMemory, Stopped, UsageError
from leansurgeon.training.processes import launch
from leansurgeon.training.processes.agree import LostProcesses, explain_lost_processes
from tests import conftest
from tests.support import training_interrupted as cut

ROOT = Path(__file__).parents[3]
SHORT = [
    part
    for key in ("train.duration=150st", "train.eval.every=75st", "train.log_every=5", "measure=null")
    for part in ("--set", key)
]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A small ViT for digits."""
    folder = tmp_path_factory.mktemp("start")
    conftest.build("vit", initializer_range=0.02).save_pretrained(folder / "lean")
    return folder


def _environment(folder: Path, **more: str) -> dict[str, str]:
    """Without what this test process may itself have been started with."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    return kept | threads | {"LEANSURGEON_CACHE": str(folder / "cache")} | more


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _losses(run: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if row["type"] == "train"]


@pytest.mark.slow
def test_torchrun_on_one_machine_and_on_two_nodes_trains_the_same(start, tmp_path):
    """One torchrun with two processes, and two torchruns with one each that meet; one of them speaks."""
    command = ["-m", "leansurgeon", "retrain", start / "lean", "-r", "digits-vit", *SHORT, "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    one = subprocess.run(
        [*torchrun, "--standalone", "--nproc-per-node", "2", *command, "-o", tmp_path / "one"],
        capture_output=True,
        text=True,
        timeout=600,
        env=_environment(start, ACCELERATE_MIXED_PRECISION="fp16"),
    )
    assert one.returncode == 0, one.stderr
    summary = json.loads(one.stdout)  # one document, though there are two processes
    assert summary["world_size"] == 2 and summary["steps"] == 150
    assert one.stderr.count("ACCELERATE_MIXED_PRECISION") == 1
    assert one.stderr.count("done in") == 1
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    nodes = [
        subprocess.Popen([*torchrun, *meet, *command, "-o", tmp_path / "two"], env=_environment(start))
        for _ in range(2)
    ]
    assert [node.wait(600) for node in nodes] == [0, 0]
    assert _losses(tmp_path / "one") == _losses(tmp_path / "two")


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


def _standin(folder: Path) -> dict[str, str]:
    """What a job sees of Slurm: two nodes of one task each."""
    folder.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    leansurgeon = folder / "leansurgeon"
    leansurgeon.write_text(f'#!/bin/bash\nexec {sys.executable} -m leansurgeon "$@"\n')
    leansurgeon.chmod(stat.S_IRWXU)
    job = {"SLURM_JOB_ID": str(_free_port()), "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
    return job | {"SLURM_JOB_NODELIST": "node[1-2]", "STANDIN": str(folder)}


@pytest.mark.slow
def test_the_slurm_example_saves_requeues_and_goes_on(start, tmp_path):
    slurm = _standin(tmp_path / "slurm")
    environment = _environment(start, **slurm)
    environment["PATH"] = f"{tmp_path / 'slurm'}{os.pathsep}{environment['PATH']}"
    script = ["bash", ROOT / "examples" / "slurm" / "retrain.sbatch", start / "lean", "digits-vit", *SHORT]
    run = tmp_path / "runs" / f"slurm-{slurm['SLURM_JOB_ID']}"
    job = subprocess.Popen(script, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 400
    while not ((run / "metrics.jsonl").is_file() and '"train"' in (run / "metrics.jsonl").read_text()):
        assert time.monotonic() < end and job.poll() is None, job.communicate()
        time.sleep(0.1)
    for task in (tmp_path / "slurm" / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    _, said = job.communicate(timeout=200)
    assert job.returncode == 75, said
    assert len(re.findall(r"\bafter step \d+", said)) == 1 and "Traceback" not in said
    assert f"requeue {slurm['SLURM_JOB_ID']}" in (tmp_path / "slurm" / "scontrol").read_text()
    again = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 150 and len(summary["resumed_after"]) == 1 and summary["world_size"] == 2
    assert [step for step, _ in _losses(run)] == list(range(5, 151, 5))


def _fails_on_one(folder) -> None:
    """Process 1 cannot read a sample of its own in the middle of an epoch."""

    def before(split: str) -> None:
        before.seen = getattr(before, "seen", 0) + 1
        if os.environ["RANK"] == "1" and before.seen == 20:
            raise UsageError("picture.jpg cannot be read.")

    try:
        cut.run(folder, before)
    except LeanSurgeonError as error:
        (folder / f"said-{os.environ['RANK']}").write_text(f"{type(error).__name__}: {error.message}")
        os._exit(error.exit_code)


def test_a_failure_on_one_process_ends_all_and_is_one_sentence_each(tmp_path):
    assert cut.processes(2, _fails_on_one, tmp_path) == [1, 2]
    assert (tmp_path / "said-1").read_text() == "UsageError: picture.jpg cannot be read."
    assert (tmp_path / "said-0").read_text().startswith("LostProcesses: ")
    # Of a training that we start ourselves, only the reason is told, even where it was written later.
    for rank, kind, message in (
        (0, "LostProcesses", "Another process"),
        (1, "UsageError", "picture.jpg cannot be read."),
    ):
        said = {"kinds": [kind], "message": message, "hint": None, "trace": ""}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(said))
    error = launch.read_verdict(tmp_path, tmp_path / "run")
    assert isinstance(error, UsageError) and error.message == "picture.jpg cannot be read."
    (tmp_path / "rank1.json").unlink()
    killed = launch.read_verdict(tmp_path, tmp_path / "run")
    assert re.search(r"\bworker process\b.*\bmemory\b", killed.message, re.S) and "--resume auto" in killed.hint


SAYS = {  # error, who says it of: process 0; 1 on the same machine; 8, the first of a second machine
    "usage": (UsageError("x"), (True, False, True)),
    "stopped": (Stopped("x"), (True, False, False)),
    "diverged": (Diverged("x"), (True, False, False)),
    "memory": (OutOfMemory("x"), (True, True, True)),
    "lost": (LostProcesses("x"), (True, False, False)),
}


@pytest.mark.parametrize("case", SAYS)
def test_who_says_an_error(case, monkeypatch):
    error, expected = SAYS[case]
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
    assert issubclass(LostProcesses, LeanSurgeonError)
