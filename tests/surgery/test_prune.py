"""Pruned checkpoints compute what the masked model computes, and healing takes back part of what that costs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.heads.pruning import strengths
from leansurgeon.measure.heads.sites import Site, count, sites, switch_off_heads
from leansurgeon.surgery import prune
from leansurgeon.surgery.prune import MEASURED
from leansurgeon.surgery.shrink import carry_out
from tests.conftest import example, output

NOTHING = Calibration("none", "nothing", "0" * 64, [], [], [])
# family -> share of heads, (heads, key/value heads) that are left of 4
HALF = (0.5, 2, 2)
CASES = {"bert": HALF, "vit": HALF, "gpt2": (0.25, 3, 3), "llama": (0.5, 2, 1), "t5": HALF, "bart": HALF}


def strongest(places: list[Site], values: np.ndarray, share: float) -> np.ndarray:
    """The heads of this share of key/value groups with the largest summed values, in each layer, (all heads,) bool."""
    kept = []
    for site, of_site in zip(places, strengths(places, values), strict=True):
        by_group = of_site.reshape(site.groups, -1).sum(1)
        kept.append(np.repeat(np.argsort(np.argsort(-by_group)) < site.groups * share, site.heads // site.groups))
    return np.concatenate(kept)


@pytest.mark.parametrize("family", CASES)
def test_the_checkpoint_is_the_masked_model(family, saved, tmp_path):
    asked, heads, kv_heads = CASES[family]
    folder, model = saved(family)
    source = open_source(str(folder))
    loaded = checkpoints.load(folder)
    places = sites(loaded)
    values = np.random.default_rng(0).random(count(places))
    decided = prune.decide(source, places, values, asked, NOTHING, heal=False)
    record = carry_out(decided, tmp_path / "out", check=False)
    stages = decided.plan.after.stages
    assert {(s.heads, s.kv_heads, s.head_dim) for s in stages} == {(heads, kv_heads, source.shape.stages[0].head_dim)}

    small = checkpoints.load(tmp_path / "out").model.eval()
    assert sum(p.numel() for p in small.parameters()) == decided.plan.parameters_after.total
    assert decided.plan.parameters_after.attention < decided.plan.parameters_before.attention
    keep = strongest(places, values, heads / 4)
    assert keep.sum() == heads * len(places)
    inputs = example(model)
    with torch.no_grad():
        whole = output(loaded.model.eval(), inputs)
        with switch_off_heads(loaded.model, places, keep):
            masked = output(loaded.model, inputs)
        found = output(small, inputs)
    assert float((found - masked).abs().max()) <= 1e-4 * float(masked.std())
    assert float((found - whole).abs().max()) > 1e-2 * float(whole.std())

    written = json.loads((tmp_path / "out" / "surgery.json").read_text())
    assert {name: tuple(kept) for name, kept in written["decided"]["kept_heads"].items()} == record.decided.kept_heads
    of_first = np.flatnonzero(keep[:4]).tolist()
    assert written["decided"]["kept_heads"]["0"] == of_first
    assert "measured importance" in written["plan"]["operators"][0]["says"]


def test_a_t5_stack_keeps_the_same_heads_and_cross_attention_its_own(saved):
    folder, _ = saved("t5")
    source, places = open_source(str(folder)), sites(checkpoints.load(folder))
    values = np.random.default_rng(1).random(count(places))
    steps = prune.decide(source, places, values, 0.5, NOTHING, heal=False).plan
    for stage, kind in ((0, "encoder"), (1, "decoder"), (1, "cross")):
        here = [steps.strength[s.index, s.group].tolist() for s in places if s.kind == kind and s.stage == stage]
        assert len(here) == 4 and (len(set(map(tuple, here))) == 1) == (kind != "cross")


def test_healing_takes_back_much_of_the_loss(saved, tmp_path):
    folder, model = saved("vit")
    source, places = open_source(str(folder)), sites(checkpoints.load(folder))
    draws = torch.Generator().manual_seed(0)
    images = [{"pixel_values": torch.randn(64, 1, 8, 8, generator=draws)} for _ in range(6)]
    data = Calibration("noise", "noise", "0" * 64, images[:4], images[4:5], images[5:])
    values = np.random.default_rng(0).random(count(places))
    errors = {}
    with torch.no_grad():
        target = model(**images[5]).logits
        for heal in (False, True):
            decided = prune.decide(source, places, values, 0.25, data, heal=heal)
            out = tmp_path / f"heal-{heal}"
            record = carry_out(decided, out, check=False)
            errors[heal] = float((checkpoints.load(out).model.eval()(**images[5]).logits - target).norm())
            kept = record.decided.kept_heads["0"]
            says = json.loads((out / "surgery.json").read_text())["plan"]["operators"][0]["says"]
            assert MEASURED in says and says in (out / "README.md").read_text()
            assert list(kept) == np.sort(np.argsort(-values[:4])[:3]).tolist()  # healing does not choose others
    assert errors[True] < 0.8 * errors[False]


def test_healing_with_whole_key_value_groups(saved, tmp_path):
    folder, model = saved("llama")
    source, places = open_source(str(folder)), sites(checkpoints.load(folder))
    draws = torch.Generator().manual_seed(0)
    texts = [{"input_ids": torch.randint(3, 61, (8, 24), generator=draws)} for _ in range(6)]
    data = Calibration("noise", "noise", "0" * 64, texts[:4], texts[4:5], texts[5:])
    values = np.random.default_rng(0).random(count(places))
    errors = {}
    with torch.no_grad():
        target = model(**texts[5]).logits
        for heal in (False, True):
            decided = prune.decide(source, places, values, 0.5, data, heal=heal)
            assert decided.plan.after.stages[0].kv_heads == 1
            carry_out(decided, tmp_path / f"heal-{heal}", check=False)
            small = checkpoints.load(tmp_path / f"heal-{heal}").model.eval()
            errors[heal] = float((small(**texts[5]).logits - target).norm())
    assert errors[True] < errors[False]


def test_what_no_config_can_hold_is_refused(saved):
    folder, _ = saved("opt")
    with pytest.raises(UnsupportedModel, match="derives head_dim of opt"):
        prune.check(open_source(str(folder)), 0.5)


@pytest.mark.parametrize("text", ["40", "0%", "100%", "-5%", "many%", "nan%", "%"])
def test_a_share_is_a_percentage(text):
    with pytest.raises(UsageError, match="such as 40%"):
        prune.share(text)


@pytest.mark.parametrize(
    ("family", "asked", "heads"), [("vit", "40%", 2), ("vit", "30%", 3), ("vit", "99%", 1), ("llama", "60%", 2)]
)
def test_a_share_is_rounded_to_the_nearest_whole_group_and_one_stays(family, asked, heads, saved):
    source = open_source(str(saved(family)[0]))  # 4 heads; llama's stand in two groups
    assert prune.check(source, prune.share(asked)).after.stages[0].heads == heads


def test_heads_that_all_share_one_key_are_cut_one_by_one(saved):
    source = open_source(str(saved("llama", num_key_value_heads=1)[0]))
    (stage,) = prune.check(source, 0.5).after.stages
    assert (stage.heads, stage.kv_heads) == (2, 1)


def test_less_than_a_head_is_refused_with_the_least_share(saved):
    assert prune.share("37.5%") == 0.375
    folder, _ = saved("llama")
    with pytest.raises(UsageError, match=r"10%.*\b2\b.*key/value") as error:
        prune.check(open_source(str(folder)), 0.1)
    assert "50%" in error.value.hint
