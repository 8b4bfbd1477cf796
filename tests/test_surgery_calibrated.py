"""The sequential pipeline on tiny trained models: what it makes is better than plain cutting, and exact plans stay."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Diverged, UsageError
from leansurgeon.measure.calibration import Calibration
from leansurgeon.surgery.apply import apply
from leansurgeon.surgery.calibrated import Options, calibrate
from leansurgeon.surgery.plan import plan
from leansurgeon.surgery.wanted import Wanted
from tests.conftest import build


def text_batches(count, seed, family):
    """Sequences with a rule: each token is the one before plus a step that the first two tokens give."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start, step = (torch.randint(0, n, (8, 1), generator=generator) for n in (50, 7))
        ids = 5 + (start + step * torch.arange(16)) % 50
        mask = torch.ones_like(ids)
        if family == "bert":
            mask[::3, 12:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
    return found


def image_batches(count, seed, family):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        labels = torch.randint(0, 10, (8,), generator=generator)
        images = 0.3 * torch.randn(8, 1, 8, 8, generator=generator)
        images[:, 0] += torch.nn.functional.one_hot(labels % 8, 8)[:, None] * (1.0 + (labels > 7))[:, None, None]
        found.append({"pixel_values": images, "labels": labels})
    return found


def inputs(batch):
    return {k: v for k, v in batch.items() if k != "labels"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny trained model of a family and its sample data."""
    made = {}

    def make(family):
        if family not in made:
            model = build(family, initializer_range=0.1)
            batches = image_batches if family == "vit" else text_batches
            optimizer = torch.optim.Adam(model.parameters(), 3e-3)
            for batch in batches(60, 1, family):
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
            folder = tmp_path_factory.mktemp(family)
            model.eval().save_pretrained(folder)
            parts = {
                name: batches(n, seed, family) for name, n, seed in (("fit", 24, 2), ("guard", 6, 3), ("heldout", 6, 4))
            }
            made[family] = folder, Calibration("tiny", "tiny", "-", **parts)
        return made[family]

    return make


@torch.no_grad()
def error(folder, source, data):
    """Relative error of the logits on samples that nothing was fitted to or chosen by."""
    a, b = (load(f).model.eval() for f in (source, folder))
    off = size = 0.0
    for batch in data.heldout:
        x, y = a(**inputs(batch)).logits, b(**inputs(batch)).logits
        mask = batch.get("attention_mask")
        if mask is not None:
            x, y = x[mask.bool()], y[mask.bool()]
        off, size = off + float((x - y).square().sum()), size + float(x.square().sum())
    return (off / size) ** 0.5


def cut(tmp_path, family_data, wanted, name="out", **options):
    folder, data = family_data
    source = open_source(str(folder))
    steps = plan(source, Wanted(**wanted), calibrated=True)
    outcome = calibrate(steps, source, data, Options(**options))
    out = tmp_path / name
    out.mkdir()
    apply(replace(steps, layers=outcome.layers), source, out, outcome.edits)
    return out, outcome


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "vit"])
def test_healing_lowers_the_error_on_held_out_data(family, trained, tmp_path):
    folder, data = trained(family)
    plain, _ = cut(tmp_path, (folder, data), {"layers": "3"}, "plain", keep=(0, 1, 3), heal=False)
    healed, outcome = cut(tmp_path, (folder, data), {"layers": "3"}, "healed", keep=(0, 1, 3))
    before, after = (error(out, folder, data) for out in (plain, healed))
    assert after < 0.9 * before
    first = outcome.record["decisions"][0]
    assert (first["layer"], first["from"], first["until"]) == (1, 1, 2)
    assert first["error_after"] < first["error_before"]
    prefix = {"gpt2": "transformer.h.0.", "llama": "model.layers.0.", "bert": "bert.encoder.layer.0."}
    assert not [name for name in outcome.edits if name.startswith(prefix.get(family, "vit.encoder.layer.0."))]


def test_trimmed_heads_and_units_are_chosen_and_healed(trained, tmp_path):
    folder, data = trained("llama")
    wanted = {"heads": "2", "mlp_dim": "24"}
    source = open_source(str(folder))
    by_weight = tmp_path / "weights"
    by_weight.mkdir()
    apply(plan(source, Wanted(**wanted)), source, by_weight)
    made, outcome = cut(tmp_path, (folder, data), wanted)
    assert error(made, folder, data) < 0.8 * error(by_weight, folder, data)
    assert [len(d["heads"]["kept"]) for d in outcome.record["decisions"]] == [2] * 4


def test_heads_split_at_equal_parameters(trained, tmp_path):
    made, outcome = cut(tmp_path, trained("bert"), {"heads": "8", "head_dim": "split"})
    assert error(made, *trained("bert")) < 0.25
    assert all("split" in d for d in outcome.record["decisions"])


def test_a_layer_that_only_adds_a_constant_is_absorbed_exactly(trained, tmp_path):
    model, (_, data) = build("gpt2"), trained("gpt2")
    with torch.no_grad():
        block = model.transformer.h[2]
        for module in (block.attn.c_proj, block.mlp.c_proj):
            module.weight.zero_()
    model.save_pretrained(tmp_path / "source")
    source = tmp_path / "source"
    plain, _ = cut(tmp_path, (source, data), {"layers": "3"}, "plain", keep=(0, 1, 3), heal=False)
    healed, _ = cut(tmp_path, (source, data), {"layers": "3"}, "healed", keep=(0, 1, 3))
    assert error(plain, source, data) > 1e-2
    assert error(healed, source, data) < 1e-5


@pytest.mark.parametrize("wanted", [{"heads": "8"}, {"mlp_dim": "64"}, {"heads": "8", "mlp_dim": "64"}])
def test_an_exact_plan_is_left_alone(wanted, trained, tmp_path):
    made, outcome = cut(tmp_path, trained("llama"), wanted)
    assert not outcome.edits and not outcome.record["decisions"]
    assert error(made, *trained("llama")) < 1e-5


def test_layers_are_chosen_by_what_the_healed_model_says(trained, tmp_path):
    folder, data = trained("llama")
    _, first = cut(tmp_path, (folder, data), {"layers": "2"}, "first")
    _, second = cut(tmp_path, (folder, data), {"layers": "2"}, "second")
    assert first.layers == second.layers
    assert sorted(first.edits) == sorted(second.edits)
    assert all(np.array_equal(first.edits[name], second.edits[name]) for name in first.edits)
    tried = first.record["candidates"]
    assert len({tuple(c["kept"]) for c in tried}) > 1
    # The last ones stood against each other on all of the data.
    assert first.record["healing"]["judged_by"] == min(c["judged_by"] for c in tried[-4:])
    first.close()
    assert not first.edits.folder.exists()


@pytest.mark.parametrize("criterion", ["influence", "angular", "leave-one-out", "greedy", "even"])
def test_a_named_criterion_alone(criterion, trained, tmp_path):
    _, outcome = cut(tmp_path, trained("gpt2"), {"layers": "3"}, criterion=criterion, heal=False)
    assert outcome.criterion == criterion and len(outcome.layers) == 3


def test_weights_that_are_no_numbers(trained, tmp_path):
    folder, data = trained("gpt2")
    model = load(folder).model
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(Diverged, match="behind layer 1"):
        cut(tmp_path, (tmp_path / "broken", data), {"layers": "3"})


def test_layers_that_do_not_fit_the_plan(trained, tmp_path):
    with pytest.raises(UsageError, match=r"\[0, 1\] give \[2\]"):
        cut(tmp_path, trained("gpt2"), {"layers": "3"}, keep=(0, 1))
