"""What a recipe may ask of the engine, each against something that we did not write: torch, timm, a closed form."""

import copy
import importlib

import numpy as np
import pytest
import timm
import timm.optim
import torch
from timm.data import Mixup
from timm.layers import DropPath
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2Model, ViTConfig, ViTModel

from leansurgeon.errors import UsageError
from leansurgeon.measure.costs.memory import checkpoint_activations
from leansurgeon.models.timm_xcit import LeanXcit
from leansurgeon.training import data_loader, distributed, optimizer, preview, regularize
from leansurgeon.training.recipe.schema import Optim
from tests.support import training_interrupted as cut
from tests.support.training_standin import (
    Dots,
    StandIn,
    Words,
    dot_model,
    losses,
    recipe,
    run_training,
    trained,
    word_model,
)

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def small_vit(**changes) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **{"depth": 2, "num_heads": 2, "num_classes": 3} | changes)


def test_norms_biases_positions_and_class_tokens_are_not_decayed():
    models = {
        "cls_token pos_embed": small_vit(embed_dim=12),
        "embeddings.cls_token embeddings.position_embeddings": ViTModel(ViTConfig(**SMALL)),
        "embeddings.position_embeddings.weight": BertModel(BertConfig(**SMALL, vocab_size=9)),
        "wpe.weight": GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)),
    }
    for free, model in models.items():
        names = {id(p): n for n, p in model.named_parameters()}
        groups = optimizer.parameter_groups(model, 0.3)
        decayed, rest = ({names[id(p)] for p in group["params"]} for group in groups)
        assert decayed | rest == set(names.values()) and not decayed & rest
        assert {n for n in rest if model.get_parameter(n).ndim > 1} == set(free.split())
        assert all(model.get_parameter(n).ndim > 1 for n in decayed)
        assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adam", torch.optim.Adam, {}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9}),
        ("lamb", timm.optim.Lamb, {"max_grad_norm": None, "eps": 1e-8}),
    ],
)
def test_optimizers_are_those_of_torch_and_timm(name, kind, options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    other = copy.deepcopy(model)
    ours = optimizer.make_optimizer(model, Optim(name=name, lr=1e-2, weight_decay=0.1), fused=False)
    groups = [{"params": [other.weight], "weight_decay": 0.1}, {"params": [other.bias], "weight_decay": 0.0}]
    for net, stepper in ((model, ours), (other, kind(groups, lr=1e-2, **options))):
        for _ in range(3):
            stepper.zero_grad()
            net(torch.ones(2, 4)).pow(2).sum().backward()
            stepper.step()
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


def picture_batch(size: int) -> dict[str, torch.Tensor]:
    images = torch.arange(size * 48, dtype=torch.float32).reshape(size, 3, 4, 4)
    return {"pixel_values": images, "labels": torch.arange(size) % 3}


def test_mixing_is_timms_and_the_same_however_the_batch_is_cut():
    made = regularize.BatchMixing(recipe(mixup=0.8, cutmix=1.0, seed=5).train, cut.Pictures())
    theirs = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.0, num_classes=3)
    places = regularize.pairing_order(8, torch.device("cpu"))
    whole, kinds = picture_batch(8), set()

    def rows(images: torch.Tensor) -> list[list[float]]:
        """The images in whatever order."""
        return sorted(images.reshape(8, -1).tolist())

    before = np.random.get_state()[1].copy()
    for step in range(12):
        mixed = made(whole, 0, step)
        halves = [made({k: v[at : at + 4] for k, v in whole.items()}, 0, step)["pixel_values"] for at in (0, 4)]
        assert (np.random.get_state()[1] == before).all()
        np.random.seed(data_loader.mixing_seed(5, 0, step))
        images, labels = theirs(whole["pixel_values"][places].clone(), whole["labels"][places])
        before = np.random.get_state()[1].copy()
        assert torch.equal(mixed["pixel_values"], images) and torch.equal(mixed["labels"], labels)
        assert rows(torch.cat(halves)) == rows(images)
        kinds.add(bool((images == whole["pixel_values"][places]).any()))
    assert kinds == {True, False}  # cutmix and mixup both came
    with pytest.raises(UsageError, match=r"\bmixup\b.*'words'.*\bmasked-lm\b"):
        regularize.BatchMixing(recipe(mixup=0.8).train, Words())


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("davit.DaVit", {"depths": (1, 1, 3, 1), "embed_dims": (8, 16, 32, 64), "num_heads": (1, 2, 2, 2)}),
        ("cait.Cait", {"depth": 3, "embed_dim": 16, "num_heads": 2}),
        ("vision_transformer.VisionTransformer", {"depth": 4, "embed_dim": 12, "num_heads": 2}),
    ],
)
def test_drop_path_is_timms_in_every_module(name, small):
    module, cls = name.split(".")
    make = getattr(importlib.import_module(f"timm.models.{module}"), cls)
    theirs, ours = (make(**small, drop_path_rate=rate) for rate in (0.3, 0.0))
    regularize.set_drop_path(ours, 0.3, type(ours).__name__)
    rates = [
        {path: part.drop_prob for path, part in model.named_modules() if isinstance(part, DropPath) and part.drop_prob}
        for model in (theirs, ours)
    ]
    assert rates[0] and rates[1] == pytest.approx(rates[0])


def test_drop_path_of_a_model_with_heads_of_its_own_is_timms_too():
    """A class of ours is made of timm's: XCiT gives every block the whole rate."""
    ours = LeanXcit(depth=3, embed_dim=16, num_heads=3, head_dim=7, cls_num_heads=2)
    regularize.set_drop_path(ours, 0.3, "LeanXcit")
    assert [block.drop_path1.drop_prob for block in ours.blocks] == [0.3] * 3
    assert not any(getattr(part, "drop_prob", 0) for part in ours.cls_attn_blocks.modules())
    with pytest.raises(UsageError, match="do not support drop_path"):
        regularize.set_drop_path(word_model().model, 0.1, "WordModel")


def test_the_average_is_evaluated_and_exported(tmp_path):
    loaded, states = word_model(), []

    class Watched(Words):
        def batch(self, split, indices, **rest):
            states.append((split, copy.deepcopy(loaded.model.state_dict())))
            return super().batch(split, indices, **rest)

    once = {"every": "8st", "batch": 13}
    summary = run_training(tmp_path, loaded=loaded, task=Watched(), ema={"decay": 0.7}, eval=once)
    weights = [*[state for split, state in states if split == "train"][1:], states[-1][1]]
    average = dict(weights[0])  # timm: the first update copies
    for state in weights[1:]:
        average = {name: 0.7 * value + 0.3 * state[name] for name, value in average.items()}
    for name in ("model", "last"):
        saved = cut.weights(tmp_path, name)
        assert all(torch.allclose(saved[key], value, atol=1e-6) for key, value in average.items())
    assert not torch.allclose(average["head.weight"], loaded.model.state_dict()["head.weight"])
    assert summary.averaged


def test_half_precision_with_scaled_losses_learns_what_fp32_does(tmp_path):
    _, full = trained(tmp_path / "fp32")
    _, half = trained(tmp_path / "fp16", precision="fp16")
    assert losses(half) == pytest.approx(losses(full), abs=1e-2) and losses(half) != losses(full)
    # Clipped and told as they are, not as they were scaled: AdamW alone would not show the difference.
    norms = [(a["grad_norm"], b["grad_norm"]) for a, b in zip(full, half, strict=True) if b.get("grad_norm")]
    assert len(norms) >= 6 and all(ours == pytest.approx(wanted, rel=0.05) for wanted, ours in norms)
    assert distributed.make_scaler("fp16", torch.device("cpu")).get_scale() == 65536


def test_label_smoothing_is_for_training_alone(tmp_path):
    options = {"task": Dots(), "duration": "1st"}
    (_, plain), (_, smooth) = (
        trained(tmp_path / str(share), loaded=dot_model(), label_smoothing=share, **options) for share in (0.0, 0.2)
    )
    batch = Dots().batch("train", data_loader.epoch_order(0, 0, 64)[:16], seed=0, epoch=0)
    wanted = F.cross_entropy(dot_model().model(batch["pixel_values"]), batch["labels"], label_smoothing=0.2)
    assert losses(smooth)[0] == pytest.approx(wanted.item(), abs=1e-6)
    assert losses(smooth, "eval")[0] == losses(plain, "eval")[0]
    with pytest.raises(UsageError, match="label_smoothing is for classification"):
        run_training(tmp_path / "words", label_smoothing=0.1)


def test_activations_are_forgotten_and_gradients_are_the_same():
    torch.manual_seed(0)
    bert, vit = BertForMaskedLM(BertConfig(**SMALL, vocab_size=11)), small_vit(embed_dim=12, img_size=32)
    for model, x in ((bert, torch.arange(8)[None]), (vit, torch.randn(2, 3, 32, 32))):
        gradients = []
        model.train()
        for again in (False, True):
            if again:
                checkpoint_activations(model, "x")
            torch.manual_seed(1)
            model.zero_grad()
            out = model(x)
            (out if torch.is_tensor(out) else out.logits).pow(2).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
    with pytest.raises(UsageError, match=r"\bWordModel\b.*--checkpointing\b"):
        checkpoint_activations(word_model().model, "WordModel")


def test_flops_are_those_of_the_formula():
    """A ViT: 2 FLOPs a multiply-add, forward once and backward twice (input and weight gradients)."""
    width, depth, tokens, mlp = 32, 2, 17, 64
    model = small_vit(embed_dim=width, img_size=64, mlp_ratio=2)
    batch = {"pixel_values": torch.randn(1, 3, 64, 64), "labels": torch.zeros(1, dtype=torch.int64)}
    block = 2 * tokens * (4 * width**2 + 2 * width * mlp) + 4 * tokens**2 * width
    embed, head = 2 * 16 * 3 * 16 * 16 * width, 2 * width * 3
    wanted = 3 * (depth * block + head) + 2 * embed  # no gradient for the pixels
    assert preview.count_flops(StandIn(model, "pixel_values"), Dots(), batch) == wanted
