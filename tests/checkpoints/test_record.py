"""surgery.json: one typed form, one reader, one writer."""

import json
import os
from dataclasses import replace

import pytest

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.record import (
    Comparison,
    DamagedRecord,
    Embeddings,
    Origin,
    PairedFigure,
    PlanRecord,
    Proof,
    SurgeryRecord,
)
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.shape import Shape, Stage

STAGE = Stage(depth=2, heads=4, head_dim=8, kv_heads=4, mlp_dim=48, width=32)
PLAN = {
    "before": Shape((STAGE,)).as_dict(),
    "after": Shape((STAGE,)).as_dict(),
    "layers": [0, 3],
    "operators": [{"name": "drop-layers", "exactness": "near", "says": "two of four", "settings": {"kept": [0, 3]}}],
}
COMPARED = Comparison(
    data="noise", rows=3, cosine=0.5, spread=1.0, loss=PairedFigure(1.0, 2.0), embeddings=Embeddings(0.9, 0.8, 4)
)


def whole() -> SurgeryRecord:
    first = SurgeryRecord(Origin("digits-vit", "preset", "digits-vit"), initialised="fresh")
    return SurgeryRecord(
        Origin("some/model", "hub", sha256={"model.safetensors": "ab" * 32}, notes=("a note",)),
        plan=PlanRecord.from_dict(PLAN),
        created="2026-01-31T10:00:00+00:00",
        initialised="transfer",
        history=({"source": {"name": "digits-vit"}, "operators": [], "seed": 0},),
        decided=Decisions(kept_heads={"0": (1, 2)}),
        versions={"leansurgeon": "0.1.0"},
        proof=Proof("transformers.X.from_pretrained", 1234, (1, 2), compared=COMPARED),
        judged={"mine": COMPARED, "other": Comparison(done=False, why="no reason")},
        source_config={"model_type": "vit"},
        source_surgery=first,
        restored=first,
        files=("README.md", "surgery.json"),
        other={"of_a_later_version": [1]},
    )


def test_what_is_written_is_what_is_read(tmp_path):
    made = record.write(tmp_path, whole())
    found = record.read(tmp_path)
    assert found == made and found.as_dict() == json.loads((tmp_path / "surgery.json").read_text())
    assert (found.plan.after, found.plan.layers) == (Shape((STAGE,)), (0, 3))
    assert found.plan.operators[0].settings == {"kept": [0, 3]}
    assert found.proof.compared.loss.result == 2.0 and found.judged["other"].why == "no reason"
    assert record.read(tmp_path / "nowhere") is record.read_if_whole(tmp_path / "nowhere") is None
    assert record.read_if_whole(tmp_path) == made
    assert os.listdir(tmp_path) == ["surgery.json"]


def test_a_plan_is_written_from_its_fields_as_it_was_read():
    head = {"source": "m", "architecture": "vit", "inferred": {"tower": "vision"}, "head_policy": 16, "why": "asked"}
    method = {"layers": "auto", "keep": None, "heal": "local"}
    tail = {"parameters_before": {"mlp": 2, "total": 3}, "parameters_after": {"total": 3}, "saved_by": {"mlp": 0}}
    flops = {"flops_before": None, "flops_after": {"total": 5}, "flops_saved_by": None}
    said = head | {"init": "transfer", "seed": 0, "method": method, "calibrated": False, "class_attention": True}
    said |= PLAN | {"exactness": "near"} | tail | flops
    found = PlanRecord.from_dict(said)
    assert json.dumps(replace(found, seed=0).as_dict()) == json.dumps(said) and found.head_policy == 16
    odd = PlanRecord.from_dict(PLAN | {"calibrated": "x", "parameters_after": 3, "of a later version": 1})
    assert (odd.calibrated, odd.parameters_after) == (False, {}) and odd.as_dict()["of a later version"] == 1


def test_where_a_model_comes_from_in_the_first_place():
    first = {"source": {"name": "a", "preset": "digits-vit"}}, {"source": {"name": "b", "preset": "vit-b"}}
    assert SurgeryRecord(Origin("x", "preset", "vit-l"), history=first).preset == "digits-vit"
    assert SurgeryRecord(Origin("vit-b", "preset", "vit-b")).preset == "vit-b"
    assert SurgeryRecord(Origin("some/model", "hub")).preset == ""
    assert SurgeryRecord(Origin("x"), history=({"source": "x"},)).preset == ""


def test_operators_are_compared_as_they_are_called():
    """`undo` knows its operators by name, and none that only looks alike."""
    step = {"name": "widen-mlp ", "exactness": "exact\u200b", "says": " wider\x1b"}
    (made,) = PlanRecord.from_dict({"operators": [step]}).operators
    assert (made.name, made.exactness, made.says) == ("widen-mlp ", "exact\u200b", "wider?")


def test_a_trained_model_keeps_the_record_without_the_list_of_files():
    found = whole().as_trained()
    assert found.initialised == "trained" and "files" not in found.as_dict() and found.learned
    assert not whole().source_surgery.learned


DAMAGED = [
    b"",
    b"{}",
    b"[" * 100_000,
    b'{"source": 5}',
    b'{"source": {"name": 5}}',
    b'{"source": {"name": "a"}, "plan": {"after": {"stages": [{}]}}}',
    b'{"source": {"name": "a"}, "plan": {"operators": [{"name": "x"}]}}',
    b'{"source": {"name": "a"}, "plan": {"layers": [true]}}',
    b'{"source": {"name": "a"}, "history": [1]}',
    b'{"source": {"name": "a"}, "versions": {"torch": 2}}',
    b'{"source": {"name": "a", "sha256": {"model.safetensors": null}}}',
    b'{"source": {"name": "a"}, "proof": {"loaded_with": "x", "parameters": 1, "loss_sum": true}}',
    b'{"source": {"name": "a"}, "source_surgery": {}}',
    b'{"source": {"name": "a"}, "schema_version": "1"}',
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damage_is_one_kind_of_error(content, tmp_path):
    (tmp_path / "surgery.json").write_bytes(content)
    with pytest.raises(DamagedRecord) as error:
        record.read(tmp_path)
    assert error.value.exit_code == 3 and str(tmp_path) in error.value.message and len(error.value.message) < 300
    assert record.read_if_whole(tmp_path) is None


def test_what_is_no_file_is_damage(tmp_path):
    (tmp_path / "surgery.json").mkdir()
    with pytest.raises(DamagedRecord):
        record.read(tmp_path)
    (tmp_path / "surgery.json").rmdir()
    os.mkfifo(tmp_path / "surgery.json")  # reading it would wait for ever
    with pytest.raises(DamagedRecord):
        record.read(tmp_path)


def test_the_file_is_whole_or_the_old_one(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    record.write(tmp_path, whole())
    assert len(synced) == 2  # the file, and the folder that names it

    def killed(*_):
        raise KeyboardInterrupt

    before = (tmp_path / "surgery.json").read_bytes()
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        record.write(tmp_path, whole().as_trained())
    assert (tmp_path / "surgery.json").read_bytes() == before and os.listdir(tmp_path) == ["surgery.json"]
