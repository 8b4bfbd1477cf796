"""`leansurgeon diff`: what is the same, what changed and by how much, against tensors that were changed by hand."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from leansurgeon.checkpoints.source import open_source
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out
from tests.cli.answers import document, typed


def as_dict(a, b):
    return document(f"diff {a} {b}")


def cut(source, out, method=None, **wanted):
    opened = open_source(str(source))
    return carry_out(DecidedCut(plan(opened, RequestedShape(**wanted), 3, method or Method())), out, check=False)


def by_name(found, side="b"):
    return {t[f"name_{side}"]: t for t in found["tensors"] if f"name_{side}" in t}


def test_every_kind_of_difference(saved, tmp_path):
    folder, _ = saved("llama")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    up = "model.layers.1.mlp.up_proj.weight"
    shift = torch.randn(tensors[up].shape, generator=torch.Generator().manual_seed(0))
    tensors[up] = tensors[up] + shift
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float16)
    tensors["lm_head.weight"][0, 0] = float("nan")
    del tensors["model.layers.0.mlp.up_proj.bias"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 1e-3, "extra": {"deep": [1, 2]}}
    config.pop("hidden_act")
    (other / "config.json").write_text(json.dumps(config))

    found = as_dict(folder, other)
    states = {name: t["state"] for name, t in by_name(found).items()}
    assert states[up] == states["model.norm.weight"] == states["lm_head.weight"] == "changed"
    assert found["counts"] == {"same": len(tensors) - 3, "changed": 3, "only in A": 1}
    assert by_name(found, "a")["model.layers.0.mlp.up_proj.bias"]["state"] == "only in A"
    change = by_name(found)[up]["change"]
    assert change == pytest.approx(float(shift.double().norm() / (tensors[up] - shift).double().norm()), rel=1e-5)
    half = by_name(found)["model.norm.weight"]
    assert (half["dtype_a"], half["dtype_b"]) == ("F32", "F16") and 0 < half["change"] < 1e-3
    assert "change" not in by_name(found)["lm_head.weight"]  # not a finite number
    keys = {c["key"]: (c.get("a"), c.get("b")) for c in found["config"]}
    assert keys["rms_norm_eps"][1] == 1e-3 and keys["hidden_act"] == ("silu", None)
    assert keys["extra"] == (None, {"deep": [1, 2]})

    code, out, _ = typed(f"diff {folder} {other}")
    assert code == 0 and all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)
    assert "not finite" in out and re.search(r"matched by number\b", out, re.S)


def test_a_model_and_itself(saved):
    folder, _ = saved("gpt2")
    found = as_dict(folder, folder)
    assert set(found["counts"]) == {"same"} and found["config"] == []
    _, out, _ = typed(f"diff {folder} {folder}")
    assert "0-3      0-3     same     same  same       same    same" in out


def test_layers_are_matched_by_surgery_json(saved, tmp_path):
    """Dropped layers: what stands at place 1 comes from layer 3, and every byte of it is the same."""
    folder, _ = saved("llama")
    cut(folder, tmp_path / "short", layers="2")
    found = as_dict(folder, tmp_path / "short")
    assert found["layers"] == [[0, 0], [3, 1]] and found["layers_matched"].startswith("B's surgery.json")
    assert set(found["counts"]) == {"same", "only in A"}
    assert {t["layer_a"] for t in found["tensors"] if t["state"] == "only in A"} == {1, 2}
    back = as_dict(tmp_path / "short", folder)
    assert back["layers"] == [[0, 0], [1, 3]] and set(back["counts"]) == {"same", "only in B"}
    _, out, _ = typed(f"diff {folder} {tmp_path}/short")
    assert re.search(r"\bonly in a: layers 1\W+2\b", out, re.I)

    cut(folder, tmp_path / "late", Method(keep="2,3"))  # two results of one source
    both = as_dict(tmp_path / "short", tmp_path / "late")
    assert both["layers"] == [[1, 1]] and "the same source" in both["layers_matched"]

    tensors = load_file(folder / "model.safetensors")  # another model of the same name is no source
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert as_dict(folder, tmp_path / "short")["layers_matched"] == "by number"


def test_other_shapes_and_families(saved, tmp_path):
    folder, _ = saved("bert")
    cut(folder, tmp_path / "wide", heads="8", head_dim="keep", mlp_dim="64")
    found = as_dict(folder, tmp_path / "wide")
    assert (found["a"]["family"], found["b"]["family"]) == ("bert", "leansurgeon_bert")
    assert {t["role"] for t in found["tensors"] if t["state"] == "other shape"} == {"q", "k", "v", "o", "up", "down"}
    _, out, _ = typed(f"diff {folder} {tmp_path}/wide")
    assert "shape    shape" in out and "+" in out
    presets = as_dict("vit-b", "deit-b")
    assert presets["tensors"] == [] and any(c["key"] == "architecture" for c in presets["config"])
    code, _, err = typed(f"diff {folder} no-such-folder/at/all")
    assert code == 2 and re.search(r"no-such-folder/at/all", err, re.S)
