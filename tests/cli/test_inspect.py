"""`leansurgeon inspect`: facts and traps from the files, and the doctor, who must pass every family and catch wrong
declarations.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from leansurgeon.architectures.base import Tensor
from leansurgeon.checkpoints.source import open_source
from leansurgeon.cli.main import app
from leansurgeon.errors import UnsupportedModel
from leansurgeon.surgery.check.doctor import examine
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import carry_out
from tests.conftest import FAMILIES

TINY = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48, head_dim=8)
IMAGES = dict(depth=2, num_heads=4, embed_dim=32, mlp_ratio=2, img_size=8, patch_size=4, in_chans=1, num_classes=5)
STAGES = dict(in_chans=3, num_classes=5)
SMALL = STAGES | dict(img_size=32)
# Presets of the models that are our own, or timm's, at a tiny size.
OURS = {
    "bert-crammed": TINY | dict(vocab_size=61),
    "gpt2-tinystories": TINY | dict(vocab_size=61, max_position_embeddings=40),
    "lra/listops": TINY | dict(max_position_embeddings=64, num_landmarks=4),
    "vit-b": IMAGES,
    "xcit-m": SMALL | dict(embed_dim=32, depth=2, num_heads=4),
    "tnt-b": SMALL | dict(embed_dim=32, inner_dim=8, depth=2, num_heads_outer=4),
    "davit-b": STAGES | dict(depths=[1, 2, 3, 1], embed_dims=[16, 32, 32, 32], num_heads=[2, 4, 4, 4]),
    "volo-d3": SMALL
    | dict(stem_hidden_dim=8, layers=[2, 3, 4, 2], embed_dims=[16, 32, 32, 32], num_heads=[2, 4, 4, 4]),
}


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)


def cut(folder, out, **wanted):
    source = open_source(str(folder))
    carry_out(plan(source, Wanted(**{"init": "fresh-attention"} | wanted), seed=0), source, out, check=False)
    return out


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in (config | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


def wrong(checks):
    return {c.name: c.says for c in checks if not c.ok}


# -- the doctor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_doctor_finds_every_family_as_declared(family, saved):
    folder, model = saved(family)
    checks = examine(open_source(str(folder)))
    assert wrong(checks) == {} and len(checks) == 7
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in checks[0].says


@pytest.mark.parametrize("preset", OURS)
def test_the_doctor_finds_our_own_models_as_declared(preset):
    assert wrong(examine(open_source(preset, config_changes=OURS[preset]))) == {}


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_the_doctor_finds_decoupled_heads_as_declared(family, saved, tmp_path):
    folder, _ = saved(family)
    source = open_source(str(cut(folder, tmp_path / "wide", heads="8", head_dim="keep")))
    assert source.architecture.library == "leansurgeon"
    assert wrong(examine(source)) == {}


def as_role(arch, roles: dict[str, str]):
    """The same declaration with roles renamed."""
    return replace(arch, block=tuple(replace(t, role=roles.get(t.role, t.role)) for t in arch.block))


def with_axes(arch, changes: dict[str, str]):
    return replace(arch, block=tuple(replace(t, axes=changes.get(t.axes, t.axes)) for t in arch.block))


WRONG = [  # family, what is wrong about the declaration, and the check that must notice
    ("bert", lambda a: as_role(a, {"q": "v", "v": "q"}), "values"),
    ("bert", lambda a: as_role(a, {"k": "v", "v": "k"}), "values"),
    ("bert", lambda a: replace(a, projection="encoder.layer.{i}.output.dense"), "output projections"),
    ("bert", lambda a: replace(a, projection="encoder.layer.{i}.attention.output"), "output projections"),
    ("bert", lambda a: replace(a, block=a.block[:-1]), "roles"),
    ("bert", lambda a: replace(a, block=(*a.block, a.block[0])), "roles"),
    ("bert", lambda a: replace(a, outer=(*a.outer, Tensor("embeddings.scale", "embedding", "width"))), "roles"),
    ("bert", lambda a: with_axes(a, {"mlp width": "width mlp", "width mlp": "mlp width"}), "roles"),
    ("distilbert", lambda a: as_role(a, {"up": "down", "down": "up"}), "MLP"),
    ("distilbert", lambda a: as_role(a, {"up": "q", "q": "up"}), "queries and keys"),
    # Interleaved head by head in the file, declared as stacked (and the other way round): no shape tells.
    ("gpt_neox", lambda a: with_axes(a, {"heads*qkv width": "q+kv+kv width", "heads*qkv": "q+kv+kv"}), "values"),
    ("gpt2", lambda a: with_axes(a, {"width q+kv+kv": "width heads*qkv", "q+kv+kv": "heads*qkv"}), "values"),
    ("modernbert", lambda a: replace(a, block=tuple(replace(t, in_first=True) for t in a.block)), "roles"),
]


@pytest.mark.parametrize(("family", "spoil", "notices"), WRONG)
def test_the_doctor_catches_a_wrong_declaration(family, spoil, notices, saved):
    sizes = dict(hidden_dim=32) if family == "distilbert" else {}  # so that up and down have one shape
    folder, _ = saved(family, **sizes)
    source = open_source(str(folder))
    assert notices in wrong(examine(source, spoil(source.architecture)))


def test_the_command_prints_the_diagnosis(saved):
    folder, _ = saved("electra")
    done = invoke(folder, "--doctor")
    assert done.exit_code == 0 and "The declaration fits the model." in done.stdout
    assert "embeddings_project" not in done.stdout and "generator_predictions.dense.weight" in done.stdout
    document = json.loads(invoke(folder, "--doctor", "--json").stdout)
    assert [c["ok"] for c in document["doctor"]] == [True] * 7


# -- facts and traps -------------------------------------------------------------------------------


def test_shape_parameters_and_head_policy(saved):
    folder, model = saved("llama")
    found = json.loads(invoke(folder, "--json").stdout)
    assert found["schema_version"] == 1 and found["doctor"] is None and found["surgery"] is None
    assert found["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert found["shape"]["stages"][0] | {"heads": 4, "kv_heads": 2, "inner": 64} == found["shape"]["stages"][0]
    assert found["head_dim"] | {"stored": True, "keep": "library"} == found["head_dim"]
    text = invoke(folder).stdout
    assert "if the number of heads divides the width" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80 + len(str(folder))


def test_a_preset_has_no_weights_and_no_traps():
    found = json.loads(invoke("bert-crammed", "--json").stdout)
    assert found["parameters"]["total"] == 119_589_889 and found["findings"] == []


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("bert", "An edit of num_attention_heads in config.json would show in no tensor's shape."),
        ("gpt2", "An edit of n_head in config.json would show in no tensor's shape."),
        (
            "vit",
            "An edit of num_attention_heads together with head_dim in config.json would show in no tensor's shape.",
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
        assert findings[0]["level"] == "trap" and says in findings[0]["says"]
        assert "nothing can tell with how many heads it was trained" in findings[0]["says"]


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
    text = " ".join(done.stdout.split())
    assert "heads 8 in surgery.json and 2 in config.json, head_dim 4 in surgery.json and 16 in config.json" in text
    assert "Every tensor keeps its shape" in text and "fresh-attention (fresh)" in text


def test_an_inner_width_that_disagrees_is_refused_with_surgery_json_as_witness(saved, tmp_path):
    folder, _ = saved("vit")
    out = cut(folder, tmp_path / "lean", heads="8")
    edit(out, num_attention_heads=4)
    with pytest.raises(UnsupportedModel, match=r"is \[64.*\] in the weights.*heads 8 in surgery.json and 4 in config"):
        invoke(out)
    (out / "surgery.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"is \[64.*\] in the weights.*The config does not fit its weights"):
        invoke(out)


@pytest.mark.parametrize(
    ("family", "also"),
    [("bert", "ignores in bert; heads are 8 wide"), ("modernbert", "while its rotary positions read it")],
)
def test_a_head_dim_that_the_library_ignores_is_named(family, also, saved):
    folder, _ = saved(family)
    edit(folder, head_dim=16)
    done = invoke(folder)
    assert done.exit_code == 3
    text = " ".join(done.stdout.split())
    assert f"config.json says head_dim = 16, which transformers ignores in {family}" in text
    assert also in text


def test_damaged_surgery_json_is_said(saved):
    folder, _ = saved("bert")
    (folder / "surgery.json").write_text("{}")
    done = invoke(folder)
    assert done.exit_code == 3 and "surgery.json is damaged" in done.stdout
