"""What the next steps cannot divide or hold, against closed forms."""

from __future__ import annotations

import json

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.report.tables.cut import list_next_steps
from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.next_steps import GPUS, GROUPS, KERNELS, Indivisible, cannot_hold, indivisible
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.support.command_line import leansurgeon

SMOLLM2 = Stage(depth=30, heads=9, head_dim=64, kv_heads=3, mlp_dim=1536, width=576)  # 576 = 2^6 x 9, 1536 = 2^9 x 3


def by_name(stage: Stage) -> dict[str, Indivisible]:
    return {number.name: number for number in indivisible(Shape((stage,)))}


def test_smollm2_as_its_numbers_factor():
    assert by_name(SMOLLM2) == {
        "width": Indivisible("width", 576, groups=(128, 256)),
        "inner width": Indivisible("inner width", 576, groups=(128, 256)),
        "heads": Indivisible("heads", 9, gpus=(2, 4, 8)),
        "key/value heads": Indivisible("key/value heads", 3, gpus=(2, 4, 8)),
    }


@pytest.mark.parametrize("size", range(1, 1025, 7))
def test_a_number_is_told_exactly_where_a_remainder_is_left(size):
    found = by_name(Stage(depth=1, heads=8, head_dim=32, kv_heads=8, mlp_dim=size, width=256)).get("MLP")
    left = [tuple(n for n in of if size - n * (size // n)) for of in (GROUPS, GPUS, KERNELS)]
    assert (found is None) == (not any(left))
    assert found is None or [found.groups, found.gpus, found.kernels] == left


def test_key_value_heads_that_engines_copy_are_no_trouble():
    """One or two key/value heads stand on every GPU of 2, 4 and 8; three cannot."""
    shared = {kv: by_name(Stage(1, 12, 64, kv, 768, 768)) for kv in (1, 2, 3, 4)}
    assert [("key/value heads" in found) for found in shared.values()] == [False, False, True, False]
    assert shared[3]["heads"].gpus == (8,)


def test_stages_that_are_alike_are_told_once():
    stage = Stage(2, 3, 32, 3, 100, 96)
    assert indivisible(Shape((stage, stage))) == indivisible(Shape((stage,)))


def test_what_is_new_comes_before_what_was_so():
    cut = Stage(30, 9, 64, 3, 1100, 576)
    text = " ".join(list_next_steps(Shape((SMOLLM2,)), Shape((cut,))))
    new, old = text.split("as before")
    assert "MLP 1,100" in new and "576" not in new and "8 GPUs" in new
    assert "width 576" in old and "9 heads" in old and "1,100" not in old
    even = Stage(4, 8, 128, 8, 4096, 1024)
    assert list_next_steps(Shape((even,)), Shape((even,))) == []


@pytest.mark.parametrize(
    ("family", "wanted", "formats", "instead"),
    [
        ("bert", RequestedShape(heads="8", head_dim="keep"), 2, "--head-dim split (8 heads of 4)"),
        ("bert", RequestedShape(heads="6", head_dim="keep"), 2, "--heads 4"),  # 6 do not divide 32
        ("bert", RequestedShape(heads="8", head_dim="split"), 0, ""),
        ("bart", RequestedShape(heads="8,8", head_dim="keep"), 1, "--head-dim split (8 heads of 4)"),
        ("llama", RequestedShape(heads="8"), 1, "--heads 2"),  # 32 wide, heads of 16
        ("mistral", RequestedShape(heads="8"), 0, ""),
        ("vit", RequestedShape(heads="8"), 0, ""),
    ],
)
def test_formats_that_cannot_hold_a_shape_are_named_with_the_choice_that_they_could(
    saved, family, wanted, formats, instead
):
    source = open_source(str(saved(family)[0]))
    made = plan(source, RequestedShape(**{**wanted.__dict__, "init": "fresh-attention"}))
    found = made.cannot_hold
    assert (len(found.formats) if found else 0) == formats
    assert found is None or found.instead == instead
    if found and "--head" in instead:  # and what is offered is held
        flags = instead.split(" (")[0].split()
        other = {"--head-dim": "head_dim", "--heads": "heads"}[flags[0]]
        better = plan(source, RequestedShape(**{**wanted.__dict__, "init": "fresh-attention", other: flags[1]}))
        assert better.cannot_hold is None


def test_plan_and_shrink_say_it_before_anything_is_written(saved, tmp_path):
    folder, _ = saved("bert")
    asked = (folder.name, "--heads", "8", "--head-dim", "keep")
    dry = json.loads(leansurgeon("shrink", *asked, "--dry-run", "--json", cwd=folder.parent).stdout)
    planned = json.loads(leansurgeon("plan", *asked, "--json", cwd=folder.parent).stdout)
    assert dry["indivisible"] == planned["indivisible"] and dry["cannot_hold"] == planned["cannot_hold"]
    assert {n["name"] for n in planned["indivisible"]} == {"width", "MLP", "inner width"}  # 32, 48 and 64
    for command, more in (("shrink", ["--dry-run"]), ("plan", [])):
        out = leansurgeon(command, *asked, *more, cwd=folder.parent).stdout
        assert max(map(len, out.splitlines())) <= 80
        assert "GGUF" in out and "--head-dim split" in out and "MLP 48" in " ".join(out.split())


def test_a_source_of_our_own_family_is_told_the_same(saved, tmp_path):
    folder, _ = saved("bert")
    leansurgeon("shrink", folder, "--heads", "8", "--head-dim", "keep", "--no-proof", "-o", tmp_path / "ours")
    ours = open_source(str(tmp_path / "ours"))
    made = plan(ours, RequestedShape(layers="2"))
    assert made.cannot_hold and made.cannot_hold.instead == "--head-dim split (8 heads of 4)"
    assert cannot_hold(ours.architecture, ours.architecture, ours.shape) == made.cannot_hold


@pytest.mark.parametrize(
    ("family", "period", "cut"), [("smollm3", 4, "6"), ("gemma3_text", 6, "9"), ("cohere2", 4, "6")]
)
def test_a_pattern_of_layers_that_a_format_counts_by_itself(family, period, cut, tmp_path):
    """llama.cpp takes every so many-th layer for the other kind, whatever config.json says of each."""
    import transformers

    names = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3Text", "cohere2": "Cohere2"}
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=61)
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, num_hidden_layers=12)
    config = getattr(transformers, f"{names[family]}Config")(**sizes, **special)
    transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(
        tmp_path / "model"
    )

    def kinds(folder):
        said = json.loads((folder / "config.json").read_text())
        return [k in (0, "full_attention") for k in said["no_rope_layers" if family == "smollm3" else "layer_types"]]

    assert kinds(tmp_path / "model") == [(i + 1) % period == 0 for i in range(12)]
    asked = ("shrink", "model", "--layers", cut, "--uncalibrated", "--no-proof", "--json")
    done = leansurgeon(*asked, "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    held = kinds(tmp_path / "out") == [(i + 1) % period == 0 for i in range(int(cut))]
    found = json.loads(done.stdout)["cannot_hold"]
    assert held == (found is None)
    assert (
        found == json.loads(leansurgeon("plan", "model", "--layers", cut, "--json", cwd=tmp_path).stdout)["cannot_hold"]
    )
    if found:
        assert found["formats"] == ["GGUF (llama.cpp)"]
        better = leansurgeon(*asked[:2], *found["instead"].split(), *asked[4:], "-o", "better", cwd=tmp_path)
        assert better.returncode == 0 and json.loads(better.stdout)["cannot_hold"] is None, better.stderr
        assert kinds(tmp_path / "better") == [(i + 1) % period == 0 for i in range(int(cut))]
    first = leansurgeon("shrink", "model", "--keep", f"0-{int(cut) - 1}", *asked[4:], "-o", "first", cwd=tmp_path)
    assert json.loads(first.stdout)["cannot_hold"] is None
