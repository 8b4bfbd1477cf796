"""Pruned checkpoints compute what the masked model computes, and healing takes back part of what that costs."""

import numpy as np
import pytest

from leansurgeon.checkpoints import model as checkpoints
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.heads.pruning import strengths
from leansurgeon.measure.heads.sites import Site, count, sites, switch_off_heads
from leansurgeon.surgery import prune
from leansurgeon.surgery.prune import MEASURED
from leansurgeon.surgery.shrink import carry_out
from tests.conftest import example
from tests.surgery.cuts import error, logits

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
    loaded = checkpoints.load(folder)
    places = sites(loaded)
    values = np.random.default_rng(0).random(count(places))
    decided = prune.decide(open_source(str(folder)), places, values, asked, NOTHING, heal=False)
    record = carry_out(decided, tmp_path / "out", check=False)
    assert {(s.heads, s.kv_heads) for s in decided.plan.after.stages} == {(heads, kv_heads)}

    small, inputs = checkpoints.load(tmp_path / "out").model, example(model)
    assert sum(p.numel() for p in small.parameters()) == decided.plan.parameters_after.total
    keep = strongest(places, values, heads / 4)
    whole = logits(loaded.model, inputs)
    with switch_off_heads(loaded.model, places, keep):
        masked = logits(loaded.model, inputs)
    found = logits(small, inputs)
    assert float((found - masked).abs().max()) <= 1e-4 * float(masked.std())
    assert float((found - whole).abs().max()) > 1e-2 * float(whole.std())
    assert record.decided.kept_heads["0"] == tuple(np.flatnonzero(keep[:4]).tolist())


def test_healing_takes_back_a_part_of_the_loss(trained, tmp_path):
    """And chooses no other heads."""
    folder, data = trained("llama")
    source, places = open_source(str(folder)), sites(checkpoints.load(folder))
    values = np.random.default_rng(0).random(count(places))
    errors, kept = [], []
    for heal in (False, True):
        out = tmp_path / f"heal-{heal}"
        record = carry_out(prune.decide(source, places, values, 0.5, data, heal=heal), out, check=False)
        errors.append(error(out, folder, data))
        kept.append(tuple(record.decided.kept_heads.items()))
        assert MEASURED in (out / "README.md").read_text()
    assert kept[0] == kept[1] and errors[1] < 0.8 * errors[0]


def test_what_no_config_can_hold_is_refused(saved):
    folder, _ = saved("opt")
    with pytest.raises(UnsupportedModel, match="derives head_dim of opt"):
        prune.check(open_source(str(folder)), 0.5)


@pytest.mark.parametrize("text", ["40", "0%", "100%", "-5%", "many%", "nan%", "%"])
def test_a_share_is_a_percentage(text):
    with pytest.raises(UsageError, match="such as 40%"):
        prune.share(text)


@pytest.mark.parametrize(
    ("family", "asked", "heads", "changes"),
    [
        ("vit", "30%", 3, {}),
        ("vit", "99%", 1, {}),
        ("llama", "60%", 2, {}),  # its 4 heads stand in two groups
        ("llama", "37.5%", 2, {"num_key_value_heads": 1}),  # all share one key, and are cut one by one
    ],
)
def test_a_share_is_rounded_to_the_nearest_whole_group_and_one_stays(family, asked, heads, changes, saved):
    source = open_source(str(saved(family, **changes)[0]))
    assert prune.check(source, prune.share(asked)).after.stages[0].heads == heads


def test_less_than_a_head_is_refused_with_the_least_share(saved):
    with pytest.raises(UsageError, match=r"10%.*\b2\b.*key/value") as caught:
        prune.check(open_source(str(saved("llama")[0])), 0.1)
    assert "50%" in caught.value.hint
