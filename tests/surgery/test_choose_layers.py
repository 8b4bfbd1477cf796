"""Criteria for layers, against a plain run of the whole model."""

import math

import pytest
import torch

from leansurgeon.checkpoints.blockwise.skeleton import Skeleton
from leansurgeon.shape import Groups, groups_of
from leansurgeon.surgery import choose_layers
from tests.conftest import architecture, build

GENERATOR = torch.Generator()


def model_and_batches(family):
    model = build(family)
    GENERATOR.manual_seed(5)
    batches = []
    for _ in range(2):
        ids = torch.randint(3, 61, (2, 9), generator=GENERATOR)
        mask = torch.ones_like(ids)
        if family == "bert":
            mask[1, 6:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return model, batches, [b["attention_mask"].bool() for b in batches]


def skeleton_of(model, family):
    skeleton = Skeleton(model.config.to_dict() | {"architectures": [type(model).__name__]}, architecture(family))
    state = {slot.file: model.state_dict()[slot.memory[0]].numpy() for slot in skeleton.slots.values()}
    skeleton.fill_outer(lambda name: state[name])
    return skeleton, lambda i: skeleton.fill(i, {s.file: state[s.file] for s in skeleton._in_block(i)})


def layers_of(model):
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)


@torch.no_grad()
def states(model, batches, masks, without=()):
    """Hidden states of real tokens before every layer and behind the last, of the whole model."""
    layers = layers_of(model)
    parent, name = next((m, n) for m in model.modules() for n, c in m.named_children() if c is layers)
    kept = [layer for i, layer in enumerate(layers) if i not in without]
    seen = []

    def note(_, args, kwargs):
        seen.append((*args, *kwargs.values())[0])

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in kept]
    hooks.append(
        kept[-1].register_forward_hook(lambda _, __, out: seen.append(out if torch.is_tensor(out) else out[0]))
    )
    setattr(parent, name, torch.nn.ModuleList(kept))
    model.config.num_hidden_layers, model.config.use_cache = len(kept), False
    found = []
    for batch, mask in zip(batches, masks, strict=True):
        seen.clear()
        model(**batch)
        found.append([s[mask] for s in seen])
    setattr(parent, name, layers)
    model.config.num_hidden_layers = len(layers)
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts).double() for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_influence_and_angle(family):
    model, batches, masks = model_and_batches(family)
    skeleton, fill = skeleton_of(model, family)
    before = skeleton.shape
    found = choose_layers.measure_layers(skeleton, fill, batches, masks, groups_of(before, before.with_(depth=1)))
    h = states(model, batches, masks)
    for i in range(4):
        cos = torch.nn.functional.cosine_similarity(h[i], h[i + 1], dim=-1)
        assert found.influence[i] == pytest.approx(float((1 - cos).mean()), abs=1e-6)
    assert {n for _, n in found.angle} == {1, 2, 3}
    for (i, n), angle in found.angle.items():
        cos = torch.nn.functional.cosine_similarity(h[i], h[i + n], dim=-1)
        assert angle == pytest.approx(float(torch.arccos(cos).mean() / math.pi), abs=1e-5)
    assert len(found.angle) == 4 + 3 + 2
    least = sorted(range(4), key=lambda i: found.influence[i])[:3]
    assert choose_layers.by_influence(found) == tuple(i for i in range(4) if i not in least)
    assert choose_layers.by_angle(found) == (0,)  # the first layer stays: something must stand before the cut


def test_two_blocks_leave_a_layer_between_them():
    angle = {(i, 2): a for i, a in enumerate([0.5, 0.1, 0.2, 0.3, 0.12, 0.4, 0.6])} | {(1, 4): 0.3, (2, 4): 0.2}
    found = choose_layers.Evidence([0.1] * 8, angle, [Groups(range(8), 4)])
    assert choose_layers.by_angle(found) == (0, 1, 6, 7)
    assert choose_layers.by_angle(found, rank=1) == (0, 5, 6, 7)
    assert choose_layers.by_angle(found, rank=2) is None
    assert choose_layers.by_angle(found, blocks=2) == (0, 3, 6, 7)
