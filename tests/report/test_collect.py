"""Finding runs and models, and surviving everything else that may lie in a folder."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.report.collect import collect
from leansurgeon.report.runs import Run, describe_comparison, describe_proof
from leansurgeon.report.sections import sections
from leansurgeon.report.tables.render import render
from tests.support.report.report_fixtures import digits, summary, write

PLAN = {
    "before": {"stages": [{"depth": 16, "heads": 12, "head_dim": 64, "kv_heads": 12, "mlp_dim": 3072, "width": 768}]},
    "after": {"stages": [{"depth": 10, "heads": 24, "head_dim": 32, "kv_heads": 24, "mlp_dim": 3072, "width": 768}]},
    "parameters_before": {"total": 119_589_889},
    "parameters_after": {"total": 84_182_017, "attention": 23_000_000},
}
SURGERY = {"schema_version": 1, "source": {"name": "bert-crammed"}, "plan": PLAN}


def test_a_workspace_newest_first_at_most_three_deep(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for made in digits():
        write(root / "digits-vit" / f"{made['experiment']['arm']}-s{made['seed']}", made)
    write(root / "a" / "b" / "c", summary(experiment=None))
    write(root / "a" / "b" / "c2" / "too-deep", summary(experiment=None))
    write(root / ".hidden", summary(experiment=None))
    write(root / "digits-vit" / "lean-s0" / "model", SURGERY, "surgery.json")  # inside a run
    found = collect(workspace=root)
    assert [run.kind for run in found.runs] == ["run"] * 10 and not found.problems
    stamps = [run.summary.finished for run in found.runs]
    assert stamps == sorted(stamps, reverse=True)


def test_models_without_a_run(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write(root / "shrunk", SURGERY, "surgery.json")
    write(root / "trained", SURGERY | {"created": "today"}, "surgery.json")
    write(root / "starts" / "lean-s0", SURGERY, "surgery.json")
    run = summary(experiment=None)
    run["model"]["surgery"] = SURGERY | {"created": "today"}
    write(root / "run", run)
    found = collect(workspace=root)
    assert [run.path.name for run in found.runs if run.kind == "model"] == ["shrunk"]
    (row,) = sections(found.runs)[-1].rows
    assert (row.parameters, row.reference_parameters) == (84_182_017, 119_589_889)
    assert "-29.6 %" in render(sections(found.runs))
    # A model that is named is shown, trained or not.
    assert [run.kind for run in collect([root / "trained"]).runs] == ["model"]


@pytest.mark.parametrize("damage", [{"proof": 7}, {"versions": {"x": 1}}, {"source": 5}])
def test_a_run_says_how_it_began_where_its_surgery_cannot_be_read_as_a_whole(damage, tmp_path: Path) -> None:
    run = summary(experiment=None)
    run["model"]["surgery"] = SURGERY | {"initialised": "transfer", "plan": PLAN | {"init": "transfer"}} | damage
    run["model"]["init_std"] = 0.001
    (made,) = collect([write(tmp_path / "run", run)]).runs
    assert made.summary.model.record is None and made.cut is None
    assert (made.began_trained, made.parameters_of_source) == (True, 119_589_889)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"schema_version": 1, "mod', "not valid JSON"),
        ("[]", r"\bJSON object\b"),
        ('{"schema_version": "1"}', r"\bleansurgeon\b"),
        ('{"schema_version": 7}', "has schema 7"),
        ('{"schema_version": 1, "model": {}, "task": {}}', "lacks task.metric"),
        ("[" * 100_000, "recursion"),
        ("\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_foreign_summaries_get_one_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    write(tmp_path / "whole", summary())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "summary.json").write_bytes(content.encode("latin-1"))
    found = collect(workspace=tmp_path)
    assert len(found.runs) == 1
    (problem,) = found.problems
    assert re.search(sentence, problem) and str(tmp_path / "broken") in problem
    assert problem.endswith(".") and problem[-2].isalnum()  # one full stop, and nothing else
    with pytest.raises(UsageError, match=sentence):
        collect([tmp_path / "broken"])


@pytest.mark.parametrize("call", ["is_file", "iterdir"])
def test_a_folder_that_the_system_keeps_shut_costs_its_row_and_a_warning(tmp_path, monkeypatch, call) -> None:
    """As it is for one who is not root: whatever is asked of a folder without permission is refused."""
    write(tmp_path / "whole", summary())
    shut = tmp_path / "shut"
    shut.mkdir()
    allowed = getattr(Path, call)

    def refused(self, *args, **kwargs):
        if self == shut or shut in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return allowed(self, *args, **kwargs)

    monkeypatch.setattr(Path, call, refused)
    found = collect(workspace=tmp_path)
    assert len(found.runs) == 1
    (problem,) = found.problems
    assert str(shut) in problem and problem.endswith("cannot be read: Permission denied.")


def test_an_unfinished_run_is_said_and_not_searched(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    (tmp_path / "now" / "metrics.jsonl").touch()
    write(tmp_path / "now" / "model", SURGERY, "surgery.json")
    found = collect(workspace=tmp_path)
    (one,) = found.unfinished
    assert (one.name, one.step, one.running) == ("now", None, False) and not found.problems and not found.runs


def run(tmp_path: Path, document: dict, name: str = "summary.json") -> Run:
    """What a report knows of a folder that holds this file alone."""
    (found,) = collect([write(tmp_path / "folder", document, name)]).runs
    return found


def test_what_is_known_of_a_training(tmp_path: Path) -> None:
    stages = [{"depth": 4, "heads": 2, "head_dim": 8, "mlp_dim": 64, "width": 32}, {"depth": 8, "heads": "x"}]
    one = summary(experiment=None)
    one["model"] |= {"shape": {"stages": stages}, "init_std": 0.02, "parts": {"mlp": 7}}
    one["task"] |= {"name": "glue", "data": {"task": "sst2"}, "metric_label": None, "eval_samples": 20_000}
    made = run(tmp_path, one)
    assert (made.kind, made.cut, made.began_trained) == ("run", None, False)
    assert made.shape == {"depth": "4,8", "heads": "2,?", "head_dim": "8,?", "mlp_dim": "64,?"}
    assert made.parts == {"embeddings": None, "attention": None, "mlp": 7, "rest": None}
    assert (made.glue_task, made.task.label, made.task.decimals) == ("sst2", "accuracy", 2)
    one["task"] |= {"name": "digits", "eval_samples": 19_999}
    assert (run(tmp_path, one).glue_task, run(tmp_path, one).task.decimals) == ("", 1)
    for odd in ("x", [], {"stages": []}, {"stages": "x"}, {"stages": {"0": 1}}):
        one["model"]["shape"] = odd
        assert run(tmp_path, one).shape is None


def test_what_is_known_of_a_cut(tmp_path: Path) -> None:
    judged = {"brown": {"done": False, "why": "none"}}
    compared = {"done": True, "data": "noise", "rows": 3, "cosine": 0.5, "relative_error": 0.25, "scored": 9}
    compared |= {"loss": {"source": 1.0, "result": 2.0}}
    proof = {"loaded_with": "transformers.X", "parameters": 1234, "compared": compared}
    made = run(tmp_path, SURGERY | {"created": "2026-01-02", "judged": judged, "proof": proof}, "surgery.json")
    assert (made.kind, made.task, made.summary.finished) == ("model", None, "2026-01-02")
    assert (made.summary.model.parameters, made.parameters_of_source) == (84_182_017, 119_589_889)
    assert made.parts == {"embeddings": None, "attention": 23_000_000, "mlp": None, "rest": None}
    assert made.shape == {"depth": "10", "heads": "24", "head_dim": "32", "mlp_dim": "3072"}
    assert made.cut.source.name == "bert-crammed" and made.cut.plan.before != made.cut.plan.after
    assert "transformers.X" in describe_proof(made.cut) and "1,234" in describe_proof(made.cut)
    assert re.search(r"0\.25\b.*\b0\.5000\b.*\b2\.000\b.*\b1\.000\b", describe_comparison(made.cut))
    assert [name for name, _ in made.judged] == ["brown"]
    same = run(tmp_path, SURGERY | {"plan": PLAN | {"after": PLAN["before"]}}, "surgery.json")
    assert (
        same.cut.plan.before == same.cut.plan.after and describe_proof(same.cut) == describe_comparison(same.cut) == ""
    )
    plain = run(tmp_path, SURGERY | {"plan": {}}, "surgery.json")
    assert plain.cut is plain.parts is plain.shape is None


def test_odd_values_become_gaps_not_crashes(tmp_path: Path) -> None:
    """Every value of a summary, one at a time, replaced by what a broken or hostile file may hold."""
    whole = summary()

    def paths(data: dict, start: tuple = ()) -> list[tuple]:
        found = []
        for key, value in data.items():
            found.append((*start, key))
            if isinstance(value, dict):
                found += paths(value, (*start, key))
        return found

    shown = 0
    for keys in paths(whole):
        for odd in (None, "x\x1b[31m", [], 1e400, 10**400):
            data = json.loads(json.dumps(whole))
            inner = data
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = odd
            try:
                runs = collect([write(tmp_path / "run", data)]).runs
            except UsageError:
                continue
            made = sections(runs)
            assert all("\x1b" not in render(made, style) for style in ("table", "json", "latex")), keys
            shown += 1
    assert shown > 200
