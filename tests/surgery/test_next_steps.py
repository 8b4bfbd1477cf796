"""What the next steps cannot divide or hold, against closed forms."""

import json
from dataclasses import replace

import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.report.tables.cut import list_next_steps
from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.next_steps import Indivisible, cannot_hold, indivisible
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.support.command_line import leansurgeon
from tests.surgery.cuts import cut

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


def test_key_value_heads_that_engines_copy_are_no_trouble():
    """One or two key/value heads stand on every GPU of 2, 4 and 8; three cannot."""
    found = {kv: by_name(Stage(1, 12, 64, kv, 768, 768)).keys() for kv in (1, 2, 3)}
    assert ["key/value heads" in names for names in found.values()] == [False, False, True]


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
    wanted = replace(wanted, init="fresh-attention")
    found = plan(source, wanted).cannot_hold
    assert (len(found.formats) if found else 0, found.instead if found else "") == (formats, instead)
    if found:  # and what is offered is held
        flag, value = instead.split(" (")[0].split()
        better = replace(wanted, **{flag.removeprefix("--").replace("-", "_"): value})
        assert plan(source, better).cannot_hold is None


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
    cut(saved("bert")[0], tmp_path / "ours", heads="8", head_dim="keep")
    ours = open_source(str(tmp_path / "ours"))
    made = plan(ours, RequestedShape(layers="2"))
    assert made.cannot_hold and made.cannot_hold.instead == "--head-dim split (8 heads of 4)"
    assert cannot_hold(ours.architecture, ours.architecture, ours.shape) == made.cannot_hold


@pytest.mark.parametrize(
    ("family", "key", "period", "layers"),
    [("smollm3", "no_rope_layers", 4, "6"), ("gemma3_text", "layer_types", 6, "9")],
)
def test_a_pattern_of_layers_that_a_format_counts_by_itself(family, key, period, layers, saved, tmp_path):
    """llama.cpp takes every so many-th layer for the other kind, whatever config.json says of each."""
    folder, _ = saved(family, num_hidden_layers=12, layer_types=None)

    def told(name, method=None):
        steps, _ = cut(folder, tmp_path / name, method, layers=layers)
        kinds = json.loads((tmp_path / name / "config.json").read_text())[key]
        held = all((kind in (0, "full_attention")) == (i % period == 0) for i, kind in enumerate(kinds, 1))
        assert held == (steps.cannot_hold is None)
        return steps.cannot_hold

    found = told("out")
    assert found.formats == ("GGUF (llama.cpp)",)
    assert told("better", Method(keep=found.instead.removeprefix("--keep "))) is None
    assert told("first", Method(keep=f"0-{int(layers) - 1}")) is None
