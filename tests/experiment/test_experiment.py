"""`leansurgeon run`: every shipped experiment end to end in its debug variant, and what orders the arms."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest

from leansurgeon import experiment
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.experiment import side_by_side
from leansurgeon.experiment.arms import base_arm, choose_arms, list_wanted_shapes
from leansurgeon.experiment.jobs import make_jobs, prepare_data
from leansurgeon.experiment.side_by_side import as_a_bar, carry_out_job, drive, running_line
from leansurgeon.progress import Screen, duration_text, rate_text, show_on
from leansurgeon.surgery.planning import plan
from leansurgeon.training.recipe.reading import load
from leansurgeon.training.recipe.schema import ExperimentRecipe
from tests.support import command_line
from tests.support.patience import family, left, working_until
from tests.support.processes.forks import commanded, trainings_forked

SHIPPED = ("digits-vit", "--debug", "--set", "arms.lean.calibrate=false")  # which takes most of the time


def check_arms(recipe, by_arm):
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


def in_forks(*words, cwd):
    """The command, whose trainings are forks of this process."""
    with trainings_forked():
        return commanded("run", *words, cwd=cwd).wait()


def summaries(folder):
    """By arm, the summary of each training and when it was written."""
    files = {p.parent.name.removesuffix("-s0"): p for p in folder.glob("runs/*/*/summary.json")}
    return {arm: (json.loads(file.read_text()), file.stat().st_mtime_ns) for arm, file in files.items()}


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


def test_a_shipped_experiment_runs_as_typed_arm_by_arm_and_as_a_whole(tmp_path, own_cache):
    """Into one table; what is done already is trained anew only where that is asked for."""
    alone = [sys.executable, "-m", "leansurgeon", "run", *SHIPPED, "--arms", "control-fresh"]
    env = {name: value for name, value in os.environ.items() if name != "HF_DEACTIVATE_ASYNC_LOAD"}
    done = subprocess.run(alone, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first = summaries(tmp_path)
    assert list(first) == ["control-fresh"]
    assert "--arms" not in next(tmp_path.glob("runs/*/experiment.yaml")).read_text()
    done = in_forks(*SHIPPED, "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["schema_version"] == 1, done.stderr[-2000:]
    recipe, whole = load(SHIPPED[0], debug=True), summaries(tmp_path)
    assert set(whole) == set(recipe.arms) and whole["control-fresh"] == first["control-fresh"]
    check_arms(recipe, {arm: made for arm, (made, _) in whole.items()})
    again = command_line.leansurgeon("run", *SHIPPED, cwd=tmp_path)
    assert re.search(rf"\b{len(recipe.arms)} trainings \(--force\b", again.stderr, re.S)
    assert max(map(len, again.stdout.splitlines())) <= 80
    assert re.search(r"^original .*\n(.*\n)*control", again.stdout, re.M)
    assert in_forks(*SHIPPED, "--arms", "original", "--force", cwd=tmp_path).returncode == 0
    after = summaries(tmp_path)
    assert [arm for arm, made in after.items() if made != whole[arm]] == ["original"]
    refused = in_forks(*SHIPPED, "--arms", "lean", "--set", "train.duration=3st", cwd=tmp_path)
    assert refused.returncode == 2 and "original" in refused.stderr


@pytest.mark.slow
def test_an_experiment_of_language_runs_in_its_debug_variant(tmp_path, own_cache):
    done = in_forks("austen-gpt", "--debug", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    check_arms(load("austen-gpt", debug=True), {arm: made for arm, (made, _) in summaries(tmp_path).items()})


def test_the_arms_of_another_experiment_train_in_their_debug_variant(tmp_path, own_cache):
    """Without the command, the processes and the proof, which the same command for another recipe has gone through."""
    whole = load("listops-small", ["arms.control.calibrate=false"], debug=True)
    prepare_data(whole, lambda line: None)
    source = open_source(whole.source, config_changes=whole.source_config or None, weights=False)
    jobs = make_jobs(whole, tmp_path / "runs", list_wanted_shapes(whole, source), base_arm(whole), parallel=1)
    made = [replace(jobs[arm, 0], prove=False, quiet=True, threads=1) for arm in ("original", "lean", "control")]
    check_arms(whole, {job.arm: carry_out_job(job).as_dict() for job in made})


@pytest.mark.parametrize(
    ("source", "lean"),
    [
        ("digits-vit", {"heads": 8, "layers": 3, "mlp_dim": 128}),
        ("bert-crammed", {"heads": 24, "layers": 10}),
    ],
)
def test_a_control_has_the_depth_of_lean_the_heads_of_the_original_and_equal_parameters(source, lean):
    arms = {"original": {}, "lean": lean, "control": {"control_of": "lean"}}
    opened = open_source(source)
    wanted = list_wanted_shapes(recipe(source=source, arms=arms), opened)
    plans = {arm: plan(opened, shape) for arm, shape in wanted.items()}
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


@pytest.mark.parametrize(
    ("how", "trainings_are"),
    [
        (signal.SIGINT, trainings_forked),
        (signal.SIGKILL, nullcontext),  # forks would hold the pipe that says that the experiment has ended
        pytest.param(signal.SIGTERM, nullcontext, marks=pytest.mark.slow),
    ],
)
def test_no_training_outlives_its_experiment(how, trainings_are, tmp_path):
    words = ["--parallel", 1 + (how == signal.SIGINT), "--set", "train.duration=9999ep", "--workspace", tmp_path / "ws"]
    with trainings_are():
        process = commanded("run", "digits-vit", *words, cwd=tmp_path)
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


def test_trainings_side_by_side_say_how_far_they_are(under_way):
    jobs = list(under_way.values())
    both = r"\boriginal, seed 0 \(starting\); original, seed 1 \(step 330 of 660\)$"
    assert re.search(both, running_line(jobs[:2], samples=1437))
    assert running_line(jobs, samples=1437).endswith("; and 2 more")
    timed = recipe(train={"duration": "1h", "batch": 64, "optim": {"lr": 1e-3}}, retrain={})
    alone = running_line([replace(jobs[1], experiment=timed)], samples=1437)
    assert re.search(r"\boriginal, seed 1 \(step 330\)$", alone)  # nobody knows of how many


def test_a_failing_training_ends_the_experiment_with_its_own_error(tmp_path):
    with trainings_forked():
        done = commanded("run", "digits-vit", "--debug", "--set", "train.batch=100000", cwd=tmp_path).wait()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


def test_trainings_side_by_side_are_one_bar_on_a_terminal(under_way, monkeypatch):
    """Steps of all that are to be trained, without those of an earlier call; elsewhere nothing is drawn."""
    monkeypatch.setenv("COLUMNS", "100")
    first, *_, last = under_way
    done, now = {last: None}, [0.0]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    with show_on(Screen(stream=file, clock=lambda: now[0])), as_a_bar("rung 2", under_way, done, 1437) as look:
        now[0] = 100.0
        look()
        done[first] = None
        now[0] = 200.0
        look()
    whole_length = 5 * 660
    for steps, seconds in ((330, 100), (330 + 660, 200)):
        left = duration_text(seconds * (whole_length - steps) / steps)
        shown = f"rung 2, steps: {steps:,}/{whole_length:,}  {rate_text(steps / seconds, 'steps/s')}  eta {left}"
        assert shown in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")  # nothing of it is left
    plain = io.StringIO()
    with show_on(Screen(stream=plain)), as_a_bar("rung 2", under_way, done, 1437) as look:
        assert look is None
    assert plain.getvalue() == ""


def test_what_is_done_already_needs_no_job_and_a_line_comes_while_the_rest_is_trained(tmp_path, monkeypatch):
    """A search of a trained model has nothing to train for the model itself."""
    monkeypatch.setattr(side_by_side, "TELL_EVERY", 0.05)
    whole = recipe(measure=None)
    jobs = make_jobs(whole, tmp_path, list_wanted_shapes(whole, open_source("digits-vit")), "original", parallel=1)
    lean = replace(jobs["lean", 0], source="digits-vit", prove=False)
    done, told = {("original", 0): None}, []
    with trainings_forked():
        drive({**done, ("lean", 0): lean}, done, "original", 2, 8, told.append, "transformers")
    assert done["lean", 0].steps == 1 and told[-1].startswith("[2/2] lean, seed 0: top-1")
    assert told[0].startswith("1 of 2 done, running: lean, seed 0 (")


@pytest.fixture
def under_way(tmp_path):
    """The jobs of three arms with two seeds, of which the second has logged half of its 660 steps."""
    whole = recipe(train={"duration": "30ep", "batch": 64, "optim": {"lr": 1e-3}}, retrain={}, seeds=[0, 1])
    jobs = make_jobs(whole, tmp_path, list_wanted_shapes(whole, open_source("digits-vit")), "original", parallel=2)
    run = jobs["original", 1].run
    run.mkdir(parents=True)
    line = json.dumps({"type": "train", "step": 330}) + "\n"
    (run / "metrics.jsonl").write_text(line + '{"type": "train", "st')  # still being written
    return jobs
