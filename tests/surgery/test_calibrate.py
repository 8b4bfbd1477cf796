"""The sequential pipeline on tiny trained models: what it makes is better than plain cutting, and exact plans stay."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leansurgeon.checkpoints.model import load
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import Diverged, UsageError
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.shape import Shape, Stage
from leansurgeon.surgery.calibrate import calibrate
from leansurgeon.surgery.candidates import course
from leansurgeon.surgery.canonical import splittable
from leansurgeon.surgery.context import CalibrationContext
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.transfer import apply
from tests.checkpoints.test_skeleton import make
from tests.conftest import architecture, build
from tests.support.methods import with_method


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
    steps = plan(source, RequestedShape(**wanted), calibrated=True)
    outcome = calibrate(with_method(steps, **options), data)
    out = tmp_path / name
    out.mkdir()
    apply(replace(steps, layers=outcome.record.layers), out, outcome.edits)
    return out, outcome


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "vit"])
def test_healing_lowers_the_error_on_held_out_data(family, trained, tmp_path):
    folder, data = trained(family)
    plain, _ = cut(tmp_path, (folder, data), {"layers": "3"}, "plain", keep=(0, 1, 3), heal="none")
    healed, outcome = cut(tmp_path, (folder, data), {"layers": "3"}, "healed", keep=(0, 1, 3))
    before, after = (error(out, folder, data) for out in (plain, healed))
    assert after < 0.9 * before
    first = outcome.record.decisions[0]
    assert (first.layer, first.source, first.until) == (1, 1, 2)
    assert first.error_after < first.error_before
    prefix = {"gpt2": "transformer.h.0.", "llama": "model.layers.0.", "bert": "bert.encoder.layer.0."}
    assert not [name for name in outcome.edits if name.startswith(prefix.get(family, "vit.encoder.layer.0."))]


def test_trimmed_heads_and_units_are_chosen_and_healed(trained, tmp_path):
    folder, data = trained("llama")
    wanted = {"heads": "2", "mlp_dim": "24"}
    source = open_source(str(folder))
    by_weight = tmp_path / "weights"
    by_weight.mkdir()
    apply(plan(source, RequestedShape(**wanted)), by_weight)
    made, outcome = cut(tmp_path, (folder, data), wanted)
    assert error(made, folder, data) < 0.8 * error(by_weight, folder, data)
    assert [len(d.heads.kept) for d in outcome.record.decisions] == [2] * 4


def test_heads_split_at_equal_parameters(trained, tmp_path):
    made, outcome = cut(tmp_path, trained("bert"), {"heads": "8", "head_dim": "split"})
    assert error(made, *trained("bert")) < 0.25
    assert all(d.split for d in outcome.record.decisions)


def test_a_layer_that_only_adds_a_constant_is_absorbed_exactly(trained, tmp_path):
    model, (_, data) = build("gpt2"), trained("gpt2")
    with torch.no_grad():
        block = model.transformer.h[2]
        for module in (block.attn.c_proj, block.mlp.c_proj):
            module.weight.zero_()
    model.save_pretrained(tmp_path / "source")
    source = tmp_path / "source"
    plain, _ = cut(tmp_path, (source, data), {"layers": "3"}, "plain", keep=(0, 1, 3), heal="none")
    healed, _ = cut(tmp_path, (source, data), {"layers": "3"}, "healed", keep=(0, 1, 3))
    assert error(plain, source, data) > 1e-2
    assert error(healed, source, data) < 1e-5


@pytest.mark.parametrize("wanted", [{"heads": "8"}, {"mlp_dim": "64"}, {"heads": "8", "mlp_dim": "64"}])
def test_an_exact_plan_is_left_alone(wanted, trained, tmp_path):
    made, outcome = cut(tmp_path, trained("llama"), wanted)
    assert not outcome.edits and not outcome.record.decisions
    assert error(made, *trained("llama")) < 1e-5


def test_layers_are_chosen_by_what_the_healed_model_says(trained, tmp_path):
    folder, data = trained("llama")
    _, first = cut(tmp_path, (folder, data), {"layers": "2"}, "first")
    _, second = cut(tmp_path, (folder, data), {"layers": "2"}, "second")
    assert first.record.layers == second.record.layers
    assert sorted(first.edits) == sorted(second.edits)
    assert all(np.array_equal(first.edits[name], second.edits[name]) for name in first.edits)
    tried = first.record.candidates
    assert len({c.kept for c in tried}) > 1
    # The last ones stood against each other on all of the data.
    assert first.record.healing.score.judged_by == min(c.score.judged_by for c in tried[-4:])
    first.close()
    assert not first.edits.folder.exists()


@pytest.mark.parametrize("criterion", ["influence", "angular", "even", "first-of-each"])
def test_a_named_criterion_alone(criterion, trained, tmp_path):
    folder, data = trained("gpt2")
    _, outcome = cut(tmp_path, (folder, data), {"layers": "2"}, layers=criterion, heal="none")
    assert outcome.record.criterion == criterion
    assert outcome.record.layers == by_hand(criterion, load(folder).model.eval(), data.guard)


@torch.no_grad()
def by_hand(criterion, model, batches):
    """Two of four layers, by the library's own hidden states."""

    def states(layers, batches):
        blocks = model.transformer.h
        model.transformer.h = torch.nn.ModuleList(blocks[i] for i in layers)
        ends, hooks = [], []
        for module in model.transformer.h:
            hooks.append(module.register_forward_pre_hook(lambda _, args: ends[-1].append(args[0])))
        hooks.append(model.transformer.ln_f.register_forward_pre_hook(lambda _, args: ends[-1].append(args[0])))
        for batch in batches:
            ends.append([])
            model(input_ids=batch["input_ids"], use_cache=False)
        for hook in hooks:
            hook.remove()
        model.transformer.h = blocks
        return [torch.cat(x).flatten(0, 1).double() for x in zip(*ends, strict=True)]

    def without(*gone):
        return tuple(i for i in range(4) if i not in gone)

    h, cosine = states(range(4), batches), torch.nn.functional.cosine_similarity
    if criterion == "influence":
        influence = [float(1 - cosine(h[i], h[i + 1]).mean()) for i in range(4)]
        return without(*np.argsort(influence)[:2])
    if criterion == "angular":  # the first layer stays
        start = min((1, 2), key=lambda i: float(cosine(h[i], h[i + 2]).clamp(-1, 1).arccos().mean()))
        return without(start, start + 1)
    return (0, 2) if criterion == "first-of-each" else (0, 3)


def test_weights_that_are_no_numbers(trained, tmp_path):
    folder, data = trained("gpt2")
    model = load(folder).model
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(Diverged, match="behind layer 1"):
        cut(tmp_path, (tmp_path / "broken", data), {"layers": "3"})


def test_layers_that_do_not_fit_the_plan(trained, tmp_path):
    with pytest.raises(UsageError, match=r"\[0, 1\] keep 2 and the plan wants 3"):
        cut(tmp_path, trained("gpt2"), {"layers": "3"}, keep=(0, 1))


# -- heads that grow -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "near", [{"layers": "3"}, {"layers": "4", "mlp_dim": "64"}], ids=["fewer-layers", "fewer-units"]
)
def test_heads_that_grow_stay_exact_beside_what_is_near(near, trained, tmp_path):
    """q, k and v come from the source, not from the random numbers of new attention."""
    keep = {"keep": (0, 1, 3)} if near["layers"] == "3" else {}
    narrow, _ = cut(tmp_path, trained("gpt2"), near, "narrow", heal="none", **keep)
    grown, outcome = cut(
        tmp_path, trained("gpt2"), near | {"heads": "4", "head_dim": "16"}, "grown", heal="none", **keep
    )
    assert error(grown, narrow, trained("gpt2")[1]) < 1e-5
    assert {name for name in outcome.edits if "c_attn.weight" in name} == {
        f"transformer.h.{i}.attn.c_attn.weight" for i in range(int(near["layers"]))
    }


def test_heads_of_another_size_are_never_drawn_unasked(trained, tmp_path):
    folder, data = trained("gpt2")
    apply(plan(open_source(str(folder)), RequestedShape(heads="4", head_dim="16")), tmp_path)
    assert error(tmp_path, folder, data) < 1e-5


# -- what stands before the first kept layer -------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_the_first_kept_layer_takes_over_leading_ones(family, trained, tmp_path):
    folder, data = trained(family)
    plain, _ = cut(tmp_path, (folder, data), {"layers": "3"}, "plain", keep=(1, 2, 3), heal="none")
    healed, outcome = cut(tmp_path, (folder, data), {"layers": "3"}, "healed", keep=(1, 2, 3))
    first = outcome.record.decisions[0]
    assert (first.layer, first.source, first.until) == (0, 1, 1)
    assert first.error_after < first.error_before
    assert error(healed, folder, data) < error(plain, folder, data)


def test_a_later_stage_can_begin_behind_a_gap():
    shape = Shape((Stage(2, 2, 4, 2, 8, 8), Stage(3, 2, 4, 2, 8, 8)))
    steps = SimpleNamespace(before=shape, after=shape)
    assert not any(new.gap for new in course((0, 1, 2, 4), steps))
    assert [new.kept for new in course((1, 3, 4), steps) if new.gap] == [1, 3]


# -- what the model is, not what its class is called -----------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gemma", "opt", "gpt_neox", "electra", "modernbert"])
def test_a_family_is_causal_where_earlier_tokens_do_not_see_later_ones(family):
    model = build(family)
    ids = 5 + torch.arange(12)[None]
    with torch.no_grad():
        outputs = [model(input_ids=x).logits[:, :-1] for x in (ids, torch.cat([ids[:, :-1], ids[:, :1]], 1))]
    assert torch.equal(*outputs) is architecture(family).causal


def test_causality_does_not_hang_on_the_head(trained, tmp_path):
    assert ground_of(trained("gpt2"), tmp_path, "GPT2Model").causal


def ground_of(family_data, tmp_path, cls):
    import transformers

    folder, data = family_data
    getattr(transformers, cls).from_pretrained(folder).save_pretrained(tmp_path / "other")
    source = open_source(str(tmp_path / "other"))
    steps = plan(source, RequestedShape(layers="3"), calibrated=True)
    return CalibrationContext(steps, data)


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
    import transformers

    config = build("vit").config
    config.num_labels = labels
    getattr(transformers, cls)(config).save_pretrained(tmp_path / "source")
    data = replace(trained("vit")[1], task=Classes())
    _, outcome = cut(tmp_path, (tmp_path / "source", data), {"layers": "3"}, keep=(0, 1, 3))
    score = outcome.record.healing.score
    assert score.judged_by == getattr(score, judged)
    assert (score.guard_loss is not None) is (judged == "guard_divergence")


def test_a_norm_of_another_kind_behind_the_block_is_no_reason_to_stop(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("leansurgeon.surgery.candidate_model.closing_norm", lambda *_: None)
    _, outcome = cut(tmp_path, trained("bert"), {"layers": "3"}, keep=(0, 1, 3))
    assert isinstance(outcome.record.decisions[0].refit, str)  # the reason, where others have figures


def test_what_stands_outside_the_blocks_is_in_memory_once(trained, tmp_path):
    context = ground_of(trained("gpt2"), tmp_path, "GPT2LMHeadModel")

    def outer(skeleton):
        return {id(p) for p in skeleton.model.parameters() if not p.is_meta}

    assert len(outer(context.teacher)) == 4  # two embeddings, gain and bias of the last norm; the head is tied
    skeletons = (context.result((0, 1, 3)), context.workshop)
    assert all(outer(skeleton) == outer(context.teacher) for skeleton in skeletons)


# -- which heads can become heads of another size --------------------------------------------------


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
    ids=lambda x: str(x).replace(" ", "-"),
)
def test_which_heads_can_be_split(family, says, tmp_path):
    source, _ = make(family, tmp_path / "model")
    reason = splittable(source)
    assert reason is None if says is None else says in reason


def test_a_first_layer_with_no_place_for_a_norm_stays(tmp_path, monkeypatch):
    """ModernBERT's first layer has no norm before its attention, so no other can take its place."""
    build("modernbert").save_pretrained(tmp_path / "source")
    source = open_source(str(tmp_path / "source"))
    data = Calibration("tiny", "tiny", "-", *(text_batches(2, seed, "gpt2") for seed in (1, 2, 3)))
    monkeypatch.setattr("leansurgeon.surgery.choose_layers.by_influence", lambda *_: (2, 3))
    steps = plan(source, RequestedShape(layers="2"), calibrated=True)
    outcome = calibrate(with_method(steps, "none"), data)
    tried = [candidate.kept for candidate in outcome.record.candidates]
    assert tried and all(kept[0] == 0 for kept in tried)
