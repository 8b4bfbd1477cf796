"""`leansurgeon run`: every shipped experiment end to end in its debug variant, and what orders the arms."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from leansurgeon import experiment
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Terminated, UsageError
from leansurgeon.experiment import side_by_side
from leansurgeon.experiment.arms import base_arm, choose_arms, list_wanted_shapes, wanted_shape_of
from leansurgeon.experiment.jobs import make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import as_a_bar, carry_out_job, drive, plan_of, running_line
from leansurgeon.progress import Screen, duration_text, rate_text, show_on
from leansurgeon.surgery.planning import plan
from leansurgeon.training.recipe.reading import list_shipped, load
from leansurgeon.training.recipe.schema import ExperimentRecipe
from tests.support import command_line
from tests.support.patience import family, left, working_until
from tests.support.processes.forks import commanded, forked, trainings_forked

EXPERIMENTS = [
    name
    for name in list_shipped()
    if load(name).task.name in ("digits", "fashion-mnist", "listops") and not name.startswith(("figure", "claim"))
] + ["austen-gpt"]  # others: test_recipes_paper
AS_TYPED = "digits-vit"


def made_up_fashion(folder):
    """Idx files in the real format: 300 and 100 random images."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 300), ("t10k", 100)):
        images = (
            struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + rng.integers(0, 256, (count, 28, 28), np.uint8).tobytes()
        )
        labels = struct.pack(">HBBI", 0, 8, 1, count) + (np.arange(count) % 10).astype(np.uint8).tobytes()
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))


def check_arms(recipe, by_arm):
    assert set(by_arm) == set(recipe.arms)
    lean, control = by_arm["lean"]["model"], by_arm["control"]["model"]
    assert lean["shape"]["stages"][0]["depth"] == control["shape"]["stages"][0]["depth"]
    assert lean["shape"]["stages"][0]["heads"] > control["shape"]["stages"][0]["heads"]
    assert abs(lean["parameters"] / control["parameters"] - 1) < 0.01
    assert all(s["kappa"] and s["before"] for s in by_arm.values())
    assert all(s["model"]["init_std"] and s["epochs"] for s in by_arm.values())
    # Transferred arms continue from the last weights of the original, not from those that evaluation chose.
    init = recipe.arms["lean"].init or "transfer"
    assert [by_arm[arm]["experiment"]["init"] for arm in ("original", "lean", "control")] == ["fresh", init, init]
    start = "original-s0/last" if init == "transfer" else recipe.source
    assert lean["source"].endswith(start) and control["source"] == lean["source"]


def as_typed(name, cwd):
    """In processes of their own, down to every proof."""
    run = [sys.executable, "-m", "leansurgeon", "run", name, "--debug", "--json"]
    env = {name: value for name, value in os.environ.items() if name != "HF_DEACTIVATE_ASYNC_LOAD"}
    return subprocess.run(run, cwd=cwd, env=env, capture_output=True, text=True)


def in_forks(name, cwd):
    """The same command, whose trainings are forks of this process."""
    with trainings_forked():
        return commanded("run", name, "--debug", "--json", cwd=cwd).wait()


@pytest.mark.parametrize(
    ("name", "how"),
    [(AS_TYPED, as_typed), pytest.param("austen-gpt", in_forks, marks=pytest.mark.slow)],
    ids=["digits", "austen"],
)
def test_a_shipped_experiment_runs_in_its_debug_variant(name, how, tmp_path, own_cache):
    done = how(name, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    recipe = load(name, debug=True)
    summaries = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("runs/*/*/summary.json"))]
    assert len(summaries) == len(recipe.arms)
    check_arms(recipe, {s["experiment"]["arm"]: s for s in summaries})
    assert document["schema_version"] == 1
    # The same command again takes everything over and trains nothing.
    again = command_line.leansurgeon("run", name, "--debug", cwd=tmp_path)
    assert re.search(rf"\b{len(recipe.arms)} trainings \(--force\b", again.stderr, re.S)
    assert max(map(len, again.stdout.splitlines())) <= 80
    report = command_line.leansurgeon("report", "runs", cwd=tmp_path)
    assert report.returncode == 0 and "control" in report.stdout


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in (AS_TYPED, "austen-gpt")])
def test_the_arms_of_every_other_experiment_train_in_their_debug_variant(name, tmp_path, own_cache):
    """Without the command, the processes and the proof, which the same command for another recipe has gone through."""
    sets = []
    if load(name).task.name == "fashion-mnist":
        made_up_fashion(tmp_path / "fashion")
        sets = [f"task.data={tmp_path / 'fashion'}"]
    recipe = load(name, sets, debug=True)
    prepare_data(recipe, lambda line: None)
    source = open_source(recipe.source, config_changes=recipe.source_config or None, weights=False)
    jobs = make_jobs(recipe, tmp_path / "runs", list_wanted_shapes(recipe, source), base_arm(recipe), parallel=1)
    made = [replace(jobs[arm, 0], prove=False, quiet=True, threads=1) for arm in recipe.arms]
    check_arms(recipe, {job.arm: carry_out_job(job).as_dict() for job in made})


def recipe(**changes):
    whole = {
        "name": "test",
        "kind": "experiment",
        "source": "digits-vit",
        "task": {"name": "digits"},
        "train": {"duration": "1st", "batch": 8, "optim": {"lr": 1e-3}},
        "arms": {"original": {}, "lean": {"heads": 8, "layers": 3, "mlp_dim": 128}, "control": {"control_of": "lean"}},
    }
    return ExperimentRecipe.model_validate(whole | changes)


@pytest.mark.parametrize(
    ("source", "lean"),
    [
        ("digits-vit", {"heads": 8, "layers": 3, "mlp_dim": 128}),
        ("bert-crammed", {"heads": 24, "layers": 10}),
        ("vit-b", {"heads": 16, "layers": 7, "mlp_dim": 1536}),
        ("lra/listops", {"heads": 4, "layers": 1}),
    ],
)
def test_a_control_has_the_depth_of_lean_the_heads_of_the_original_and_equal_parameters(source, lean):
    arms = {"original": {}, "lean": lean, "control": {"control_of": "lean"}}
    whole = recipe(source=source, arms=arms)
    opened = open_source(source)
    plans = {arm: plan(opened, wanted_shape_of(arm, whole, opened)) for arm in arms}
    stage = {arm: p.after.stages[0] for arm, p in plans.items()}
    assert stage["control"].depth == stage["lean"].depth
    assert stage["control"].heads == stage["original"].heads
    assert stage["control"].head_dim == stage["original"].head_dim
    totals = {arm: p.parameters_after.total for arm, p in plans.items()}
    one_unit = abs(totals["lean"] - totals["control"])
    assert one_unit <= 3 * stage["lean"].width * stage["lean"].depth  # within one MLP unit a layer


def test_an_impossible_arm_is_named_before_anything_runs(tmp_path):
    arms = {"original": {}, "lean": {"layers": 9}}
    with pytest.raises(UsageError, match=r"'lean'.*--layers.*\b9\b.*\b6\b"):
        experiment.run(recipe(arms=arms), tmp_path)
    with pytest.raises(UsageError, match=r"\bno arm\b.*`original: \{\}`"):
        experiment.run(recipe(arms={"lean": {"layers": 3}}), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lean", "asked", "made"),
    [
        ({"init": "fresh"}, ["lean"], ["lean"]),  # nothing of it comes from the original
        ({"init": "fresh"}, ["control"], ["control"]),  # solved for lean, which is not trained
        ({}, ["lean"], ["original", "lean"]),
        ({}, ["lean", "original"], ["original", "lean"]),
    ],
)
def test_arms_by_name_bring_the_original_where_they_are_cut_from_it(lean, asked, made):
    whole = recipe(arms={"original": {}, "lean": {"layers": 3} | lean, "control": {"control_of": "lean"}})
    wanted = list_wanted_shapes(whole, open_source("digits-vit"))
    assert choose_arms(whole, asked, wanted) == made
    assert choose_arms(whole, None, wanted) == list(whole.arms)


@pytest.mark.parametrize("names", [[], [""], ["lean", "lean"], ["leen"], ["lean", ""]])
def test_arms_that_are_none_end_before_anything_is_written(names, tmp_path):
    with pytest.raises(UsageError, match="original, lean, control"):
        experiment.run(recipe(), tmp_path, arms=names)
    assert list(tmp_path.iterdir()) == []


def test_only_the_named_arms_are_trained(tmp_path, own_cache):
    """One after the other, into one table; what is not named is neither trained anew nor left of other settings."""

    def run(*words):
        with trainings_forked():
            return commanded("run", "digits-vit", "--debug", "--set", "measure=null", *words, cwd=tmp_path).wait()

    def made():
        return {p.parent.name: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/*/summary.json")}

    done = run("--arms", "control-fresh")
    assert done.returncode == 0, done.stderr[-2000:]
    alone = made()
    assert (
        list(alone) == ["control-fresh-s0"]
        and "--arms" not in next(tmp_path.glob("runs/*/experiment.yaml")).read_text()
    )
    both = run("--arms", "original")
    assert both.returncode == 0 and re.search(r"^original .*\n(.*\n)*control", both.stdout, re.M)
    before = made()
    assert before.keys() == {"original-s0", *alone} and before["control-fresh-s0"] == alone["control-fresh-s0"]
    assert run("--arms", "original", "--force").returncode == 0
    after = made()
    assert after.keys() == before.keys() and after["control-fresh-s0"] == alone["control-fresh-s0"]
    assert after["original-s0"] > before["original-s0"]
    refused = run("--arms", "lean", "--set", "train.duration=3st")
    assert refused.returncode == 2 and "original" in refused.stderr


@pytest.mark.parametrize(
    ("how", "parallel"),
    [(signal.SIGINT, 2), (signal.SIGKILL, 1), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow)],
)
def test_no_training_outlives_its_experiment(how, parallel, tmp_path):
    process = commanded("run", "digits-vit", "--parallel", parallel, "--workspace", tmp_path / "ws", cwd=tmp_path)
    log = tmp_path / "ws/digits-vit/original-s0/metrics.jsonl"
    assert working_until(log.exists, [process.pid])  # however long this machine takes to import and to begin
    trainings = family(process.pid)
    process.send_signal(how)
    assert working_until(lambda: process.poll() is not None, [process.pid])  # trainings save first
    code, _, said = process.wait()
    assert code != 0 and len(trainings) >= 2
    assert working_until(lambda: not left(trainings), [one.pid for one in left(trainings)] or [os.getpid()])
    assert "Traceback" not in said
    assert how != signal.SIGINT or re.search(r"\bsame command\b.*\n$", said)
    assert not (log.parent / "summary.json").exists()


def test_what_is_done_already_needs_no_job(tmp_path):
    """A search of a trained model has nothing to train for the model itself."""
    opened = open_source("digits-vit")
    whole = recipe(measure=None)
    jobs = make_jobs(whole, tmp_path, list_wanted_shapes(whole, opened), "original", parallel=1)
    done = {("original", 0): None}
    told = []
    with trainings_forked():
        drive({("original", 0): None, ("lean", 0): replace(jobs["lean", 0], source="digits-vit", prove=False)}, done,
              "original", 1, 8, told.append, "transformers")  # fmt: skip
    assert done["lean", 0].steps == 1 and told[0].startswith("[2/2] lean, seed 0: top-1")


def test_trainings_side_by_side_say_how_far_they_are(tmp_path):
    whole = recipe(train={"duration": "30ep", "batch": 64, "optim": {"lr": 1e-3}}, retrain={}, seeds=[0, 1])
    opened = open_source("digits-vit")
    wanted = list_wanted_shapes(whole, opened)
    jobs = list(make_jobs(whole, tmp_path, wanted, "original", parallel=2).values())
    jobs[1].run.mkdir(parents=True)
    line = json.dumps({"type": "train", "step": 330}) + "\n"
    (jobs[1].run / "metrics.jsonl").write_text(line + '{"type": "train", "st')  # still being written
    both = r"\boriginal, seed 0 \(starting\); original, seed 1 \(step 330 of 660\)$"
    assert re.search(both, running_line(jobs[:2], samples=1437))
    assert running_line(jobs, samples=1437).endswith("; and 2 more")
    timed = recipe(train={"duration": "1h", "batch": 64, "optim": {"lr": 1e-3}}, retrain={}, seeds=[0, 1])
    jobs = list(make_jobs(timed, tmp_path, wanted, "original", parallel=2).values())
    alone = running_line(jobs[1:2], samples=1437)
    assert re.search(r"\boriginal, seed 1 \(step 330\)$", alone)  # nobody knows of how many


def test_a_line_comes_while_trainings_run(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "TELL_EVERY", 0.2)
    whole = load("digits-vit", debug=True)
    whole = whole.model_copy(update={"arms": {"original": whole.arms["original"]}})
    with trainings_forked():
        done = forked(lambda: experiment.run(whole, tmp_path, parallel=2, say=print), tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b0 of 1\b.*\boriginal, seed 0 \(", done.stdout, re.S), done.stdout


def test_a_failing_training_ends_the_experiment_with_its_own_error(tmp_path):
    with trainings_forked():
        done = commanded("run", "digits-vit", "--debug", "--set", "train.batch=100000", cwd=tmp_path).wait()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("found", [UsageError("One sentence."), RuntimeError("a defect")])
def test_a_training_that_is_ended_while_it_sends_its_error_says_nothing(found, monkeypatch, capfd):
    def fails(job):
        raise found

    sent = []

    class End:
        def send(self, answer):
            sent.append(answer)
            raise Terminated  # by the experiment, which has read it

    for name, stand_in in (("carry_out_job", fails), ("end_with", lambda alive: None), ("guard", lambda: None)):
        monkeypatch.setattr(side_by_side, name, stand_in)
    side_by_side.in_process(End(), None, None)
    assert len(sent) == 1 and str(found) in str(sent[0]) and capfd.readouterr() == ("", "")


def test_trainings_side_by_side_are_one_bar_on_a_terminal(tmp_path, monkeypatch):
    """Steps of all that are to be trained, without those of an earlier call; elsewhere nothing is drawn."""
    monkeypatch.setenv("COLUMNS", "100")
    whole = recipe(train={"duration": "30ep", "batch": 64, "optim": {"lr": 1e-3}}, retrain={}, seeds=[0, 1])
    jobs = make_jobs(whole, tmp_path, list_wanted_shapes(whole, open_source("digits-vit")), "original", parallel=2)
    first, second, *_, fourth = jobs
    done, now = {fourth: None}, [0.0]
    jobs[second].run.mkdir(parents=True)
    (jobs[second].run / "metrics.jsonl").write_text(json.dumps({"type": "train", "step": 330}) + "\n{")  # of 660

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    with show_on(Screen(stream=file, clock=lambda: now[0])), as_a_bar("rung 2", jobs, done, 1437) as look:
        now[0] = 100.0
        look()
        done[first] = None
        now[0] = 200.0
        look()
    whole_length = sum(plan_of(jobs[key], 1437).steps for key in jobs if key != fourth)
    for steps, seconds in ((330, 100), (330 + 660, 200)):
        left = duration_text(seconds * (whole_length - steps) / steps)
        assert f"rung 2, steps: {steps:,}/{whole_length:,}  {rate_text(steps / seconds, 'steps/s')}  eta {left}" in (
            file.getvalue()
        )
    assert file.getvalue().endswith("\x1b[2K")  # nothing of it is left
    plain = io.StringIO()
    with show_on(Screen(stream=plain)), as_a_bar("rung 2", jobs, done, 1437) as look:
        assert look is None
    assert plain.getvalue() == ""
