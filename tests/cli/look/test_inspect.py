"""`leansurgeon inspect`: facts and traps from the files, and what the doctor says."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from leansurgeon.cli.main import app
from leansurgeon.errors import UnsupportedModel
from tests.cli.answers import stdout_of
from tests.support.models.small_models import cut


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in (config | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


# -- the doctor, whose own tests are in tests/surgery/test_doctor.py ----------------------------------


def test_the_command_prints_the_diagnosis(saved):
    folder, _ = saved("electra")
    done = invoke(folder, "--doctor")
    assert done.exit_code == 0 and re.search(r"\bdeclaration fits\b", done.stdout, re.S)
    assert "embeddings_project" not in done.stdout and "generator_predictions.dense.weight" in done.stdout
    document = json.loads(invoke(folder, "--doctor", "--json").stdout)
    found = {c["name"]: c["ok"] for c in document["doctor"]}
    untried = {"added heads": None, "split heads": None}  # the library has no place for a head_dim
    assert found == dict.fromkeys(found, True) | untried and len(found) == 15


# -- facts and traps -------------------------------------------------------------------------------


def test_shape_parameters_and_head_policy(saved):
    folder, model = saved("llama")
    found = json.loads(invoke(folder, "--json").stdout)
    assert found["schema_version"] == 1 and found["doctor"] is None and found["surgery"] is None
    assert found["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert found["shape"]["stages"][0] | {"heads": 4, "kv_heads": 2, "inner": 64} == found["shape"]["stages"][0]
    assert found["head_dim"] | {"stored": True, "keep": "library"} == found["head_dim"]
    text = invoke(folder).stdout
    assert re.search(r"\bhead_dim for llama\b.*\bdivides\b", " ".join(text.split()), re.S)
    assert max(map(len, text.splitlines())) <= 80 + len(str(folder))


def test_a_preset_has_no_weights_and_no_traps():
    found = json.loads(invoke("bert-crammed", "--json").stdout)
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
    findings = json.loads(invoke(folder, "--json").stdout)["findings"]
    if says is None:
        assert findings == []
    else:
        assert findings[0]["level"] == "trap" and re.search(says, findings[0]["says"])
        assert re.search(r"\bsurgery\.json\b", findings[0]["says"], re.S)


def test_what_it_calls_invisible_loads_without_a_warning_and_computes_something_else(saved):
    """The trap itself, in the library: the reason for the command."""
    import torch

    from tests.conftest import example

    folder, model = saved("bert")
    edit(folder, num_attention_heads=8)
    other, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    inputs = example(model)
    with torch.no_grad():
        assert (model(**inputs).logits - other.eval()(**inputs).logits).abs().max() > 0.1


def test_heads_edited_after_surgery_are_found_through_surgery_json(saved, tmp_path):
    folder, _ = saved("bert")
    out = cut(folder, tmp_path / "lean", heads="8", head_dim="split", layers="2")
    clean = invoke(out, "--json")
    assert clean.exit_code == 0
    assert "surgery.json would show it" in json.loads(clean.stdout)["findings"][0]["says"]
    edit(out, num_attention_heads=2)
    done = invoke(out)
    assert done.exit_code == 3
    text = stdout_of(done)
    assert "heads 8 in surgery.json and 2 in config.json, head_dim 4 in surgery.json and 16 in config.json" in text
    assert "tensor keeps" in text and "fresh-attention (fresh)" in text


def test_an_inner_width_that_disagrees_is_refused_with_surgery_json_as_witness(saved, tmp_path):
    folder, _ = saved("vit")
    out = cut(folder, tmp_path / "lean", heads="8")
    edit(out, num_attention_heads=4)
    with pytest.raises(UnsupportedModel, match=r"\b64\b.*\b8\b.*surgery\.json.*\b4\b"):
        invoke(out)
    (out / "surgery.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"\[64.*\] in the weights.*\bconfig\b"):
        invoke(out)


@pytest.mark.parametrize(
    ("family", "also"),
    [("bert", r"\bbert; .*\b8 wide\b"), ("modernbert", r"\brotary\b")],
)
def test_a_head_dim_that_the_library_ignores_is_named(family, also, saved):
    folder, _ = saved(family)
    edit(folder, head_dim=16)
    done = invoke(folder)
    assert done.exit_code == 3
    text = stdout_of(done)
    assert re.search(rf"config\.json\b.*\bhead_dim = 16\b.*\btransformers\b.*\b{family}\b", text)
    assert re.search(also, text)


def test_damaged_surgery_json_is_said(saved):
    folder, _ = saved("bert")
    (folder / "surgery.json").write_text("{}")
    done = invoke(folder)
    assert done.exit_code == 3 and "surgery.json is damaged" in done.stdout
