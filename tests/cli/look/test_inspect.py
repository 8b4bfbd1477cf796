"""`leansurgeon inspect`: facts and traps from the files, and what the doctor says."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.answers import document, read, stderr_of, stdout_of, typed
from tests.support.models.small_models import cut


def edit(folder, **changes):
    config = read(folder / "config.json")
    config = {k: v for k, v in (config | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


# -- the doctor, whose own tests are in tests/surgery/test_doctor.py ----------------------------------


def test_the_command_prints_the_diagnosis(saved):
    folder, _ = saved("electra")
    done = typed(f"inspect {folder} --doctor")
    assert done.returncode == 0 and re.search(r"\bdeclaration fits\b", done.stdout, re.S)
    assert "embeddings_project" not in done.stdout and "generator_predictions.dense.weight" in done.stdout
    diagnosis = document(f"inspect {folder} --doctor")["doctor"]
    found = {c["name"]: c["ok"] for c in diagnosis}
    untried = {"added heads": None, "split heads": None}  # the library has no place for a head_dim
    assert found == dict.fromkeys(found, True) | untried and len(found) == 14


# -- facts and traps -------------------------------------------------------------------------------


def test_shape_parameters_and_head_policy(saved):
    folder, model = saved("llama")
    found = document(f"inspect {folder}")
    assert found["schema_version"] == 1 and found["doctor"] is None and found["surgery"] is None
    assert found["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert found["shape"]["stages"][0] | {"heads": 4, "kv_heads": 2, "inner": 64} == found["shape"]["stages"][0]
    assert found["head_dim"] | {"stored": True, "keep": "library"} == found["head_dim"]
    text = typed(f"inspect {folder}").stdout
    assert re.search(r"\bhead_dim for llama\b.*\bdivides\b", " ".join(text.split()), re.S)
    assert max(map(len, text.splitlines())) <= 80 + len(str(folder))


def test_a_preset_has_no_weights_and_no_traps():
    found = document("inspect bert-crammed")
    assert found["parameters"]["total"] == 119_589_889 and found["findings"] == []


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("bert", r"\bof num_attention_heads in config\.json\b"),
        ("gpt2", r"\bof n_head in config\.json\b"),
        (
            "vit",
            r"\bof num_attention_heads together with head_dim in config\.json\b",
        ),
        ("nystromformer", None),  # a convolution per head
        ("qwen3", None),  # norms as wide as a head
    ],
)
def test_it_says_where_an_edit_of_heads_cannot_be_seen(family, says, saved):
    folder, _ = saved(family)
    findings = document(f"inspect {folder}")["findings"]
    if says is None:
        assert findings == []
    else:
        assert findings[0]["level"] == "trap" and re.search(says, findings[0]["says"])
        assert re.search(r"\bsurgery\.json\b", findings[0]["says"], re.S)


def test_heads_edited_after_surgery_are_found_through_surgery_json(saved, tmp_path):
    folder, _ = saved("bert")
    out = cut(folder, tmp_path / "lean", heads="8", head_dim="split", layers="2")
    assert "surgery.json would show it" in document(f"inspect {out}")["findings"][0]["says"]
    edit(out, num_attention_heads=2)
    done = typed(f"inspect {out}")
    assert done.returncode == 3
    text = stdout_of(done)
    assert "heads 8 in surgery.json and 2 in config.json, head_dim 4 in surgery.json and 16 in config.json" in text
    assert "tensor keeps" in text and "fresh-attention (fresh)" in text


def test_an_inner_width_that_disagrees_with_the_weights_is_refused(saved, tmp_path):
    folder, _ = saved("vit")
    out = cut(folder, tmp_path / "lean", heads="8")
    edit(out, num_attention_heads=4)
    done = typed(f"inspect {out}")
    assert done.returncode == 3 and re.search(r"\[64.*\] in the weights.*\bconfig\b", stderr_of(done))


@pytest.mark.parametrize(
    ("family", "also"),
    [("bert", r"\bbert; .*\b8 wide\b"), ("modernbert", r"\brotary\b")],
)
def test_a_head_dim_that_the_library_ignores_is_named(family, also, saved):
    folder, _ = saved(family)
    edit(folder, head_dim=16)
    done = typed(f"inspect {folder}")
    assert done.returncode == 3
    text = stdout_of(done)
    assert re.search(rf"config\.json\b.*\bhead_dim = 16\b.*\btransformers\b.*\b{family}\b", text)
    assert re.search(also, text)


def test_damaged_surgery_json_is_said(saved):
    folder, _ = saved("bert")
    (folder / "surgery.json").write_text("{}")
    done = typed(f"inspect {folder}")
    assert done.returncode == 3 and "surgery.json is damaged" in done.stdout
