"""Finding runs and models, and surviving everything else that may lie in a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.report.evidence.collect import collect
from leansurgeon.report.evidence.run import run_of
from leansurgeon.report.rows.sections import sections
from leansurgeon.report.tables.table import render
from tests.support.report.report_fixtures import digits, summary, write

PLAN = {
    "before": {"stages": [{"depth": 16, "heads": 12, "head_dim": 64, "kv_heads": 12, "mlp_dim": 3072, "width": 768}]},
    "after": {"stages": [{"depth": 10, "heads": 24, "head_dim": 32, "kv_heads": 24, "mlp_dim": 3072, "width": 768}]},
    "parameters_before": {"total": 119_589_889},
    "parameters_after": {"total": 84_182_017, "attention": 23_000_000},
}
SURGERY = {"schema_version": 1, "source": {"name": "bert-crammed"}, "plan": PLAN}


def workspace_of(tmp_path: Path) -> Path:
    for made in digits():
        write(tmp_path / "runs" / "digits-vit" / f"{made['experiment']['arm']}-s{made['seed']}", made)
    return tmp_path / "runs"


def test_a_workspace_newest_first_at_most_three_deep(tmp_path: Path) -> None:
    root = workspace_of(tmp_path)
    write(root / "a" / "b" / "c", summary(experiment=None))
    write(root / "a" / "b" / "c2" / "too-deep", summary(experiment=None))
    write(root / ".hidden", summary(experiment=None))
    write(root / "digits-vit" / "lean-s0" / "model", SURGERY, "surgery.json")  # inside a run
    found = collect(workspace=root)
    assert len(found.of("run")) == 10 and not found.of("model") and not found.problems
    stamps = [e.evidence.finished for e in found.entries]
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
    assert [e.path.name for e in found.of("model")] == ["shrunk"]
    (row,) = sections(found.entries)[-1].rows
    assert (row.parameters, row.reference_parameters) == (84_182_017, 119_589_889)
    assert "-29.6 %" in render(sections(found.entries))
    # A model that is named is shown, trained or not.
    assert [e.kind for e in collect([root / "trained"]).entries] == ["model"]


@pytest.mark.parametrize("damage", [{"schema_version": 2}, {"proof": 7}, {"versions": {"x": 1}}, {"source": 5}])
def test_a_run_says_how_it_began_where_its_surgery_cannot_be_read_as_a_whole(damage, tmp_path: Path) -> None:
    run = summary(experiment=None)
    run["model"]["surgery"] = SURGERY | {"initialised": "transfer", "plan": PLAN | {"init": "transfer"}} | damage
    run["model"]["init_std"] = 0.001
    (entry,) = collect([write(tmp_path / "run", run)]).entries
    made = run_of(entry)
    assert entry.evidence.model.record is None and made.cut is None
    assert (made.began_trained, made.parameters_of_source, made.init_std) == (True, 119_589_889, None)


def test_named_paths_and_overlap(tmp_path: Path) -> None:
    root = workspace_of(tmp_path)
    assert len(collect([root / "digits-vit", root / "digits-vit" / "lean-s0"]).entries) == 9
    assert len(collect([root / "digits-vit" / "lean-s0"]).entries) == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"schema_version": 1, "mod', "not valid JSON"),
        ("[]", r"\bJSON object\b"),
        ("{}", r"\bleansurgeon\b"),
        ('{"schema_version": "1"}', r"\bleansurgeon\b"),
        ('{"schema_version": 7}', "has schema 7"),
        ('{"schema_version": 1}', "lacks model, task"),
        ('{"schema_version": 1, "model": {}, "task": {}}', "lacks task.metric"),
        ("[" * 100_000, "64 levels"),
        ("\xff\xfe\x00", "not UTF-8"),
        ('{"name": "\\ud800"}', r"\bsurrogate\b"),  # no page could be written with it
    ],
)
def test_foreign_summaries_get_one_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    root = workspace_of(tmp_path)
    (root / "broken").mkdir()
    (root / "broken" / "summary.json").write_bytes(content.encode("latin-1"))
    found = collect(workspace=root)
    assert len(found.entries) == 9
    (problem,) = found.problems
    assert re.search(sentence, problem) and str(root / "broken") in problem
    assert problem.endswith(".") and problem[-2].isalnum()  # one full stop, and nothing else
    with pytest.raises(UsageError, match=sentence):
        collect([root / "broken"])


def test_an_unfinished_run_is_said_and_not_searched(tmp_path: Path) -> None:
    root = workspace_of(tmp_path)
    (root / "now").mkdir()
    (root / "now" / "metrics.jsonl").touch()
    write(root / "now" / "model", SURGERY, "surgery.json")
    found = collect(workspace=root)
    assert not found.of("model")
    (one,) = found.unfinished
    assert (one.name, one.step, one.running) == ("now", None, False) and not found.problems


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no workspace"):
        collect(workspace=tmp_path / "runs")
    with pytest.raises(UsageError, match=rf"\brun\b.*{re.escape(str(tmp_path))}"):
        collect(workspace=tmp_path)
    with pytest.raises(UsageError, match="no folder"):
        collect([tmp_path / "nothing"])


def test_odd_values_become_gaps_not_crashes(tmp_path: Path) -> None:
    """Every value of a summary, one at a time, replaced by what a broken or hostile file may hold."""
    (whole,) = digits(seeds=(0,), arms=("lean",))

    def paths(data: dict, start: tuple = ()) -> list[tuple]:
        found = []
        for key, value in data.items():
            found.append((*start, key))
            if isinstance(value, dict):
                found += paths(value, (*start, key))
        return found

    for keys in paths(whole):
        for odd in (None, "x\x1b[31m", [], {}, -1, 1e400, True, 10**400, "9" * 300):
            data = json.loads(json.dumps(whole))
            inner = data
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = odd
            folder = write(tmp_path / "run", data)
            try:
                entries = collect([folder]).entries
            except UsageError:
                continue
            for style in ("table", "markdown", "csv", "json", "latex"):
                shown = render(sections(entries), style)
                assert "\x1b" not in shown, keys
            render(sections(entries), wide=True)
