"""Fused layers against the library's own blocks side by side; padding changes nothing; pairs against brute force."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from leansurgeon import architectures
from leansurgeon.checkpoints import load
from leansurgeon.checkpoints.blockwise.skeleton import Skeleton
from leansurgeon.checkpoints.blockwise.stream import Stream
from leansurgeon.checkpoints.family import write_config
from leansurgeon.checkpoints.reshaped import Reshaped
from leansurgeon.checkpoints.source import open_source
from leansurgeon.checkpoints.weights import Out, write
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.surgery.layer.canonical import pack, unpack
from leansurgeon.surgery.layer.fuse_layers import choose_pairs, fuse, norms_of, pad, supported, take
from leansurgeon.surgery.plan.operators.drop_layers import Choice
from leansurgeon.surgery.plan.planning import keeping, plan
from leansurgeon.surgery.plan.wanted import Wanted
from tests.checkpoints.test_skeleton import batches, make, of_layer, opened
from tests.surgery.walk.test_calibrated import cut, error, trained  # noqa: F401 (a fixture)

FUSED = ["llama", "mistral", "qwen2", "gemma", "vit", "deit", "gpt2", "timm-vit", "lra/text"]
REFUSED = {
    "bert": r"\bnorms behind\b",
    "qwen3": "qk_norm",
    "modernbert": r"\bdiffer\b",
    "smollm3": r"\bdiffer\b",  # every fourth layer has no rotary positions
    "gpt2-tinystories": r"\bbiases\b",
    "timm-beit": r"relative_position_bias_table' \(head_param\)",
    "timm-eva": r"\bkeys no biases\b",
    "dinov2": "4 norms or scales",
    "timm-davit": "several attentions",
}


def silenced(layer, part):
    """A layer whose attention or MLP adds nothing."""

    def zero(x):
        return None if x is None else np.zeros_like(x)

    a, m = layer.attention, layer.mlp
    if part == "attention":
        return replace(layer, attention=replace(a, o=zero(a.o), o_bias=zero(a.o_bias)))
    return replace(layer, mlp=replace(m, down=zero(m.down), down_bias=zero(m.down_bias)))


def wide(source):
    """A skeleton with twice the heads, key/value heads and units, and its shape and family."""
    stage = source.shape.stages[0]
    shape = source.shape.with_(heads=2 * stage.heads, kv_heads=2 * stage.kv_heads, mlp_dim=2 * stage.mlp_dim)
    arch = source.architecture
    arch = arch if arch.holds(source.shape, shape) else architectures.known()[arch.decoupled]
    skeleton = Skeleton(Reshaped(source, arch, shape).config(), arch)
    skeleton.fill_outer(source.weights.float32)
    return skeleton, shape, arch


def parallel(source, model, first, second):
    """Both layers side by side, by the library's own blocks with a part silenced: hidden states behind them."""
    skeleton = opened(source)
    stream = Stream(skeleton, batches(source, model))

    def through(i, part, hidden):
        same = Reshaped(source, source.architecture, source.shape)
        skeleton.fill(i, pack(silenced(unpack(source, i), part), same, i))
        return stream.run(i, hidden)

    x = stream.hidden
    h = [a + b - c for a, b, c in zip(through(first, "mlp", x), through(second, "mlp", x), x, strict=True)]
    pairs = zip(through(first, "attention", h), through(second, "attention", h), h, strict=True)
    return [a + b - c for a, b, c in pairs]


@pytest.mark.parametrize("key", FUSED)
def test_a_fused_layer_is_the_parallel_form_of_two(key, tmp_path):
    source, model = make(key, tmp_path / "source")
    assert supported(source) is None
    want = parallel(source, model, 1, 2)
    fused = fuse(unpack(source, 1), unpack(source, 2), norms_of(source))
    skeleton, shape, arch = wide(source)
    skeleton.fill(1, pack(fused, Reshaped(source, arch, shape), 1))
    stream = Stream(skeleton, batches(source, model))
    for got, expected in zip(stream.run(1), want, strict=True):
        assert (got - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_fused_is_said(key, tmp_path):
    source, _ = make(key, tmp_path / "source")
    assert re.search(REFUSED[key], supported(source))
    with pytest.raises(UnsupportedModel, match=REFUSED[key]):
        norms_of(source)


@pytest.mark.parametrize("key", ["llama", "vit", "gpt2", "gemma"])
def test_others_are_padded_and_the_whole_reloads(key, tmp_path):
    """Layers 1 and 2 fused, 0 and 3 padded with silent heads and units: written, loaded by the library, and run."""
    source, model = make(key, tmp_path / "source")
    skeleton, shape, arch = wide(source)
    shape = shape.with_(depth=3)
    layers = [unpack(source, 0), fuse(unpack(source, 1), unpack(source, 2), norms_of(source)), unpack(source, 3)]
    tensors = {s.name: source.weights.float32(s.name) for s in source.specs if s.layer is None}
    for i, layer in enumerate(layers):
        tensors |= pack(pad(layer, shape.stages[0], seed=i), Reshaped(source, arch, shape), i)
    out = tmp_path / "out"
    out.mkdir()
    names = [s.name for s in Reshaped(source, arch, shape).specs]
    write(out, [Out(n, "F32", tensors[n].shape, make=lambda n=n: np.ascontiguousarray(tensors[n])) for n in names])
    write_config(out, Reshaped(source, arch, shape).config((0, 1, 3)), arch)
    lean = load(out)
    assert lean.architecture.shape(lean.config) == shape

    old = opened(source)
    stream = Stream(old, batches(source, model))
    skeleton.fill(1, pack(layers[1], Reshaped(source, arch, shape), 1))
    other = Stream(skeleton, batches(source, model))
    for i in range(4):
        if i == 2:
            outputs = stream.hidden
        elif i == 1:
            outputs = other.run(1, stream.hidden)
        else:
            old.fill(i, of_layer(source, i))
            outputs = stream.run(i)
        stream.advance(outputs)
    opened_again = open_source(str(out))
    fresh = opened(opened_again)
    whole = Stream(fresh, batches(source, model))
    for i in range(3):
        fresh.fill(i, of_layer(opened_again, i))
        whole.advance(whole.run())
    for got, want in zip(whole.finish(), stream.finish(), strict=True):
        assert (got - want).abs().max() < 1e-4 * want.std()


def test_taking_the_first_half_gives_the_first_layer(tmp_path):
    source, _ = make("llama", tmp_path / "source")
    a = unpack(source, 1)
    twin = fuse(a, a, norms_of(source))
    assert twin.attention.heads == 2 * a.attention.heads and len(twin.mlp.up) == 2 * len(a.mlp.up)
    back = take(twin, range(a.attention.kv_heads), range(len(a.mlp.up)))
    for one, other in ((back.attention, a.attention), (back.mlp, a.mlp)):
        for name, values in vars(one).items():
            if name not in ("o_bias", "down_bias"):  # the sum of both
                assert values is None or np.array_equal(values, getattr(other, name))
    with pytest.raises(UsageError, match=r"\b\d+ heads on \d+ key/value\b.*\bMLP\b"):
        pad(twin, source.shape.stages[0])


def test_pairs_are_the_cheapest_by_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(30):
        n = int(rng.integers(2, 9))
        count = int(rng.integers(0, n // 2 + 1))
        cost = rng.random(n + 3)
        stage = range(3, 3 + n)
        sets = [
            c for c in itertools.combinations(stage[:-1], count) if all(b - a > 1 for a, b in itertools.pairwise(c))
        ]
        best = min(sets, key=lambda c: sum(cost[i] for i in c))
        assert sum(cost[i] for i in choose_pairs(cost, stage, count)) == pytest.approx(sum(cost[i] for i in best))
    with pytest.raises(UsageError, match=r"\b5\b.*\b2\b.*\b3\b"):
        choose_pairs([0.0] * 5, range(5), 3)


# -- within the calibrated pipeline ----------------------------------------------------------------


@pytest.mark.parametrize("family", ["vit", "llama", "gpt2"])
def test_fused_and_trimmed_is_better_than_dropped(family, trained, tmp_path):  # noqa: F811
    folder, data = trained(family)
    out, outcome = cut(tmp_path, (folder, data), {"layers": "3"}, "fused", criterion="fuse")
    (first,) = [d for d in outcome.record.decisions if d.fused]
    pair = first.fused
    assert pair[1] == pair[0] + 1 and pair[1] not in outcome.layers and len(outcome.record.evidence["pair_errors"]) == 4
    plain, _ = cut(tmp_path, (folder, data), {"layers": "3"}, "plain", keep=outcome.layers, heal=False)
    assert error(out, folder, data) < 0.9 * error(plain, folder, data)
    source = open_source(str(folder))
    steps = keeping(plan(source, Wanted(layers="3"), calibrated=True), Choice(outcome.layers, outcome.criterion))
    step = steps.operators[0]
    assert (step.name, step.settings["pairs"]) == ("fuse-layers", [list(pair)]) and f"{pair[0]}+{pair[1]}" in step.says


def test_with_room_for_all_of_it_nothing_is_trimmed(trained, tmp_path):  # noqa: F811
    folder, data = trained("vit")
    wanted = {"layers": "3", "heads": "10", "head_dim": "keep", "mlp_dim": "100"}
    out, outcome = cut(tmp_path, (folder, data), wanted, criterion="fuse", heal=False)
    (first,) = [d for d in outcome.record.decisions if d.fused]
    assert first.heads is None and first.mlp is None
    source, lean = open_source(str(folder)), open_source(str(out))
    a, b = (unpack(source, i) for i in first.fused)
    whole, got = fuse(a, b, norms_of(source)), unpack(lean, first.layer)
    for name in ("q", "k", "v"):
        assert np.allclose(getattr(got.attention, name)[:8], getattr(whole.attention, name), atol=1e-6)
    assert np.allclose(got.attention.o[:, :8], whole.attention.o, atol=1e-6) and not got.attention.o[:, 8:].any()
    assert np.allclose(got.mlp.down[:, :96], whole.mlp.down, atol=1e-6) and not got.mlp.down[:, 96:].any()
    assert error(out, folder, data) < 1


def test_shapes_that_fusing_does_not_reach(trained, tmp_path):  # noqa: F811
    with pytest.raises(UsageError, match=r"\b4\b.*\b2\b.*\b3\b"):
        cut(tmp_path, trained("llama"), {"layers": "1"}, criterion="fuse")
    with pytest.raises(UsageError, match=r"\b8\b.*\b4\b"):
        cut(tmp_path, trained("vit"), {"layers": "3", "heads": "8", "head_dim": "4"}, "other", criterion="fuse")
    with pytest.raises(UsageError, match=r"--method fuse .*\b2 query heads\b.*\b2 heads on 2\b"):
        cut(tmp_path, trained("llama"), {"layers": "3", "heads": "2"}, "few", criterion="fuse")
