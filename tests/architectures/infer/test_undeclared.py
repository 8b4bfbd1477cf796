"""Families without a declaration, from a saved model to a saved result: against cuts made by hand in memory."""

import errno
import json
import os
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from leansurgeon import architectures
from leansurgeon.architectures import infer
from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.families import read_families
from leansurgeon.architectures.infer import cache
from leansurgeon.architectures.infer.finding import Finding
from leansurgeon.architectures.infer.printing import as_source
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.costs.memory import Setting
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery import undo
from leansurgeon.surgery.costs import costs
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out, decide
from leansurgeon.surgery.undeclared import RandomModel, check_type
from tests.support.models.undeclared import computed, reloaded, shrunk, small_model, without

HYBRID = {"num_hidden_layers": 5, "layer_types": ["mamba", "attention", "mamba", "attention", "mamba"]}


@pytest.mark.parametrize(
    ("model_type", "gone", "flags"),
    [
        ("granite", [0, 3], {}),
        ("gemma2", [0, 3], {}),  # heads that must divide the width; windows in turns
        ("granitemoehybrid", [2, 3], HYBRID),  # layers of two kinds
    ],
)
def test_layers_and_heads(model_type, gone, flags, tmp_path):
    model, config = small_model(model_type, tmp_path / "source", **flags)
    keep = [str(i) for i in range(5) if i not in gone]
    shrunk(tmp_path / "source", tmp_path / "cut", keep=",".join(keep), heads="2x")
    by_hand = without(model, "model.layers", gone, config)
    found = computed(reloaded(tmp_path / "cut", model), config)
    assert torch.allclose(found, by_hand, atol=3e-5 * float(by_hand.std()))
    assert (computed(model, config) - by_hand).abs().max() > 1e-3  # the layers said something
    told = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert told["num_hidden_layers"] == 3 and told["num_attention_heads"] == 12


@pytest.mark.parametrize(
    ("model_type", "flags", "wanted", "reason"),
    [
        ("olmo2", {}, {"heads": "12"}, "over all heads"),
        ("diffllama", {}, {"heads": "12"}, "changes the output"),
        ("diffllama", {}, {"layers": "3"}, "differ by"),  # a number of every layer's own follows its place
        ("albert", {}, {"layers": "2"}, r"\bblocks\b"),
        ("swin", {}, {"layers": "1,1,3,1"}, r"4 stages differ in width.*timm/NAME"),
    ],
)
def test_what_is_not_proven_is_refused(model_type, flags, wanted, reason, tmp_path):
    small_model(model_type, tmp_path / "source", **flags)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        shrunk(tmp_path / "source", tmp_path / "cut", **wanted)
    assert not (tmp_path / "cut").exists() and str(caught.value)


def test_shared_blocks_are_refused():
    """Zamba: one block stands at several places of its stack."""
    config = infer.complete_config({"model_type": "zamba", "architectures": ["ZambaForCausalLM"]})
    with pytest.raises(UnsupportedModel, match="no small model of it runs"):
        architectures.of(config)


def test_layers_that_take_turns_go_in_groups(tmp_path):
    """Jamba's rule, attention at every second layer, stands in no list: layers stay in step, or are refused."""
    flags = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    model, config = small_model("jamba", tmp_path / "source", **flags)
    with pytest.raises(UsageError, match="whole groups of 2"):
        shrunk(tmp_path / "source", tmp_path / "cut", keep="0,2,3")
    shrunk(tmp_path / "source", tmp_path / "cut", keep="0,1,4")
    by_hand = without(model, "model.layers", [2, 3], config)
    assert torch.allclose(computed(reloaded(tmp_path / "cut", model), config), by_hand, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "able"),
    [
        ("gpt_bigcode", "depth heads mlp_dim"),  # one key/value head for all, which no key of the config says
        ("gptj", "depth heads mlp_dim"),  # the library derives the size of heads: a modelling file travels
        ("stablelm", "depth heads mlp_dim"),
        ("hubert", "depth heads mlp_dim"),
        ("falcon?new_decoder_architecture=true", "depth heads mlp_dim"),
        ("phi3", "depth heads mlp_dim"),  # stacks q, k and v, gate and up
        ("deepseek_v3", "depth heads mlp_dim"),  # low-rank attention, the first layers without experts
        ("mixtral", "depth heads mlp_dim"),  # experts apart in files, stacked in memory
        ("nomic_bert", "depth heads mlp_dim"),
        ("inkling_text", "depth mlp_dim"),  # a name that stands for other sizes in other layers
        ("longt5", "depth heads mlp_dim"),  # one number of heads, and one of MLP units, for both stacks
        ("laguna", "depth mlp_dim"),  # a head_dim that is refused stays as it is
        ("lilt", "depth"),  # two streams, each as wide as it likes
        ("blip_text_model", "depth heads mlp_dim"),  # a part of a model, which no mapping names
        ("parakeet_ctc", "depth heads mlp_dim"),  # all numbers stand under `encoder_config`
        ("radio", "depth heads mlp_dim"),  # insists on 5.0 where 4.0 stood
        ("cosmos3_edge_text", "depth heads mlp_dim"),  # rotary sections that have to fit head_dim
        ("qwen3_moe", "depth heads mlp_dim"),  # a number of units that no layer has
        ("mpt", "depth"),  # heads that are not alike
        ("bloom", "depth"),
        ("falcon?alibi=true", "depth mlp_dim"),
        ("stablelm?qk_layernorm=true", "depth mlp_dim"),
        ("gpt_oss", "depth heads mlp_dim"),  # gates and units take turns in one matrix of every expert
        ("falcon", "depth heads mlp_dim"),
    ],
)
def test_what_may_change(name, able):
    row = check_type(name)
    assert row.built and row.right, row
    assert {kind for kind in ("depth", "heads", "mlp_dim") if row.can(kind)} == set(able.split()), row


def test_a_result_of_one_layer_with_a_narrow_mlp_is_inferred_again(tmp_path):
    small_model("granite", tmp_path / "source")
    shrunk(tmp_path / "source", tmp_path / "cut", layers="1", mlp_dim="10")
    result = open_source(str(tmp_path / "cut"))
    assert (result.shape.depth, result.shape.stages[0].mlp_dim) == (1, 10)
    assert result.architecture.name == "granite" and not result.architecture.refused


def test_a_widened_model_is_saved_as_one(tmp_path):
    """By transformers itself, as after a training: under the name of our class, whatever the library's names in files
    hang on.
    """
    from transformers import AutoModelForCausalLM

    _, config = small_model("gptj", tmp_path / "source")
    shrunk(tmp_path / "source", tmp_path / "cut", heads="2x")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", trust_remote_code=True).eval()
    first.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["architectures"] == ["LeanForCausalLM"] and again["n_head"] == 2 * config["n_head"]
    assert "lean_class" not in again
    opened = open_source(str(tmp_path / "again"))
    assert opened.shape == open_source(str(tmp_path / "cut")).shape
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == opened.weights.shapes.keys()


def test_a_declaration_is_inferred_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    small_model("starcoder2", tmp_path / "source")
    config = open_source(str(tmp_path / "source")).config
    first = architectures.of(config)
    assert "starcoder2" in capsys.readouterr().err
    infer._found.clear()
    assert architectures.of(config) == first
    assert not capsys.readouterr().err  # read from the cache, silently
    infer._found.clear()
    assert architectures.of(config | {"use_bias": False}) != first  # another flag, another declaration


@pytest.mark.parametrize("change", [{"embedding_multiplier": "x"}, {"architectures": ["Trainer"]}], ids=str)
def test_a_config_that_the_library_refuses_is_no_error_of_ours(change):
    with pytest.raises(UnsupportedModel):
        architectures.of({"model_type": "granite", "hidden_size": 96} | change)


@pytest.mark.parametrize("said", ["mat1 and mat2 shapes", "CUDA out of memory"])
def test_what_happens_while_a_family_is_looked_at_is_a_reason(said, tmp_path, monkeypatch):
    """But for memory, of which every command says that it ran out."""

    def fails(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path))
    monkeypatch.setattr("leansurgeon.architectures.infer.explore.explore", fails)
    memory = "memory" in said
    with pytest.raises(RuntimeError if memory else UnsupportedModel, match=said if memory else "does not understand"):
        architectures.of({"model_type": "granite", "hidden_size": 96})


def test_a_full_disk_and_the_dead_leave_nothing_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path))
    made = architectures.of({"model_type": "bert"})
    cache.write("one", made)
    dead, young = (cache.folder() / f"{name}{cache.PART}" for name in ("dead", "young"))
    dead.touch(), young.touch()
    os.utime(dead, (time.time() - 2 * cache.STALE_SECONDS,) * 2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    cache.write("other", made)
    assert sorted(cache.folder().iterdir()) == [cache.folder() / "one.json", young]


@pytest.mark.parametrize("model_type", ["starcoder2", "qwen3_vl", "gptj"])
def test_a_printed_declaration_is_one(model_type, tmp_path):
    """It says all but what only inference knows: how the modelling file that travels widens attentions."""
    small_model(model_type, tmp_path / "source")
    opened = open_source(str(tmp_path / "source"))
    printed = dict(read_families(as_source(opened.architecture)))[model_type]
    assert list(printed.tensors(opened.config)) == list(opened.architecture.tensors(opened.config))
    own = {"evidence": {}, "decoupled": None, "shared": ()}
    assert printed == replace(opened.architecture, **own)
    assert plan(replace(opened, architecture=printed), RequestedShape(), method=Method(keep="0,1,2,4")).after.depth == 4


def test_declared_families_are_not_inferred():
    assert not architectures.of({"model_type": "llama"}).evidence


def test_the_tower_that_was_changed_is_meant_later_on(tmp_path):
    """And undone; its plan is priced without its operations, and without its memory."""
    small_model("clip", tmp_path / "source", architectures=["CLIPModel"])
    opened = open_source(str(tmp_path / "source"), tower="vision")
    found = costs(opened, RequestedShape(layers="2"))
    assert found.after.shape.depth == 2 and found.after.flops_counted is None
    assert found.after.parameters.total < found.before.parameters.total
    with pytest.raises(UnsupportedModel):
        costs(opened, RequestedShape(layers="2"), Setting(batch=2))
    width = 2 * opened.shape.stages[0].mlp_dim
    carry_out(DecidedCut(plan(opened, RequestedShape(mlp_dim=str(width)))), tmp_path / "wide", check=False)
    result = open_source(str(tmp_path / "wide"))
    assert result.architecture.section == "vision_config" and result.shape == result.record.plan.after
    assert result.shape.stages[0].mlp_dim == width
    undo.carry_out(undo.plan_undo(result), tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def noise(seed: int) -> list[dict[str, torch.Tensor]]:
    """Batches of ids."""
    ids = torch.randint(10, 70, (4, 8, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in ids]


def test_calibrated(tmp_path):
    """Sample data chooses layers and refits; experts stay bit for bit as they are."""
    small_model("mixtral", tmp_path / "source")
    data = Calibration("noise", "noise", "-", *(noise(seed) for seed in (1, 2, 3)))
    wanted, method = RequestedShape(layers="3"), Method(heal="closed")
    made = decide(plan(open_source(str(tmp_path / "source")), wanted, method=method, calibrated=True), data)
    carry_out(made, tmp_path / "cut", check=False)
    assert open_source(str(tmp_path / "cut")).shape.depth == len(made.plan.layers) == 3
    assert made.edits and not [name for name in made.edits if "experts." in name]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "cut"))
    first, kept = "model.layers.0.", f"model.layers.{made.plan.layers[0]}."
    names = [name for name in after if ".experts." in name and name.startswith(first)]
    assert names and all(torch.equal(after[name], before[name.replace(first, kept, 1)]) for name in names)


def test_the_variant_that_a_declaration_leaves_out_is_inferred():
    """DINOv2's giant model has a gated MLP of a size that its config cannot undo: all but the MLP may change."""
    row = check_type("dinov2?use_swiglu_ffn=true", drawn=RandomModel(seed=5, depth=5))
    assert not row.declared and row.can("depth") and row.can("heads") and set(row.refused) == {"mlp_dim"}, row


def test_what_the_last_bit_of_the_weights_moves_as_far_is_rounding():
    """The routers behind this vision tower make 1e-7 into 2e-4, in code that casts to fp32 itself."""
    row = check_type("qwen3_5_moe", "vision", RandomModel(seed=23, depth=7))
    assert row.can("depth") and row.can("heads") and row.can("mlp_dim"), row


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "3", "{}", '{"stages": [], "outer": [1], "keys": {}}', '{"stages": [{"block": [1]}], "outer": []}'],
)
def test_a_damaged_cache_is_no_answer(text, tmp_path, monkeypatch):
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path))
    cache.folder().mkdir(parents=True)
    (cache.folder() / "key.json").write_text(text)
    assert cache.read("key", Architecture) is None and cache.read("key", Finding) is None
