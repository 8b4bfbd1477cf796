"""Head importance against explicit mask variables and against finite differences of the weights, in every family."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from leansurgeon import architectures
from leansurgeon.checkpoints.model import Loaded, create_timm
from leansurgeon.checkpoints.source import timm_config
from leansurgeon.measure.heads.importance import importance, slopes_of_batch
from leansurgeon.measure.heads.judge import HeadScorer, Labelled, OutputScorer
from leansurgeon.measure.heads.sites import count, sites, split
from leansurgeon.tasks.base import Score
from tests.conftest import FAMILIES, build, example

CASES = ["bert", "vit", "gpt2", "llama", "t5", "bart", "timm vit", "timm swin", "timm xcit"]
TIMM = {
    "timm vit": ("vit_tiny_patch16_224", dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4)),
    "timm swin": (
        "swin_tiny_patch4_window7_224",
        dict(img_size=32, window_size=4, embed_dim=16, depths=(2, 1, 1, 1), num_heads=(2, 2, 4, 4)),
    ),
    "timm xcit": ("xcit_nano_12_p16_224", dict(img_size=32, embed_dim=32, depth=2, num_heads=4)),
}


class Classes:
    """Cross-entropy of each sample, or of the tokens of each sample, by torch itself and in fp64."""

    def __init__(self, head: str) -> None:
        self.head = head

    def score(self, logits, batch, **_) -> Score:
        labels = batch["labels"]
        if labels.dim() == 2 and self.head == "causal-lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        classes = logits.reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(classes, labels.flatten(), reduction="sum", ignore_index=-100)
        count = (labels != -100).sum().double()
        return Score(loss, count, loss.detach(), count)


def loaded_of(case: str) -> tuple[Loaded, dict]:
    """A tiny random model in fp64, and a batch with labels."""
    if case in TIMM:
        name, args = TIMM[case]
        torch.manual_seed(0)
        model = create_timm(name, num_classes=10, **args).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        derived = {"head_dim": [8, 16, 16, 32]} if "swin" in name else {}
        model_args = timm_config(name)["model_args"] | args | {"num_classes": 10} | derived
        config = {"architecture": name, "num_classes": 10, "model_args": model_args}
        batch = {"pixel_values": torch.randn(3, 3, args["img_size"], args["img_size"], dtype=torch.float64)}
    else:
        model = build(case).double()
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        batch = {k: v.double() if v.is_floating_point() else v for k, v in example(model).items()}
    generator = torch.Generator().manual_seed(3)
    if "pixel_values" in batch:
        batch["labels"] = torch.randint(0, 10, (3,), generator=generator)
    else:
        shape = batch.get("decoder_input_ids", batch["input_ids"]).shape
        batch["labels"] = torch.randint(3, 61, shape, generator=generator)
        batch["labels"][0, 5:] = -100  # samples of different length
    return Loaded(model, architectures.of(config), config, None, None), batch


def head(case: str) -> str:
    return "causal-lm" if case in ("gpt2", "llama") else "any"


class Masked(torch.nn.Module):
    """An output projection behind one explicit variable for every sample and head."""

    def __init__(self, inner: torch.nn.Module, rows: int, heads: int) -> None:
        super().__init__()
        self.inner, self.xi = inner, torch.ones(rows, heads, dtype=torch.float64, requires_grad=True)

    def forward(self, x):
        rows, heads = self.xi.shape
        each = x.reshape(rows, -1, heads, x.shape[-1] // heads) * self.xi[:, None, :, None]
        return self.inner(each.reshape(x.shape))


@pytest.mark.parametrize("case", CASES)
def test_importance_is_the_gradient_of_explicit_masks(case):
    loaded, batch = loaded_of(case)
    judge, places = Labelled(loaded, Classes(head(case))), sites(loaded)
    found = slopes_of_batch(judge, places, batch)
    values = importance(judge, places, [batch])

    wrapped = []
    for site in places:
        parent, _, name = site.module.rpartition(".")
        module = loaded.model.get_submodule(parent)
        wrapped.append(Masked(getattr(module, name), 3, site.heads))
        setattr(module, name, wrapped[-1])
    judge.losses(judge.forward(batch), batch).sum().backward()
    explicit = [mask.xi.grad for mask in wrapped]
    largest = max(float(e.abs().max()) for e in explicit)
    assert largest > 1e-4
    for mine, theirs in zip(found, explicit, strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-6 * largest
    expected = torch.cat([e.abs().mean(0) for e in explicit]).numpy()
    assert np.abs(values - expected).max() <= 1e-6 * expected.max()


def test_padding_changes_nothing():
    loaded, batch = loaded_of("bert")
    judge, places = Labelled(loaded, Classes("any")), sites(loaded)
    short = {name: values[:, :8] for name, values in batch.items()}
    fill = {"input_ids": 5, "attention_mask": 0, "labels": -100}
    padded = {name: F.pad(values, (0, 4), value=fill[name]) for name, values in short.items()}
    a, b = (importance(judge, places, [x]) for x in (short, padded))
    assert np.allclose(a, b, rtol=1e-9)


def test_nothing_is_left_behind_and_frozen_weights_do():
    loaded, batch = loaded_of("vit")
    judge, places = Labelled(loaded, Classes("any")), sites(loaded)
    loaded.model.train()
    before = importance(judge, places, [batch])
    assert loaded.model.training and all(p.grad is None for p in loaded.model.parameters())
    assert not any(m._forward_pre_hooks for m in loaded.model.modules())
    loaded.model.requires_grad_(False)
    assert np.allclose(importance(judge, places, [batch]), before, rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_head_that_is_off_is_a_head_without_output_weights(case):
    loaded, batch = loaded_of(case)
    judge = Labelled(loaded, Classes(head(case)))
    bench = HeadScorer(judge, sites(loaded), [batch])
    site, keep = bench.sites[-1], np.ones(count(bench.sites), bool)
    keep[-2] = False
    masked, whole = bench.scores(keep), bench.whole
    weight = loaded.model.get_submodule(site.module).weight.data
    inner = weight if case == "gpt2" else weight.T
    inner[-2 * site.head_dim : -site.head_dim] = 0
    with torch.no_grad():
        expected = judge.losses(judge.forward(batch), batch)
    assert np.allclose(masked.losses, expected.numpy(), rtol=1e-9)
    assert not np.allclose(masked.losses, whole.losses, rtol=1e-9)


def test_without_labels_importance_is_the_change_of_the_embedding():
    """E |v . J| = sqrt(2 / pi) |J| for Gaussian v, with J by finite differences; and 1 - cos is |J|^2 / 2."""
    loaded, batch = loaded_of("bert")
    loaded.model = loaded.model.bert  # a sentence encoder
    names = [f"encoder.layer.{i}.attention.output.dense" for i in range(4)]
    judge, places = OutputScorer(loaded), sites(SimpleNamespace(**vars(loaded), projections=names))
    one = {k: v[:1] for k, v in batch.items() if k != "labels"}
    many = {k: v.repeat(2000, 1) for k, v in one.items()}
    values = split(importance(judge, places, [many]), places)[0]
    weight = loaded.model.get_submodule(places[0].module).weight.data
    with torch.no_grad():
        whole = judge.forward(one)
        for h in range(4):
            part, eps = weight[:, 8 * h : 8 * h + 8], 1e-4
            part.mul_(1 + eps)
            jacobian = float((judge.forward(one) - whole).norm()) / eps
            cosine = float(judge.losses(judge.forward(one), one, whole))
            part.div_(1 + eps)
            assert values[h] == pytest.approx(np.sqrt(2 / np.pi) * jacobian, rel=0.08)
            assert cosine == pytest.approx((jacobian * eps) ** 2 / 2, rel=0.02)


def test_sites_of_two_stacks():
    loaded, _ = loaded_of("t5")
    found = sites(loaded)
    assert [site.kind for site in found] == ["encoder"] * 4 + ["decoder", "cross"] * 4
    # T5's table of positions has a column for every head and belongs to all layers of a stack; cross has none.
    assert [site.in_step for site in found] == [True] * 4 + [True, False] * 4
    llama, _ = loaded_of("llama")
    assert {(site.heads, site.shared, site.groups) for site in sites(llama)} == {(4, 2, 2)}
    assert "llama" in FAMILIES
