"""The sequential pipeline on tiny trained models: what it makes is better than plain cutting, and exact plans stay."""

from dataclasses import dataclass, replace
from math import pi
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Diverged, UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.shape import Groups
from leansurgeon.surgery import choose_layers
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.canonical import splittable
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from tests.checkpoints.test_skeleton import make
from tests.conftest import architecture, build
from tests.support.methods import with_method
from tests.surgery.cuts import cut, cut_with_data, error, text_batches

LESS = {"layers": "3"}


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_healing_lowers_the_error_on_held_out_data(family, trained, tmp_path):
    folder, data = trained(family)
    plain, _ = cut_with_data(tmp_path, (folder, data), LESS, "plain", keep=(0, 1, 3), heal="none")
    healed, outcome = cut_with_data(tmp_path, (folder, data), LESS, "healed", keep=(0, 1, 3))
    assert error(healed, folder, data) < 0.9 * error(plain, folder, data)
    first = outcome.record.decisions[0]
    assert (first.layer, first.source, first.until) == (1, 1, 2)
    assert first.error_after < first.error_before
    assert not [name for name in outcome.edits if name.startswith(("transformer.h.0.", "bert.encoder.layer.0."))]


def test_the_first_kept_layer_takes_over_leading_ones(trained, tmp_path):
    folder, data = trained("gpt2")
    plain, _ = cut_with_data(tmp_path, (folder, data), LESS, "plain", keep=(1, 2, 3), heal="none")
    healed, outcome = cut_with_data(tmp_path, (folder, data), LESS, "healed", keep=(1, 2, 3))
    first = outcome.record.decisions[0]
    assert (first.layer, first.source, first.until) == (0, 1, 1)
    assert error(healed, folder, data) < error(plain, folder, data)


def test_trimmed_heads_and_units_are_chosen_and_healed(trained, tmp_path):
    folder, data = trained("llama")
    wanted = {"heads": "2", "mlp_dim": "24"}
    cut(folder, tmp_path / "weights", **wanted)
    made, outcome = cut_with_data(tmp_path, (folder, data), wanted)
    assert error(made, folder, data) < 0.8 * error(tmp_path / "weights", folder, data)
    assert [len(d.heads.kept) for d in outcome.record.decisions] == [2] * 4


def test_heads_split_at_equal_parameters(trained, tmp_path):
    made, outcome = cut_with_data(tmp_path, trained("bert"), {"heads": "8", "head_dim": "split"})
    assert error(made, *trained("bert")) < 0.25
    assert all(d.split for d in outcome.record.decisions)


def test_a_layer_that_only_adds_a_constant_is_absorbed_exactly(trained, tmp_path):
    model, source = build("gpt2"), (tmp_path / "source", trained("gpt2")[1])
    block = model.transformer.h[2]
    with torch.no_grad():
        for module in (block.attn.c_proj, block.mlp.c_proj):
            module.weight.zero_()
    model.save_pretrained(source[0])
    plain, _ = cut_with_data(tmp_path, source, LESS, "plain", keep=(0, 1, 3), heal="none")
    healed, _ = cut_with_data(tmp_path, source, LESS, "healed", keep=(0, 1, 3))
    assert error(plain, *source) > 1e-2
    assert error(healed, *source) < 1e-5


def test_an_exact_plan_is_left_alone(trained, tmp_path):
    made, outcome = cut_with_data(tmp_path, trained("llama"), {"heads": "8", "mlp_dim": "64"})
    assert not outcome.edits and not outcome.record.decisions
    assert error(made, *trained("llama")) < 1e-5


def test_layers_are_chosen_by_what_the_healed_model_says(trained, tmp_path):
    """And a second cut decides the same and makes the same tensors."""
    first, second = (cut_with_data(tmp_path, trained("llama"), {"layers": "2"}, name)[1] for name in ("a", "b"))
    assert first.record.layers == second.record.layers
    assert first.edits.keys() == second.edits.keys()
    assert all(np.array_equal(first.edits[name], second.edits[name]) for name in first.edits)
    tried = first.record.candidates
    assert len({c.kept for c in tried}) > 1
    # The last ones stood against each other on all of the data.
    assert first.record.healing.score.judged_by == min(c.score.judged_by for c in tried[-4:])
    first.close()
    assert not first.edits.folder.exists()


@pytest.mark.parametrize("criterion", ["influence", "angular"])
@torch.no_grad()
def test_a_named_criterion_alone(criterion, trained, tmp_path):
    """Against the hidden states of real tokens that the library gives."""
    folder, data = trained("bert")
    _, outcome = cut_with_data(tmp_path, (folder, data), {"layers": "2"}, layers=criterion, heal="none")
    model, parts = load(folder).model.eval(), []
    for batch in data.guard:
        states = model(**batch, output_hidden_states=True).hidden_states
        parts.append(torch.stack(states)[:, batch["attention_mask"].bool()])
    h = torch.cat(parts, 1).double()

    def angles(n):
        return torch.cosine_similarity(h[:-n], h[n:], dim=-1).clamp(-1, 1).arccos().mean(1) / pi

    influence = (1 - torch.cosine_similarity(h[:-1], h[1:], dim=-1)).mean(1)
    start = int(angles(2)[1:].argmin()) + 1  # the first layer stays
    expected = {
        "influence": tuple(influence.topk(2).indices.sort().values.tolist()),
        "angular": tuple(i for i in range(4) if i not in (start, start + 1)),
    }
    assert (outcome.record.criterion, outcome.record.layers) == (criterion, expected[criterion])
    found = outcome.record.evidence
    assert found["influence"] == pytest.approx(influence.tolist(), abs=2e-6)
    assert list(found["angle"]["2"].values()) == pytest.approx(angles(2).tolist(), abs=1e-5)


def test_two_blocks_leave_a_layer_between_them():
    angle = {(i, 2): a for i, a in enumerate([0.5, 0.1, 0.2, 0.3, 0.12, 0.4, 0.6])} | {(1, 4): 0.3, (2, 4): 0.2}
    found = choose_layers.Evidence([0.1] * 8, angle, [Groups(range(8), 4)])
    assert choose_layers.by_angle(found) == (0, 1, 6, 7)
    assert choose_layers.by_angle(found, rank=1) == (0, 5, 6, 7)
    assert choose_layers.by_angle(found, rank=2) is None
    assert choose_layers.by_angle(found, blocks=2) == (0, 3, 6, 7)


def test_what_cannot_be_calibrated_is_said(trained, tmp_path):
    folder, data = trained("gpt2")
    model = load(folder).model
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(Diverged, match="behind layer 1"):
        cut_with_data(tmp_path, (tmp_path / "broken", data), LESS)
    with pytest.raises(UsageError, match=r"\[0, 1\] keep 2 and the plan needs 3"):
        cut_with_data(tmp_path, (folder, data), LESS, keep=(0, 1))


def test_heads_that_grow_stay_exact_beside_what_is_near(trained, tmp_path):
    """q, k and v come from the source, not from the random numbers of new attention."""
    folder, data = trained("gpt2")
    options = {"heal": "none", "keep": (0, 1, 3)}
    narrow, _ = cut_with_data(tmp_path, (folder, data), LESS, "narrow", **options)
    larger = LESS | {"heads": "4", "head_dim": "16"}
    grown, outcome = cut_with_data(tmp_path, (folder, data), larger, "grown", **options)
    assert error(grown, narrow, data) < 1e-5
    changed = {name for name in outcome.edits if "c_attn.weight" in name}
    assert changed == {f"transformer.h.{i}.attn.c_attn.weight" for i in range(3)}


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "opt", "modernbert"])
def test_a_family_is_causal_where_earlier_tokens_do_not_see_later_ones(family):
    model = build(family)
    ids = 5 + torch.arange(12)[None]
    with torch.no_grad():
        outputs = [model(input_ids=x).logits[:, :-1] for x in (ids, torch.cat([ids[:, :-1], ids[:, :1]], 1))]
    assert torch.equal(*outputs) is architecture(family).causal


@dataclass(frozen=True)
class Classes:
    """A task: cross-entropy, which fails on anything but logits."""

    head: str = "image-classification"

    def score(self, logits, batch):
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")
        return SimpleNamespace(loss_sum=loss, loss_count=len(logits))


@pytest.mark.parametrize(
    "cls, labels, judged",
    [
        ("ViTForImageClassification", 10, "guard_divergence"),
        ("ViTForImageClassification", 1, "guard_error"),
        ("ViTModel", 10, "guard_error"),
    ],
    ids=["classes", "regression", "no-head"],
)
def test_divergence_is_for_predictions(cls, labels, judged, trained, tmp_path):
    config = build("vit").config
    config.num_labels = labels
    getattr(transformers, cls)(config).save_pretrained(tmp_path / "source")
    data = replace(trained("vit")[1], task=Classes())
    _, outcome = cut_with_data(tmp_path, (tmp_path / "source", data), LESS, keep=(0, 1, 3))
    score = outcome.record.healing.score
    assert score.judged_by == getattr(score, judged)
    assert (score.guard_loss is not None) is (judged == "guard_divergence")


@pytest.mark.parametrize(
    "family, says",
    [
        *((name, None) for name in ("bert", "gpt2", "vit", "opt", "timm-vit")),
        *((name, "every head") for name in ("nystromformer", "timm-swin", "timm-beit")),
        ("timm-eva", "no module call"),
        ("siglip_vision_model", "outside its blocks"),
        ("qwen3", "normalises"),
        ("timm-xcit", "channels"),
    ],
)
def test_which_heads_can_be_split(family, says, tmp_path):
    source, _ = make(family, tmp_path / "model")
    reason = splittable(source)
    assert reason is None if says is None else says in reason


def test_a_first_layer_with_no_place_for_a_norm_stays(tmp_path, monkeypatch):
    """ModernBERT's first layer has no norm before its attention, so no other can take its place."""
    build("modernbert").save_pretrained(tmp_path / "source")
    data = Calibration("tiny", "tiny", "-", *(text_batches(2, seed, "gpt2") for seed in (1, 2, 3)))
    monkeypatch.setattr(choose_layers, "by_influence", lambda *_: (2, 3))
    steps = plan(open_source(str(tmp_path / "source")), RequestedShape(layers="2"), calibrated=True)
    tried = [candidate.kept for candidate in calibrate(with_method(steps, "none"), data).record.candidates]
    assert tried and all(kept[0] == 0 for kept in tried)
