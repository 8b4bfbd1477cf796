"""What stands under `decided` in surgery.json: written as its readers know it, and read however odd it is."""

import json
from dataclasses import replace

import pytest

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.record import DamagedRecord, Origin, SurgeryRecord
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.checkpoints.recorded.part import Recorded, kinds

# As versions before these values wrote it; the order is that of the file.
TEXT = (
    """{"kept_heads": {"0": [1, 2]}, "calibration": {"name": "a.txt,b.txt", "says": "2 files", "sha256": "%s",
"samples": {"fit": 8, "guard": 2}, "sources": [{"name": "a.txt", "says": "", "sha256": "cd", "samples": {}}],
"asked": 8}, "criterion": "even", "layers": [0, 2], "evidence": {}, "candidates": [{"kept": [0, 2],
"criterion": "even", "attention": true, "later": false, "guard_error": 0.5, "guard_divergence": 0.25,
"guard_loss": 2.0, "judged_by": 0.25, "pieces": 2, "left_out": true, "data": "part"}], "healing": {"attention": true,
"later": false, "guard_error": 0.5, "judged_by": 0.5, "local": {"cuts": [{"first": 1,
"spans": [{"until": 2, "steps": 3, "guard_before": 0.5, "guard_after": 0.25, "kept": true, "seconds": 1.5}]}],
"kept": true, "before": 0.5, "after": 0.25, "passes": 1.25}}, "decisions": [{"layer": 1, "from": 2, "until": 3,
"split": {"kept": 0.75, "error_split": 0.5}, "mlp": {"ridge": 0.1, "re_solved": true, "guard_without_trim": 0.5,
"guard_after": 0.25}, "refit": {"down": {"kept": true, "ridge": 0.1, "guard_before": 0.5, "guard_after": 0.25,
"fit_after": 0.125, "tokens": 96, "tried": {"0.1": 0.25}, "block_before": 0.5, "block_after": 0.375}}}, {"layer": 2,
"from": 4, "until": 4, "heads": {"ridge": null, "re_solved": false, "guard_without_trim": 0.5, "guard_after": 0.5,
"kept": [0, 3]}, "refit": "no way"}], "changed_tensors": 3, "passes": 2.5, "tokens": 900,
"held_back": ["5 steps"], "steps_taken_over": 2, "seconds": 1.0, "importance": {"by_head":
[[0.5, 0.25]]}, "verified": {"by": "source", "source": "m", "differing": [], "left_out": ["x"]}}""".replace("\n", " ")
    % ("ab" * 32)
)


def from_fields(value):
    """The same, as if nothing of it had been read."""
    if isinstance(value, Recorded):
        return replace(value, **{one.name: from_fields(getattr(value, one.name)) for _, one, _ in kinds(type(value))})
    return tuple(map(from_fields, value)) if isinstance(value, tuple) else value


def test_it_is_written_as_the_file_has_always_held_it():
    found = Decisions.from_dict(json.loads(TEXT))
    assert json.dumps(from_fields(found).as_dict()) == TEXT == json.dumps(found.as_dict())
    assert (found.layers, found.kept_heads, found.calibration.samples["fit"]) == ((0, 2), {"0": (1, 2)}, 8)
    assert found.candidates[0].kept == (0, 2) and found.decisions[1].refit == "no way"
    assert found.decisions[0].refit.kept == ("down",) and not Decisions() and Decisions().as_dict() == {}


def test_what_was_read_goes_on_unchanged_until_it_is_changed(tmp_path):
    later = json.loads(TEXT) | {"of a later version": [1], "criterion": 7, "passes": "many"}
    found = Decisions.from_dict(later)
    assert found.as_dict() == later and (found.criterion, found.passes) == ("", None)
    other = replace(found, kept_heads={})
    assert "kept_heads" not in other.as_dict() and "of a later version" not in other.as_dict()
    kept = record.write(tmp_path, SurgeryRecord(Origin("m"), decided=found))
    assert record.read(tmp_path).decided.as_dict() == kept.decided.as_dict() == later


@pytest.mark.parametrize("odd", [None, "x", [], {}, [[]], {"kept": 1}, [{"kept": "x"}], float("inf")])
def test_nothing_odd_within_it_is_damage(odd):
    data = {key: odd for key in json.loads(TEXT)}
    inside = ("kept", "refit", "fit", "spans", "from", "judged_by", "guard_error", "by_head")
    deep = {key: [{k: odd for k in inside}] for key in data}
    parts = {key: {k: odd for k in inside} for key in ("healing", "importance")}
    for said in (data, deep, deep | parts, {"healing": data, "decisions": [data], "candidates": [data]}):
        made = SurgeryRecord.from_dict({"source": {"name": "m"}, "decided": said}).decided
        assert made.as_dict() == said
        anew = from_fields(made)
        assert anew == made == Decisions.from_dict(json.loads(json.dumps(anew.as_dict(), allow_nan=False)))


def test_what_is_no_object_is_damage():
    with pytest.raises(DamagedRecord):
        SurgeryRecord.from_dict({"source": {"name": "m"}, "decided": [1]})
