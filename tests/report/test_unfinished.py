"""Trainings without an end: they are shown, with the line that goes on with them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from leansurgeon.report.collect import collect
from leansurgeon.report.page.page import page
from leansurgeon.report.sections import sections
from leansurgeon.report.tables.render import render
from leansurgeon.training.runs import folder as runfolder
from tests.support.report.html_reading import Page
from tests.support.report.report_fixtures import summary, write
from tests.support.report.report_workspace import surgery

STEP = '{"type": "train", "step": %d, "loss": 1.0}\n'


def interrupted(run: Path, steps: int, first_line: str = "") -> Path:
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(STEP % i for i in range(10, steps + 1, 10)) + '{"type": "tr')
    (run / "recipe.yaml").write_text(f"{first_line}name: x\n")
    return run


def checkpointed(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")


def test_a_run_that_was_interrupted_is_shown_with_the_line_that_resumes_it(tmp_path):
    root = tmp_path / "my runs"
    call = f"leansurgeon retrain 'my models/a' --recipe {shlex.quote(str(root / 'one' / 'recipe.yaml'))}"
    checkpointed(interrupted(root / "one", 330, f"# {call}\n"), 300)
    interrupted(root / "two", 0, "# leansurgeon retrain b --recipe r.yaml\n")
    interrupted(root / "old", 20)  # of a version that noted nothing
    found = {one.name: one for one in collect(workspace=root).unfinished}
    assert [(one.step, one.running) for one in found.values()] == [(20, False), (330, False), (None, False)]
    assert found["one"].resume == f"{call} --resume {shlex.quote(str(root / 'one'))}"
    # Without a checkpoint it starts anew, in its own folder.
    anew = f"leansurgeon retrain b --recipe r.yaml -o {shlex.quote(str(root / 'two'))} --resume auto"
    assert found["two"].resume == anew
    assert shlex.split(found["old"].resume)[:3] == ["leansurgeon", "retrain", "MODEL"]


def test_what_somebody_else_noted_is_one_command(tmp_path):
    """The line is shown to be typed again: a shell must read one command in it, whoever wrote the run's recipe."""
    for name, noted in (("more", "leansurgeon retrain a; touch b $(touch c) `d` | e"), ("half", "leansurgeon 'a")):
        interrupted(tmp_path / name, 20, f"# {noted}\n")
    shown = {one.name: one.resume for one in collect(workspace=tmp_path).unfinished}
    words = shlex.split(shown["more"])
    assert words[:5] == ["leansurgeon", "retrain", "a;", "touch", "b"] and shlex.join(words) == shown["more"]
    assert shlex.split(shown["half"])[:3] == ["leansurgeon", "retrain", "MODEL"]


def test_an_arm_goes_on_with_its_experiment(tmp_path):
    arm = interrupted(tmp_path / "digits-vit" / "lean-s0", 50)
    checkpointed(arm, 50)
    (tmp_path / "digits-vit" / "starts").mkdir()
    assert collect([tmp_path]).unfinished[0].resume == ""  # nobody noted what called it
    file = tmp_path / "digits-vit" / "experiment.yaml"
    file.write_text("# leansurgeon run digits-vit --set train.duration=3ep\nkind: experiment\n")
    assert collect([tmp_path]).unfinished[0].resume == "leansurgeon run digits-vit --set train.duration=3ep"
    file.write_text("kind: experiment\n")
    assert collect([tmp_path]).unfinished[0].resume == f"leansurgeon run {file}"


def test_every_form_of_the_report_has_it(tmp_path):
    write(tmp_path / "done", summary(experiment=None))
    interrupted(tmp_path / "broken", 330, "# leansurgeon retrain a --recipe b\n")
    found = collect([tmp_path])
    made, line = sections(found.runs), found.unfinished[0].resume
    for form in ("table", "markdown", "latex"):
        assert line in render(made, form, unfinished=found.unfinished), form
    document = json.loads(render(made, "json", unfinished=found.unfinished))
    (one,) = document["unfinished"]
    assert (one["name"], one["step"], one["running"], one["resume"]) == ("broken", 330, False, line)
    shown = Page(page(made, found))
    assert line in shown.text and "step 330" in shown.text and not shown.wrong
    # Where nothing else is there, that is the report.
    alone = collect([tmp_path / "broken"])
    assert render(sections(alone.runs), unfinished=alone.unfinished).endswith(line)
    assert line in Page(page([], alone)).text


def test_one_that_is_being_trained_now_is_not_to_be_resumed(tmp_path):
    run = interrupted(tmp_path / "now", 20, "# leansurgeon retrain a --recipe b\n")
    handle = runfolder.hold(run)
    try:
        found = collect([tmp_path])
        assert found.unfinished[0].running and "resume" not in render([], unfinished=found.unfinished)
    finally:
        runfolder.release(handle)


def test_a_run_is_called_by_its_folder_and_never_model(tmp_path, monkeypatch):
    def names(*folders: Path) -> list[str]:
        return sorted(row.name for row in sections(collect(folders).runs)[0].rows)

    folder = write(tmp_path / "smol" / "model", surgery("lean"), "surgery.json")
    assert names(folder) == ["smol"]
    monkeypatch.chdir(folder)
    assert names(Path()) == names(Path("../../smol")) == ["smol"]
    other = write(tmp_path / "x" / "smol", surgery("lean"), "surgery.json")
    assert names(folder.parent, other) == ["smol/model", "x/smol"]
