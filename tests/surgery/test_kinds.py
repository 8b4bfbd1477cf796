"""Models with layers of several kinds: a cut keeps one of every kind, each kept layer stays of its own, and the pattern
by which other programs count them is kept where that costs nothing.
"""

import json

import pytest
import torch
import transformers

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import unread
from tests.conftest import DECODER, SPECIAL
from tests.support.command_line import leansurgeon
from tests.support.methods import with_method
from tests.support.published import SMALL, TOKENS, load, saved, skipping
from tests.surgery.cuts import samples

IDS = torch.arange(10, 34).reshape(2, 12)


def silent(model, layers):
    """Let these layers pass on what they receive: every criterion lets them go first."""
    for layer in layers:
        for name, parameter in model.model.layers[layer].named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
                parameter.data.zero_()
    return model


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """As Qwen3.5: every fourth layer has full attention, and the library runs with one of them at least."""
    config = transformers.Qwen3_5TextConfig(
        **SMALL, **TOKENS, num_hidden_layers=8, num_key_value_heads=2, head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [3, 7]
    model = transformers.Qwen3_5ForCausalLM(config)
    folder = saved(model, tmp_path_factory.mktemp("kinds") / "qwen")
    silent(model, (3, 7)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("criterion", ["influence", "auto"])
def test_a_calibrated_set_has_a_layer_of_every_kind(criterion, qwen):
    source = open_source(str(qwen))
    steps = plan(source, RequestedShape(layers="3"), calibrated=True)
    record = calibrate(with_method(steps, "none", layers=criterion), samples("gpt2", 2, 2, 2)).record
    assert all({3, 7} & set(kept) for kept in [record.layers, *(c.kept for c in record.candidates)])
    if criterion != "auto":
        assert record.criterion == f"{criterion}, one of every kind"


def test_layers_that_the_library_does_not_run_alone_are_refused_before_the_work(qwen, tmp_path):
    done = leansurgeon("shrink", qwen, "--keep", "0-2", "--uncalibrated", "-o", tmp_path / "cut")
    assert done.returncode == 2 and "of the kind of layer 3" in done.stderr and not (tmp_path / "cut").exists()
    advised = done.stderr.partition("--keep")[2].partition("--keep")[2].split()[0]
    assert leansurgeon("shrink", qwen, "--keep", advised, "--uncalibrated", "-o", tmp_path / "cut").returncode == 0
    with pytest.raises(UsageError, match="does not run"):
        unread(plan(open_source(str(qwen)), RequestedShape(), method=Method(keep="4-6")))


PUBLISHED = {  # what their files leave to the library, which then counts layers by their places
    "Gemma3Text": (
        "Gemma3ForCausalLM",
        "layer_types",
        {"sliding_window": 4, "sliding_window_pattern": 3},
        ("sliding_attention", "full_attention"),
    ),
    "SmolLM3": ("SmolLM3ForCausalLM", "no_rope_layers", {"no_rope_layer_interval": 3}, (1, 0)),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_layers_stay_of_their_kind_where_the_file_gives_a_rule_alone(family, tmp_path):
    name, key, told, (usual, other) = PUBLISHED[family]
    config = getattr(transformers, f"{family}Config")(**DECODER | SPECIAL | {"num_hidden_layers": 6} | told)
    folder = saved(getattr(transformers, name)(config), tmp_path / "source")
    said = json.loads((folder / "config.json").read_text())
    said = {k: v for k, v in said.items() if k not in ("layer_types", "no_rope_layers", "_sliding_window_pattern")}
    (folder / "config.json").write_text(json.dumps(said | told))
    source = load(folder)
    assert list(getattr(source.config, key)) == [usual, usual, other] * 2
    done = leansurgeon("shrink", folder, "--keep", "0,2,4,5", "--uncalibrated", "--no-proof", "-o", tmp_path / "cut")
    assert done.returncode == 0, done.stderr
    made = load(tmp_path / "cut")
    assert list(getattr(made.config, key)) == [usual, other, usual, other]
    by_hand = skipping(source, source.model.layers, {0, 2, 4, 5}, input_ids=IDS)
    with torch.no_grad():
        assert torch.allclose(made(input_ids=IDS)[0], by_hand, atol=1e-4)


def test_of_sets_that_are_alike_one_keeps_the_pattern_that_other_programs_count_by(tmp_path):
    """llama.cpp gives every fourth layer of a SmolLM3 no rotary positions: of seven of eight, the first seven."""
    config = transformers.SmolLM3Config(**DECODER | SPECIAL | {"num_hidden_layers": 8})
    folder = saved(model := transformers.SmolLM3ForCausalLM(config), tmp_path / "source")
    silent(model, range(1, 8)).save_pretrained(folder)  # whichever goes, nothing is lost
    source = open_source(str(folder))
    steps = plan(source, RequestedShape(layers="7"), calibrated=True)
    found = calibrate(with_method(steps, "none"), samples("gpt2", 2, 2, 2))
    assert found.record.layers == tuple(range(7)), found.record.candidates
    assert plan(source, RequestedShape(), method=Method(keep="0-6")).cannot_hold is None
